"""Names of backends: what is legal, what a wrong one says, and that data about backends loads none of them."""

from __future__ import annotations

import pytest

from nemo_moe.config import BackendConfig
from nemo_moe.registry import DISPATCHERS, EXPERTS, MODELS, BackendSpec, DispatcherSpec, Registry, load_target


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
    registry: Registry[DispatcherSpec] = Registry("backend.dispatcher")
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


def test_asynchronous_dispatch_is_refused_where_there_is_none_b33() -> None:
    """The configuration part of case B33."""
    with pytest.raises(ValueError) as caught:
        BackendConfig(dispatcher="all_to_all", dispatcher_async_dispatch=True)
    assert "'all_to_all' has no asynchronous mode" in str(caught.value)
