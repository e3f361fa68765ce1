"""DeepEP's generations and HybridEP on the CPU: the real managers over the emulated libraries of `tests/emulated`.

Each generation (and each variant of it that an installed library may be) is a dispatcher of its own name here, so that it
goes through the registry like any other. What differs from the product is the one method that hands out the library,
since the real one asks for CUDA first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from emulated.deep_ep_emulator import as_deep_ep
from nemo_moe.availability import GENERATIONS, Generation
from nemo_moe.moe.dispatch.buffers import destroy_buffers
from nemo_moe.moe.dispatch.deepep import _DeepepManager
from nemo_moe.moe.dispatch.hybridep import _HybridEPManager
from nemo_moe.registry import DISPATCHERS

_libraries: list[ModuleType] = []  # the one in place


class EmulatedDeepep(_DeepepManager):
    @classmethod
    def library(cls) -> ModuleType:
        return _libraries[-1]

    @classmethod
    def found_generation(cls, library: ModuleType) -> Generation:
        (found,) = [generation for generation in GENERATIONS if generation.name == cls.generation]
        assert hasattr(library, found.buffer)
        return found


class EmulatedV1(EmulatedDeepep):
    generation = "v1"


class EmulatedElastic(EmulatedDeepep):
    generation = "elastic"


class EmulatedEP25(EmulatedDeepep):
    generation = "ep25"


class EmulatedHybridEP(_HybridEPManager):
    @classmethod
    def library(cls) -> ModuleType:
        return _libraries[-1]


class EmulatedFusedHybridEP(EmulatedHybridEP):
    fuse_permutation = True


@dataclass(frozen=True)
class Emulation:
    """generation, variant: of the emulator. manager: above. multiple: of hidden sizes."""

    generation: str
    variant: str | None
    manager: type
    multiple: int

    @property
    def stands_for(self) -> str:
        return "hybridep" if self.generation == "hybrid" else "deepep"


EMULATED = {
    "deepep_v1": Emulation("v1", None, EmulatedV1, 16),
    "deepep_elastic": Emulation("elastic", None, EmulatedElastic, 256),
    "deepep_ep25": Emulation("ep25", None, EmulatedEP25, 256),
    "hybridep_emulated": Emulation("hybrid", None, EmulatedHybridEP, 16),
}
VARIANTS = {
    "deepep_v1_in_2": Emulation("v1", "legacy", EmulatedV1, 16),
    "deepep_v1_int32": Emulation("v1", "int32", EmulatedV1, 16),
    "deepep_v1_beside_elastic": Emulation("elastic", None, EmulatedV1, 16),
    "deepep_ep25_sgl": Emulation("ep25", "sgl", EmulatedEP25, 256),
    "hybridep_2602": Emulation("hybrid", "2026-02", EmulatedHybridEP, 16),
    "hybridep_2603": Emulation("hybrid", "2026-03", EmulatedHybridEP, 16),
    "hybridep_2603_fused": Emulation("hybrid", "2026-03", EmulatedFusedHybridEP, 16),
    "hybridep_2607_fused": Emulation("hybrid", "2026-07", EmulatedFusedHybridEP, 16),
    "hybridep_2609": Emulation("hybrid", "2026-09", EmulatedHybridEP, 16),
}
_ALL = {**EMULATED, **VARIANTS}


@contextmanager
def emulated(name: str, seed: int = 0) -> Iterator[ModuleType]:
    """The library behind `name` in place, `name` a dispatcher; its buffers are freed at the end. Collective."""
    emulation = _ALL[name]
    spec = dataclasses.replace(
        DISPATCHERS.get(emulation.stands_for),
        target=f"{__name__}:{emulation.manager.__name__}",
        devices=("cpu",),
        requires=(),
        hidden_size_multiple_of=emulation.multiple,
    )
    DISPATCHERS.register(name, spec)
    try:
        with as_deep_ep(emulation.generation, emulation.variant, seed) as library:
            _libraries.append(library)
            yield library
            destroy_buffers(emulation.stands_for)
    finally:
        _libraries.clear()
        DISPATCHERS.unregister(name)
