"""Root-mean-square norm, rounded where Hugging Face's models round.

The mean of squares and the division are fp32; the normalised value goes back to the input's dtype *before* it meets the
weight. `torch.nn.functional.rms_norm` multiplies first and rounds once, which differs in bf16, so it is not used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Attributes:
        weight: [size].
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., size] in any floating dtype -> the same shape; the dtype is that of weight * hidden_states."""
        wide = hidden_states.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
