"""The gmm and te experts on the CPU: the real classes over the emulated libraries of `tests/emulated`.

Each library is an experts backend of its own name here, so that it goes through the registry like any other. What differs
from the product is the one method that hands out the library, since the real one asks for CUDA first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from emulated.experts_emulator import grouped_gemm, recipes, transformer_engine
from nemo_moe.moe.experts.gmm import GmmExperts
from nemo_moe.moe.experts.te import TEExperts
from nemo_moe.registry import EXPERTS, ExpertsSpec


class GmmOfTgale96(GmmExperts):
    @classmethod
    def library(cls) -> ModuleType:
        return grouped_gemm("tgale96")


class GmmOfNvidia(GmmExperts):
    @classmethod
    def library(cls) -> ModuleType:
        return grouped_gemm("nvidia")


_NEW, _OLD, _RECIPES = transformer_engine(), transformer_engine(packed_gradients=False), recipes()


class NewTE(TEExperts):
    @classmethod
    def library(cls) -> ModuleType:
        return _NEW

    @classmethod
    def recipes(cls) -> ModuleType:
        return _RECIPES


class OldTE(NewTE):
    @classmethod
    def library(cls) -> ModuleType:
        return _OLD


EMULATED_EXPERTS = {"gmm_tgale96": GmmOfTgale96, "gmm_nvidia": GmmOfNvidia, "te_new": NewTE, "te_old": OldTE}


@contextmanager
def emulated_experts() -> Iterator[None]:
    """All of them registered, with what the product's entries say, but for the device."""
    for name, experts in EMULATED_EXPERTS.items():
        spec = EXPERTS.get(name.partition("_")[0])
        EXPERTS.register(
            name,
            ExpertsSpec(
                target=f"{__name__}:{experts.__name__}",
                summary=spec.summary,
                precisions=spec.precisions,
                row_bytes_multiple_of=spec.row_bytes_multiple_of,
                fp8=spec.fp8,
            ),
        )
    try:
        yield
    finally:
        for name in EMULATED_EXPERTS:
            EXPERTS.unregister(name)
