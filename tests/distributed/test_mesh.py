"""Sizes that do not fit are refused before any process group; groups hold the ranks they should."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

from nemo_moe.config import DistributedConfig
from nemo_moe.distributed.mesh import MeshSizes, build_meshes
from nemo_moe.testing.run_distributed import run_distributed


@pytest.mark.parametrize(
    ("config", "world_size", "num_experts", "numbers"),
    [
        (DistributedConfig(ep_size=4), 4, 6, ["(4)", "(6)"]),
        (DistributedConfig(ep_size=3), 4, 8, ["(3)", "(8)"]),
        (DistributedConfig(ep_size=3), 4, 6, ["(3)", "= 4)"]),
        (DistributedConfig(ep_size=8), 4, 8, ["(8)", "= 4)"]),
        (DistributedConfig(ep_size=4, dp_replicate_size=2), 4, 8, ["(4)", "= 2)"]),
        (DistributedConfig(ep_size=2), 2, None, ["ep_size is 2", "no experts"]),
        (DistributedConfig(fsdp_size=4), 2, 8, ["= 4", "2 ranks"]),
        (DistributedConfig(fsdp_size=1, ep_size=1), 2, 8, ["= 1", "2 ranks"]),
        (DistributedConfig(dp_replicate_size=3), 4, 8, ["= 3)", "(4)"]),
        (DistributedConfig(tp_size=4, ep_size=2), 4, 8, ["(2)", "(4)"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(
    config: DistributedConfig, world_size: int, num_experts: int | None, numbers: list[str]
) -> None:
    """Case B34; there is no process group in this process."""
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="distributed") as caught:
        MeshSizes.from_config(config, world_size, num_experts)
    assert all(number in str(caught.value) for number in numbers), str(caught.value)


@pytest.mark.parametrize(
    ("config", "world_size", "expected", "efsdp", "dp_size"),
    [
        (DistributedConfig(), 1, (1, 1, 1, 1), 1, 1),
        (DistributedConfig(ep_size=4), 8, (1, 8, 1, 4), 2, 8),
        (DistributedConfig(ep_size=2, dp_replicate_size=2), 8, (2, 4, 1, 2), 2, 8),
        (DistributedConfig(ep_size=8, tp_size=2), 8, (1, 4, 2, 8), 1, 4),
        (DistributedConfig(fsdp_size=2, tp_size=2, ep_size=2), 4, (1, 2, 2, 2), 2, 2),
    ],
)
def test_sizes_that_fit(config: DistributedConfig, world_size: int, expected: tuple[int, ...], efsdp: int, dp_size: int) -> None:
    sizes = MeshSizes.from_config(config, world_size, 16)
    assert dataclasses.astuple(sizes) == expected
    assert (sizes.efsdp, sizes.dp_size, sizes.world_size) == (efsdp, dp_size, world_size)


def _groups(sizes: MeshSizes) -> dict[str, object]:
    meshes = build_meshes(sizes, "cpu")
    ranks = dist.get_process_group_ranks
    return {
        "ep": ranks(meshes.ep_group) if meshes.ep_group is not None else None,
        "efsdp": ranks(meshes.expert.get_group("efsdp")),
        "fsdp": ranks(meshes.dense.get_group("fsdp")),
        "replicas": ranks(meshes.dense.get_group("dp_replicate")),
        "tp": ranks(meshes.tp_group) if meshes.tp_group is not None else None,
        "dp": ranks(meshes.dp_group),
        "dp_rank": meshes.dp_rank,
        "ep_rank": meshes.ep_rank,
    }


def test_ep_ranks_are_neighbours_and_efsdp_ranks_hold_the_same_experts() -> None:
    groups = run_distributed(_groups, 4, MeshSizes(fsdp=4, ep=2))
    assert [group["ep"] for group in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [group["efsdp"] for group in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [group["ep_rank"] for group in groups] == [0, 1, 0, 1]
    assert [group["dp_rank"] for group in groups] == [0, 1, 2, 3]
    assert all(group["dp"] == [0, 1, 2, 3] and group["tp"] is None for group in groups)


def test_replicas_are_whole_blocks() -> None:
    groups = run_distributed(_groups, 4, MeshSizes(dp_replicate=2, fsdp=2, ep=2))
    assert [group["replicas"] for group in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [group["fsdp"] for group in groups] == [group["ep"] for group in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_tp_ranks_share_a_batch() -> None:
    groups = run_distributed(_groups, 4, MeshSizes(fsdp=2, tp=2, ep=4))
    assert [group["tp"] for group in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [group["dp"] for group in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [group["dp_rank"] for group in groups] == [0, 0, 1, 1]
    assert all(group["ep"] == [0, 1, 2, 3] for group in groups)


def _wrong_world() -> str:
    try:
        build_meshes(MeshSizes(fsdp=4), "cpu")
    except ValueError as error:
        return str(error)
    return "no error"


def test_sizes_must_match_the_process_group() -> None:
    assert all("4 ranks, but there are 2" in message for message in run_distributed(_wrong_world, 2))
