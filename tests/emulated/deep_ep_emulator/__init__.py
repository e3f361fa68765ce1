"""A `deep_ep` for the CPU: DeepEP's generations and HybridEP over gloo, by the contract alone.

It was written from the project's facts about these libraries (their arguments, limits, layouts and reported problems) and
not from the code that calls them, so that the two can disagree. It refuses what the real library refuses, fills with NaN
what the real library leaves undefined, and varies what it does not promise. `rules.RULES` lists every rule, its source and
whether hardware has confirmed it; where the facts are silent the strict reading is taken.

    with as_deep_ep("elastic") as deep_ep:      # in every rank of a gloo group; `import deep_ep` finds it
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=64, hidden=256)

| generation | variants (first: default) | what the module has |
|---|---|---|
| v1 | 1.2.1, legacy, int32 | Buffer; 1.2.1 has no topk_idx_t, and its EventHandle is in deep_ep_cpp |
| elastic | 2.1.0, 2.0.0 | Buffer, ElasticBuffer |
| ep25 | 2.5, sgl | EPBuffer; sgl: as `deep_ep_v25` beside a 2.1.0 `deep_ep` |
| hybrid | 2026-07, 2026-02, 2026-03, 2026-09 | HybridEPBuffer |

Not there: CUDA, streams, run-time compilation, several hosts, speed. Import it as `emulated.deep_ep_emulator` only: a
second name would make second classes.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from . import elastic, ep25, hybrid, v1
from .elastic_core import EPHandle
from .rules import RULES, Rule, table
from .shared import EventHandle, EventOverlap, NotEmulated, RuleBroken, seed_noise

__all__ = ["RULES", "VARIANTS", "NotEmulated", "Rule", "RuleBroken", "as_deep_ep", "failing_import", "install", "seed_noise", "table"]

VARIANTS = {
    "v1": ("1.2.1", "legacy", "int32"),
    "elastic": ("2.1.0", "2.0.0"),
    "ep25": ("2.5", "sgl"),
    "hybrid": ("2026-07", "2026-02", "2026-03", "2026-09"),
}
_HYBRID = {
    "2026-02": hybrid.HybridEPBuffer2602,
    "2026-03": hybrid.HybridEPBuffer2603,
    "2026-07": hybrid.HybridEPBuffer2607,
    "2026-09": hybrid.HybridEPBuffer2609,
}


def install(generation: str, variant: str | None = None) -> ModuleType:
    """A fresh module `deep_ep` (`deep_ep_v25` for ep25/sgl) of this generation; sys.modules is left alone.

    Args:
        generation: "v1", "elastic", "ep25" or "hybrid".
        variant: one of VARIANTS[generation]; None is its first.
    """
    return next(iter(_modules(generation, variant).values()))


@contextlib.contextmanager
def as_deep_ep(generation: str, variant: str | None = None, seed: int = 0) -> Iterator[ModuleType]:
    """Make `import deep_ep` find the emulator in this process, with its submodules and extension; yields the module.

    Args:
        generation, variant: as in `install`.
        seed: of row orders and undefined integers.
    """
    modules = _modules(generation, variant)
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] in _ROOTS}
    seed_noise(seed)
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield next(iter(modules.values()))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in _ROOTS]:
            del sys.modules[name]
        sys.modules.update(hidden)


@contextlib.contextmanager
def failing_import(error: Exception, name: str = "deep_ep") -> Iterator[None]:
    """`import deep_ep` raises `error`, as a broken build does (ImportError, OSError, or AssertionError for a wrong NCCL)."""
    finder = _Failing(name, error)
    hidden = {key: module for key, module in sys.modules.items() if key.split(".")[0] == name}
    for key in hidden:
        del sys.modules[key]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(hidden)


class _Failing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name: str, error: Exception) -> None:
        self._name, self._error = name, error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        raise self._error


_ROOTS = ("deep_ep", "deep_ep_cpp", "deep_ep_v25", "hybrid_ep_cpp")


def _modules(generation: str, variant: str | None) -> dict[str, ModuleType]:
    """Modules by name, the generation's own first."""
    if generation not in VARIANTS:
        raise ValueError(f"generation {generation!r}: expected one of {', '.join(VARIANTS)}")
    variant = variant or VARIANTS[generation][0]
    if variant not in VARIANTS[generation]:
        raise ValueError(f"variant {variant!r} of {generation}: expected one of {', '.join(VARIANTS[generation])}")
    if generation == "v1" and variant == "1.2.1":
        extension = _module("deep_ep_cpp", {"EventHandle": EventHandle, "Config": v1.Config})
        utils = _module("deep_ep.utils", {"EventOverlap": EventOverlap, "EventHandle": EventHandle})
        return _package(
            "deep_ep", "1.2.1", {"Buffer": _fresh(v1.Buffer), "Config": v1.Config, "EventOverlap": EventOverlap}, [utils, extension]
        )
    if generation == "v1":
        index = torch.int32 if variant == "int32" else torch.int64
        return _package("deep_ep", "2.1.0", *_legacy(index, "deep_ep_cpp"))
    if generation == "elastic":
        return _elastic(variant)
    if generation == "ep25":
        names = {"EPBuffer": _fresh(ep25.EPBuffer), "EPHandle": EPHandle, "EventOverlap": EventOverlap, "EventHandle": EventHandle}
        name = "deep_ep_v25" if variant == "sgl" else "deep_ep"
        modules = _package(name, "2.5.0", {**names, "topk_idx_t": torch.int64}, [_module(f"{name}._C", {})])
        return {**modules, **(_elastic("2.1.0") if variant == "sgl" else {})}
    buffer = _HYBRID[variant]
    found = _fresh(buffer, "HybridEPBuffer")
    parts = [_module("deep_ep.hybrid_ep_buffer", {"HybridEPBuffer": found}), _module("hybrid_ep_cpp", {})]
    return _package("deep_ep", "1.2.1", {"HybridEPBuffer": found}, parts)


def _legacy(index: torch.dtype, extension: str) -> tuple[dict[str, Any], list[ModuleType]]:
    """V1's names inside a 2.x package: deep_ep.utils is a package without EventHandle."""
    buffer = _fresh(v1.Buffer, topk_idx_dtype=index)
    names = {"Buffer": buffer, "Config": v1.Config, "EventOverlap": EventOverlap, "EventHandle": EventHandle, "topk_idx_t": index}
    parts = [
        _module("deep_ep.utils", {"EventOverlap": EventOverlap}, package=True),
        _module("deep_ep.buffers", {}, package=True),
        _module("deep_ep.buffers.legacy", {"Buffer": buffer}),
        _module(extension, {"EventHandle": EventHandle, "Config": v1.Config}),
    ]
    return names, parts


def _elastic(version: str) -> dict[str, ModuleType]:
    names, parts = _legacy(torch.int64, "deep_ep._C")
    buffer = _fresh(elastic.ElasticBuffer200 if version == "2.0.0" else elastic.ElasticBuffer, "ElasticBuffer")
    return _package("deep_ep", version, {**names, "ElasticBuffer": buffer, "EPHandle": EPHandle}, parts)


def _fresh(base: type, name: str | None = None, **attributes: Any) -> type:
    """A subclass, so that what is set on the class (V1's SM count) ends with this module."""
    return type(name or base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **attributes})


def _module(name: str, names: dict[str, Any], package: bool = False) -> ModuleType:
    module = ModuleType(name)
    # importlib.util.find_spec must work on it.
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=package)
    if package:
        module.__path__ = []
    vars(module).update(names)
    return module


def _package(name: str, version: str, names: dict[str, Any], parts: list[ModuleType]) -> dict[str, ModuleType]:
    root = _module(name, {**names, "__version__": version}, package=True)
    modules = {name: root}
    for part in parts:
        modules[part.__name__] = part
    for part in parts:
        parent, _, child = part.__name__.rpartition(".")
        if parent:
            setattr(modules[parent], child, part)
    return modules
