"""Experts by the package `grouped_gemm`: bf16, counts on the host.

Two packages have that import name, tgale96's `grouped_gemm` and NVIDIA's fork `nv-grouped-gemm`; both work here. What they
share is all that is used: `ops.gmm(a, b, batch_sizes, trans_b)` with int64 counts on the CPU. What they do not share:

- NVIDIA's asserts that some count is above 0; a rank without rows does not call it.
- tgale96's also takes counts on the device, where it was built with its CUTLASS switch. Nothing tells such a build from
  the other, and a call that guesses wrong raises, so it is not used: `grouped_mm` is the backend without a host wait.
- NVIDIA's has permute and unpermute; dispatch has grouped the rows already.

The stored layout is theirs with `trans_b`, so weights are neither copied nor viewed. They leave rows past the counts
uninitialised and promise nothing about the gradient of an expert without rows: such rows are cut off and such gradients
zeroed (`host_counts`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from nemo_moe.availability import load_gmm
from nemo_moe.moe.experts.host_counts import HostCountExperts


class GmmExperts(HostCountExperts):
    """Experts computed by `grouped_gemm.ops.gmm`.

    Cost: one host synchronisation a layer; a launch per expert and matmul, on four streams with NVIDIA's package.
    """

    NAME = "gmm"

    def __init__(self, num_experts: int, hidden_size: int, moe_intermediate_size: int) -> None:
        super().__init__(num_experts, hidden_size, moe_intermediate_size)
        self._gmm: Callable[..., Tensor] = gmm_of(self.library())

    @classmethod
    def library(cls) -> ModuleType:
        """The package. Raises ImportError naming what is missing, and the fix."""
        return load_gmm()

    @classmethod
    def check_available(cls, fp8: str | None = None) -> None:
        """Raise ImportError naming what this machine lacks and the fix; return where nothing is missing."""
        gmm_of(cls.library())

    def grouped_linear(self, rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        if rows.dtype is not torch.bfloat16:
            raise ValueError(f"experts 'gmm' compute in torch.bfloat16, found {rows.dtype}; set precision to bf16, or choose other experts")
        batch_sizes = torch.tensor(counts, dtype=torch.int64)
        return self._gmm(rows.contiguous(), weights.contiguous(), batch_sizes, trans_b=True)


def gmm_of(library: ModuleType) -> Callable[..., Tensor]:
    """`ops.gmm` of either package. Raises ImportError where the module of that name is neither."""
    found = getattr(getattr(library, "ops", None), "gmm", None)
    if found is None:
        raise ImportError(
            f"gmm: the installed module {library.__name__} has no ops.gmm, so it is neither of the packages grouped_gemm and"
            " nv-grouped-gemm; uninstall it, and: pip install 'nemo_moe[gmm]'"
        )
    gmm: Callable[..., Tensor] = found
    return gmm
