"""Causal self-attention with grouped key/value heads, on torch's scaled_dot_product_attention.

Padding is on the right, so no padding mask is needed: under the causal mask a real token sees only tokens to its left,
all of them real. What a padding position computes is finite and nobody reads it. Without a mask tensor torch can pick
its flash kernels. Left padding would be wrong; the decoder refuses it.

Left out on purpose: a key/value cache, and sequences packed into one row (they would see one another).

B batch, S sequence, H hidden size, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_moe.layers.rms_norm import RMSNorm
from nemo_moe.layers.rope import apply_rotary


class Attention(nn.Module):
    """Self-attention with rotary positions.

    Args:
        hidden_size: H.
        num_heads: N. num_kv_heads: G, a divisor of N; each serves N / G query heads.
        head_dim: D; N * D need not be H.
        bias: whether the four projections have a bias.
        qk_norm_eps: epsilon of an RMS norm over D of each query and key head, before the rotation; None has no norm.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None sees all before it.
        dropout: probability of dropping an attention weight while training.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.grouped = num_heads != num_kv_heads
        self.sliding_window = sliding_window
        self.dropout = dropout
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend.

        Args:
            hidden_states: [B, S, H].
            cos, sin: [B or 1, S, D] in the dtype of hidden_states, from `RotaryEmbedding`.

        Returns:
            [B, S, H].
        """
        query, key, value = (self._heads(projection(hidden_states)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        mask = self._window_mask(hidden_states.shape[1], hidden_states.device)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.grouped,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _window_mask(self, length: int, device: torch.device) -> Tensor | None:
        """[S, S] bool, True where a query (row) may look; None where the causal mask alone says the same."""
        if self.sliding_window is None or length <= self.sliding_window:
            return None
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < self.sliding_window)
