"""DeepEP's generations and HybridEP on the CPU: the real managers over the emulated libraries of `tests/emulated`.

Each generation is a dispatcher of its own name here, so that it goes through the registry like any other. What differs
from the product is the one method that hands out the library, since the real one asks for CUDA first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from emulated.deep_ep_emulator import as_deep_ep

from nemo_moe.availability import GENERATIONS, Generation
from nemo_moe.moe.dispatch.buffers import destroy_buffers
from nemo_moe.moe.dispatch.deepep import _DeepepManager
from nemo_moe.moe.dispatch.hybridep import _HybridEPManager
from nemo_moe.registry import DISPATCHERS, DispatcherSpec


class EmulatedDeepep(_DeepepManager):
    @classmethod
    def library(cls) -> ModuleType:
        return sys.modules["deep_ep"]

    @classmethod
    def found_generation(cls, library: ModuleType) -> Generation:
        (found,) = [generation for generation in GENERATIONS if hasattr(library, generation.buffer)]
        return found


class EmulatedHybridEP(_HybridEPManager):
    @classmethod
    def library(cls) -> ModuleType:
        return sys.modules["deep_ep"]


# Our name -> the emulator's name of the generation, manager, the registry entry it stands for, and its step of hidden sizes.
EMULATED = {
    "deepep_v1": ("v1", "EmulatedDeepep", "deepep", 16),
    "deepep_elastic": ("elastic", "EmulatedDeepep", "deepep", 256),
    "deepep_ep25": ("ep25", "EmulatedDeepep", "deepep", 256),
    "hybridep_emulated": ("hybrid", "EmulatedHybridEP", "hybridep", 16),
}


@contextmanager
def emulated(name: str) -> Iterator[ModuleType]:
    """The library behind `name` in place, `name` a dispatcher; its buffers are freed at the end. Collective."""
    generation, manager, stands_for, multiple = EMULATED[name]
    spec = DISPATCHERS.get(stands_for)
    DISPATCHERS.register(
        name,
        DispatcherSpec(
            target=f"{__name__}:{manager}",
            summary=spec.summary,
            precisions=spec.precisions,
            capturable=spec.capturable,
            async_dispatch=spec.async_dispatch,
            merges_duplicates=spec.merges_duplicates,
            num_sms_multiple_of=spec.num_sms_multiple_of,
            hidden_size_multiple_of=multiple,
        ),
    )
    try:
        with as_deep_ep(generation) as library:
            yield library
            destroy_buffers(stands_for)
    finally:
        DISPATCHERS.unregister(name)
