"""One matmul per expert: the plainest experts, which every other backend is checked against.

Costs one host synchronisation (the row counts) and L small matmuls a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nemo_moe.moe.experts.base import Experts, weighted_swiglu


class LoopExperts(Experts):
    """Experts computed one after another."""

    def compute(self, hidden_states: Tensor, topk_weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
        counts = tokens_per_expert.tolist()
        surplus = hidden_states.shape[0] - sum(counts)
        outputs = []
        # An expert without rows still multiplies an empty matrix, which gives its weights a gradient of exact zeros.
        groups = zip(hidden_states.split([*counts, surplus]), topk_weights.split([*counts, surplus]), strict=True)
        for (rows, weights), gate_up_proj, down_proj in zip(list(groups)[:-1], self.gate_up_proj, self.down_proj, strict=True):
            outputs.append(F.linear(weighted_swiglu(F.linear(rows, gate_up_proj), weights), down_proj))
        outputs.append(hidden_states.new_zeros(surplus, hidden_states.shape[1]))
        return torch.cat(outputs)
