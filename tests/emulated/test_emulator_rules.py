"""The table of rules is whole: each refusal has a case that breaks it, each behaviour a test that shows it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from emulated import test_emulator_elastic, test_emulator_hybrid, test_emulator_v1
from emulated.deep_ep_emulator import RULES, VARIANTS, as_deep_ep, failing_import, install, table
from emulated.deep_ep_emulator.rules import CONFIRMED, CONTRADICTED

HERE = Path(__file__).parent
OUT_OF_REACH = {"hybrid.ranks": "needs 73 ranks"}
NAMES = {
    ("v1", "1.2.1"): {"Buffer"},
    ("v1", "legacy"): {"Buffer", "topk_idx_t", "EventHandle"},
    ("elastic", "2.1.0"): {"Buffer", "ElasticBuffer", "topk_idx_t", "EventHandle"},
    ("ep25", "2.5"): {"EPBuffer", "topk_idx_t", "EventHandle"},
    ("hybrid", "2026-07"): {"HybridEPBuffer"},
}


def of_kind(kind: str) -> set[str]:
    return {name for name, rule in RULES.items() if rule.kind == kind}


def test_every_refusal_has_a_case() -> None:
    cases: set[str] = set(OUT_OF_REACH)
    for module in (test_emulator_v1, test_emulator_elastic, test_emulator_hybrid):
        cases |= set(module.CASES) | set(getattr(module, "OTHER_CASES", {}))
    assert cases == of_kind("refused")


def test_every_refusal_is_in_the_code_and_the_other_way_round() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in (HERE / "deep_ep_emulator").glob("*.py") if file.name != "rules.py")
    named = set(re.findall(r'"((?:any|v1|elastic|ep25|hybrid)\.[a-z0-9_]+)"', code))
    shared = re.findall(r'f"\{generation\}\.([a-z0-9_]+)"', code)
    assert named | {f"{generation}.{name}" for generation in ("v1", "elastic") for name in shared} == of_kind("refused")


def test_every_behaviour_is_named_by_the_test_that_shows_it() -> None:
    texts = "".join(file.read_text(encoding="utf-8") for file in HERE.glob("test_emulator_*.py"))
    shown = {name for line in re.findall(r'"""rules? (.*?)"""', texts) for name in line.split(", ")}
    assert shown == of_kind("behaviour")


def test_states_are_those_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(CONFIRMED) | set(CONTRADICTED) <= set(RULES) and not set(CONFIRMED) & set(CONTRADICTED)
    for name, rule in RULES.items():
        assert (rule.state == "unconfirmed") == (name not in {**CONFIRMED, **CONTRADICTED})
        assert rule.source and rule.text and rule.kind in ("refused", "behaviour", "not emulated")
    with capsys.disabled():
        counts = ", ".join(f"{len(of_kind(kind))} {kind}" for kind in ("refused", "behaviour", "not emulated"))
        print(f"\nemulator: {len(RULES)} rules ({counts}); {len(CONFIRMED)} confirmed on hardware, {len(CONTRADICTED)} contradicted")
    assert len(table().splitlines()) == len(RULES)


# ---- how it is put in place ----


@pytest.mark.parametrize(("generation", "variant"), [(name, variant) for name, variants in VARIANTS.items() for variant in variants])
def test_import_finds_it_and_then_what_was_there_before(generation: str, variant: str) -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith(("deep_ep", "hybrid_ep"))}
    with as_deep_ep(generation, variant) as module:
        assert importlib.import_module(module.__name__) is module and importlib.util.find_spec(module.__name__) is not None
        wanted = NAMES.get((generation, variant))
        names = {"Buffer", "ElasticBuffer", "EPBuffer", "HybridEPBuffer", "topk_idx_t", "EventHandle"}
        assert wanted is None or {name for name in names if hasattr(module, name)} == wanted
    assert before == {name: module for name, module in sys.modules.items() if name.startswith(("deep_ep", "hybrid_ep"))}
    assert install(generation, variant) is not module and module.__name__ == ("deep_ep_v25" if variant == "sgl" else "deep_ep")


def test_event_modules_are_where_each_version_has_them() -> None:
    with as_deep_ep("v1"):
        from deep_ep.utils import EventHandle, EventOverlap  # type: ignore[import-not-found]
        from deep_ep_cpp import EventHandle as Extension  # type: ignore[import-not-found]

        assert EventHandle is Extension
        EventOverlap(EventHandle()).current_stream_wait()
    with as_deep_ep("elastic") as module:
        with pytest.raises(ImportError):
            from deep_ep.utils import EventHandle
        from deep_ep.buffers.legacy import Buffer  # type: ignore[import-not-found]

        assert Buffer is module.Buffer and module.EventHandle
    with as_deep_ep("ep25", "sgl"):
        import deep_ep  # type: ignore[import-not-found]
        import deep_ep_v25  # type: ignore[import-not-found]

        assert hasattr(deep_ep, "ElasticBuffer") and hasattr(deep_ep_v25, "EPBuffer")
    with as_deep_ep("hybrid") as module:
        from deep_ep.hybrid_ep_buffer import HybridEPBuffer  # type: ignore[import-not-found]

        assert HybridEPBuffer is module.HybridEPBuffer


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol"), OSError("libnccl"), AssertionError("NCCL")], ids=lambda error: type(error).__name__
)
def test_a_broken_build_fails_when_imported(error: Exception) -> None:
    with failing_import(error), pytest.raises(type(error), match=str(error)):
        importlib.import_module("deep_ep")
    assert importlib.util.find_spec("deep_ep") is None or importlib.import_module("deep_ep")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="v1, elastic, ep25, hybrid"):
        install("v3")
    with pytest.raises(ValueError, match=r"2\.1\.0, 2\.0\.0"):
        install("elastic", "2.2")
