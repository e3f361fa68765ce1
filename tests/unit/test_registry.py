"""Names of backends: what is legal, what a wrong one says, and that data about backends loads none of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_moe.compose import ConfigError, load_recipe
from nemo_moe.config import BackendConfig, DistributedConfig, Precision
from nemo_moe.registry import (
    DISPATCHERS,
    ENTRY_POINTS,
    EXPERTS,
    MODELS,
    PRECISIONS,
    BackendSpec,
    DispatcherSpec,
    ExpertsSpec,
    Registry,
    _loaded_entry_points,
    load_target,
)
from nemo_moe.resolve import resolve


def test_every_registered_name_loads_a_class_of_its_kind() -> None:
    from nemo_moe.moe.dispatch.base import DispatchManager
    from nemo_moe.moe.experts.base import Experts

    for registry, base in ((DISPATCHERS, DispatchManager), (EXPERTS, Experts)):
        for name in registry:
            if not registry.get(name).requires:
                assert issubclass(registry.load(name), base)
    for name in MODELS:
        spec = MODELS.get(name)
        assert callable(MODELS.load(name)) and callable(load_target(spec.config).from_hf)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path that looks like an installed package `toy_backends` with an entry point of ours."""
    info = tmp_path / "toy_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backends\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntoy = toy_backends\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "toy_backends.py"
    sys.modules.pop("toy_backends", None)
    if "toy" in DISPATCHERS._specs:
        DISPATCHERS.unregister("toy")
    for entry_point in [entry for entry in _loaded_entry_points if entry.name == "toy"]:
        _loaded_entry_points.discard(entry_point)


TOY = """
from nemo_moe import DISPATCHERS, DispatcherSpec
from nemo_moe.moe.dispatch.local import _LocalManager

assert "all_to_all" in DISPATCHERS and list(DISPATCHERS), "it may ask the registry while it is imported"

class Manager(_LocalManager):
    pass

DISPATCHERS.register("toy", DispatcherSpec(target="toy_backends:Manager", summary="a toy"))
"""


def test_a_dispatcher_of_an_installed_package_is_found_by_its_name_in_a_recipe(package: Path) -> None:
    """As every rank finds it: nothing here imports the package. What is known needs no look at it."""
    package.write_text(TOY, encoding="utf-8")
    assert BackendConfig().dispatcher == "all_to_all" and "toy_backends" not in sys.modules
    config = load_recipe("demo", ["backend.dispatcher=toy"])
    assert config.backend.dispatcher == "toy"
    assert DISPATCHERS.load("toy").__module__ == "toy_backends"
    assert list(DISPATCHERS).count("toy") == 1


def test_a_dispatcher_of_an_installed_package_is_among_the_legal_names(package: Path) -> None:
    package.write_text(TOY, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        DISPATCHERS.get("toi")
    assert "did you mean 'toy'?" in str(caught.value)


def test_a_package_that_cannot_be_imported_is_named_where_a_name_is_unknown(package: Path) -> None:
    package.write_text("import no_such_library_here\n", encoding="utf-8")
    assert BackendConfig().dispatcher == "all_to_all", "a run that does not ask for it is not disturbed"
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            load_recipe("demo", ["backend.dispatcher=toy"])
        for part in ("toy = toy_backends", "package toy-backends", "No module named 'no_such_library_here'", "uninstall it"):
            assert part in str(caught.value), str(caught.value)


def test_auto_is_no_dispatcher_yet_and_the_message_lists_those_that_are_b30() -> None:
    """case B30: nothing is chosen by what happens to be installed; so far there is no choice to leave open."""
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", ["backend.dispatcher=auto"])
    assert "backend.dispatcher: unknown value 'auto'" in str(caught.value)
    legal = str(caught.value).partition("legal: ")[2]
    assert all(name in legal for name in DISPATCHERS) and "all_to_all" in legal


def test_an_unknown_name_lists_the_legal_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        DISPATCHERS.get("al_to_all")
    assert "backend.dispatcher: unknown value 'al_to_all'; did you mean 'all_to_all'?" in str(caught.value)
    for name in DISPATCHERS:
        assert name in str(caught.value).partition("legal")[2]


@pytest.mark.parametrize(("registry", "foreign", "ours"), [(DISPATCHERS, "torch", "all_to_all"), (EXPERTS, "torch_mm", "grouped_mm")])
def test_a_name_of_another_framework_is_refused_with_ours(registry: Registry[BackendSpec], foreign: str, ours: str) -> None:
    with pytest.raises(ValueError) as caught:
        registry.get(foreign)
    assert f"here it is {ours!r}" in str(caught.value)


def test_a_missing_library_is_named_with_the_extra_that_installs_it() -> None:
    registry = Registry("backend.dispatcher", DispatcherSpec, base="nemo_moe.moe.dispatch.base:DispatchManager")
    registry.register("fast", DispatcherSpec(target="a:B", summary="", requires=("no_such_library_here",), extra="fast"))
    registry.register("odd", DispatcherSpec(target="a:B", summary="", requires=("no_such_library_here",)))
    with pytest.raises(ImportError) as caught:
        registry.load("fast")
    assert "needs the package no_such_library_here" in str(caught.value) and "pip install 'nemo_moe[fast]'" in str(caught.value)
    with pytest.raises(ImportError) as caught:
        registry.load("odd")
    assert "no_such_library_here" in str(caught.value)


def test_a_name_is_registered_once_and_can_be_taken_out_again() -> None:
    spec = DispatcherSpec(target="a:B", summary="")
    DISPATCHERS.register("of_our_own", spec)
    try:
        with pytest.raises(ValueError) as caught:
            DISPATCHERS.register("of_our_own", spec)
        assert "already registered (a:B)" in str(caught.value)
        assert BackendConfig(dispatcher="of_our_own").dispatcher == "of_our_own"
    finally:
        DISPATCHERS.unregister("of_our_own")
    assert "of_our_own" not in DISPATCHERS


@pytest.mark.parametrize("value", [21, 0, -2])
def test_a_number_of_sms_that_the_dispatcher_cannot_use_is_refused_with_the_rule_b31(value: int) -> None:
    """The configuration part of case B31, on a dispatcher that has the knob."""
    DISPATCHERS.register("with_sms", DispatcherSpec(target="a:B", summary="", num_sms_multiple_of=2))
    try:
        assert BackendConfig(dispatcher="with_sms", dispatcher_num_sms=20).dispatcher_num_sms == 20
        with pytest.raises(ValueError) as caught:
            BackendConfig(dispatcher="with_sms", dispatcher_num_sms=value)
        assert f"positive multiple of 2 for 'with_sms', found {value}" in str(caught.value)
    finally:
        DISPATCHERS.unregister("with_sms")


@pytest.mark.parametrize(("written", "found"), [("20", 20), ("'20'", 20), ('"20"', 20), ("21", None), ('"21"', None)])
def test_a_number_of_sms_in_a_recipe_may_stand_in_quotes_b31(written: str, found: int | None) -> None:
    """case B31, from the recipe's text to the number: "20" is 20, 21 is refused for a dispatcher that wants an even number."""
    DISPATCHERS.register("with_sms", DispatcherSpec(target="a:B", summary="", num_sms_multiple_of=2))
    changes = ["backend.dispatcher=with_sms", f"backend.dispatcher_num_sms={written}"]
    try:
        if found is not None:
            value = load_recipe("demo", changes).backend.dispatcher_num_sms
            assert value == found and type(value) is int
            return
        with pytest.raises(ConfigError) as caught:
            load_recipe("demo", changes)
        assert "backend.dispatcher_num_sms must be a positive multiple of 2 for 'with_sms', found 21" in str(caught.value)
    finally:
        DISPATCHERS.unregister("with_sms")


def test_a_number_of_sms_is_refused_where_there_is_no_such_knob_b31() -> None:
    """case B31: for every dispatcher without the knob the option would do nothing."""
    for name in [name for name in DISPATCHERS if DISPATCHERS.get(name).num_sms_multiple_of is None]:
        with pytest.raises(ConfigError) as caught:
            load_recipe("demo", [f"backend.dispatcher={name}", "backend.dispatcher_num_sms='20'"])
        assert f"dispatcher_num_sms is 20, but the dispatcher {name!r} has no such knob; set it to null" in str(caught.value)


def test_there_is_one_table_of_precisions() -> None:
    assert [precision.value for precision in Precision] == list(PRECISIONS)


def test_asynchronous_dispatch_is_refused_where_there_is_none_b33() -> None:
    """The configuration part of case B33."""
    with pytest.raises(ValueError) as caught:
        BackendConfig(dispatcher="all_to_all", dispatcher_async_dispatch=True)
    assert "'all_to_all' has no asynchronous mode" in str(caught.value)


def test_a_package_that_ends_the_program_when_it_is_imported_is_a_message_too(package: Path) -> None:
    package.write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"toy = toy_backends .* cannot be loaded \(SystemExit: 0\)"):
        load_recipe("demo", ["backend.dispatcher=toy"])


@pytest.mark.parametrize(
    ("name", "spec", "hint"),
    [
        ("", DispatcherSpec(target="a:B", summary=""), "a name must be text of letters"),
        (3, DispatcherSpec(target="a:B", summary=""), "a name must be text of letters, digits, '_', '-' and '.', found 3"),
        ("mine", {}, "'mine' needs a spec of type DispatcherSpec, found dict"),
        ("mine", ExpertsSpec(target="a:B", summary=""), "'mine' needs a spec of type DispatcherSpec, found ExpertsSpec"),
    ],
)
def test_what_is_registered_has_a_name_that_a_recipe_can_hold_and_a_spec_of_its_kind(name: Any, spec: Any, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        DISPATCHERS.register(name, spec)
    assert "backend.dispatcher: " in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("nemo_moe.nothing:Manager", "registered as nemo_moe.nothing:Manager, which cannot be loaded (ModuleNotFoundError"),
        ("toy_parts:Missing", "registered as toy_parts:Missing, which cannot be loaded (AttributeError"),
        ("toy_parts:Empty", "registered as toy_parts:Empty, which is no subclass of DispatchManager"),
        ("toy_parts:number", "which is no subclass of DispatchManager"),
        ("toy_parts:Half", "registered as toy_parts:Half, which does not define combine, redispatch"),
        ("toy_exit:Manager", "which cannot be loaded (SystemExit: 3)"),
    ],
)
def test_a_registration_that_cannot_run_is_refused_before_there_are_ranks(
    target: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_parts.py").write_text(PARTS, encoding="utf-8")
    (tmp_path / "toy_exit.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    DISPATCHERS.register("broken", DispatcherSpec(target=target, summary=""))
    config = load_recipe("demo", ["backend.dispatcher=broken", "device=cpu"])
    try:
        with pytest.raises((ValueError, ImportError)) as caught:
            resolve(config, 2)
        assert str(caught.value).startswith("backend.dispatcher: 'broken' is registered as ") and hint in str(caught.value)
        assert resolve(replace(config, distributed=DistributedConfig(ep_size=1)), 2).sizes.ep == 1, "without token traffic it is not asked"
    finally:
        DISPATCHERS.unregister("broken")
        for module in ("toy_parts", "toy_exit"):
            sys.modules.pop(module, None)


PARTS = """
from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.dispatch.local import _LocalManager

number = 3

class Empty:
    pass

class Half(DispatchManager):
    def dispatch(self, hidden_states, topk_idx, topk_weights):
        raise NotImplementedError

class Unavailable(_LocalManager):
    @classmethod
    def check_available(cls):
        raise ValueError("backend.dispatcher 'broken' needs a link between the GPUs, and here is none")
"""


def test_a_dispatcher_is_asked_before_there_are_ranks_whether_this_machine_has_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_parts.py").write_text(PARTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    DISPATCHERS.register("broken", DispatcherSpec(target="toy_parts:Unavailable", summary=""))
    config = load_recipe("demo", ["backend.dispatcher=broken", "device=cpu"])
    try:
        with pytest.raises(ValueError, match="needs a link between the GPUs, and here is none"):
            resolve(config, 2)
        assert resolve(replace(config, distributed=DistributedConfig(ep_size=1)), 2).sizes.ep == 1
    finally:
        DISPATCHERS.unregister("broken")
        sys.modules.pop("toy_parts", None)


@pytest.mark.parametrize("module", ["no_such_library_here.part", "json.no_such_part"])
def test_a_missing_part_of_a_library_is_named_like_a_missing_library(module: str) -> None:
    EXPERTS.register("odd", ExpertsSpec(target="a:B", summary="", requires=(module,), extra="odd"))
    try:
        with pytest.raises(ImportError) as caught:
            EXPERTS.check_installed("odd")
        assert f"needs the package {module}, which is not installed" in str(caught.value)
    finally:
        EXPERTS.unregister("odd")
