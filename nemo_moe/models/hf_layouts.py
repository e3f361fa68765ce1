"""The key tables' common part: how a stacked expert parameter is spelt in checkpoint files.

Files of the hub hold the experts one by one, in memory they are stacked (L is E here):

    {experts}.J.{gate}.weight [I, H]   ->  rows 0..I of gate_up_proj[J]
    {experts}.J.{up}.weight   [I, H]   ->  rows I..2I of it
    {experts}.J.{down}.weight [H, I]   ->  down_proj[J]

A layout is chosen by names alone, never by shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nemo_moe.models.decoder import HFTensor


class ExpertNames(NamedTuple):
    """How a family calls an expert's three matrices in its files."""

    gate: str
    up: str
    down: str


def whole(key: str, shape: Sequence[int]) -> list[HFTensor]:
    """A parameter that is one tensor of the file."""
    return [HFTensor(key, tuple(shape), (0,) * len(shape))]


def one_by_one(experts: str, projection: str, shape: Sequence[int], names: ExpertNames) -> list[HFTensor]:
    """A stacked parameter as tensors of single experts.

    Args:
        experts: name in the file of what holds the experts.
        projection: "gate_up_proj" or "down_proj".
        shape: of the parameter over all ranks.
    """
    num_experts, rows, columns = shape
    if projection == "down_proj":
        return [HFTensor(f"{experts}.{expert}.{names.down}.weight", (rows, columns), (expert, 0, 0)) for expert in range(num_experts)]
    assert projection == "gate_up_proj", projection
    half = rows // 2
    return [
        HFTensor(f"{experts}.{expert}.{part}.weight", (half, columns), (expert, start, 0))
        for expert in range(num_experts)
        for part, start in ((names.gate, 0), (names.up, half))
    ]
