"""Experts as two `torch.nn.functional.grouped_mm` calls: in bf16 no host synchronisation; rows past the counts cost nothing.

Facts of that function: rows of every operand must be multiples of 16 bytes; rows past the last offset are uninitialised in
its output and in its input's gradient, so nothing here mixes rows; in fp32 on CUDA it reads the offsets on the host (seen
with torch 2.11).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nemo_moe.moe.experts.base import Experts, weighted_swiglu
from nemo_moe.registry import EXPERTS


class GroupedMMExperts(Experts):
    """Experts computed by torch's grouped matmul."""

    def compute(self, hidden_states: Tensor, topk_weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
        _check_row_bytes(hidden_states, self.down_proj)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        gate_up = F.grouped_mm(hidden_states, self.gate_up_proj.transpose(1, 2), offs=ends)
        return F.grouped_mm(weighted_swiglu(gate_up, topk_weights), self.down_proj.transpose(1, 2), offs=ends)


def _check_row_bytes(hidden_states: Tensor, down_proj: Tensor) -> None:
    multiple = EXPERTS.get("grouped_mm").row_bytes_multiple_of
    for name, size in (("hidden_size", hidden_states.shape[-1]), ("moe_intermediate_size", down_proj.shape[-1])):
        if size * hidden_states.element_size() % multiple:
            raise ValueError(
                f"experts 'grouped_mm' needs rows that are multiples of {multiple} bytes: {name} {size} in {hidden_states.dtype} has"
                f" {size * hidden_states.element_size()} bytes; use a multiple of {multiple // hidden_states.element_size()},"
                " or backend.experts: loop"
            )
