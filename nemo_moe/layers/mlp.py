"""The dense feed-forward layer: SwiGLU, with Hugging Face's parameter names."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), no biases.

    Args:
        hidden_size: H.
        intermediate_size: width of the middle.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return output
