"""One global gradient norm over parameters on different meshes, each counted once."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from nemo_moe.distributed.grad_norm import clip_grad_norm_
from nemo_moe.testing.parity import meshes_of
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative


class _Experts(nn.Module):
    def __init__(self, num_local_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_local_experts, 4, 6))


class _Layer(nn.Module):
    def __init__(self, num_local_experts: int) -> None:
        super().__init__()
        self.experts = _Experts(num_local_experts)


class _Model(nn.Module):
    """The least that obeys the protocol: experts, a dense matrix, and a parameter that stays an ordinary tensor."""

    def __init__(self, num_local_experts: int) -> None:
        super().__init__()
        self.moe = _Layer(num_local_experts)
        self.dense = nn.Linear(5, 7, bias=False)
        self.plain = nn.Parameter(torch.zeros(3))

    def decoder_layers(self) -> list[nn.Module]:
        return []

    def moe_layers(self) -> list[_Layer]:
        return [self.moe]


def _set_grad(parameter: nn.Parameter, full: Tensor) -> None:
    if isinstance(parameter, DTensor):
        parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    else:
        parameter.grad = full.clone()


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _unequal_expert_norms(rank_1_has_experts: bool) -> tuple[float, Tensor, Tensor | None]:
    meshes = meshes_of((1, 2, 2), "cpu")
    model = _Model(num_local_experts=1)
    fully_shard(model.dense, mesh=meshes.dense_shard_mesh)
    rank = dist.get_rank()
    if rank == 0 or rank_1_has_experts:
        norm = 30.0 if rank == 0 else 3.0
        model.moe.experts.weight.grad = torch.full((1, 4, 6), norm / math.sqrt(24))
    _set_grad(model.dense.weight, torch.full((7, 5), 2.0))
    norm = clip_grad_norm_(model, meshes, 1.0)
    experts = model.moe.experts.weight.grad
    assert norm.dtype is torch.float32
    return norm.item(), _whole(model.dense.weight.grad), experts


@pytest.mark.parametrize("rank_1_has_experts", [True, False])
def test_ranks_with_unequal_expert_gradients_agree_on_one_norm(rank_1_has_experts: bool) -> None:
    """Case B18; in the second half rank 1 has no expert gradient and joins with 0."""
    results = run_distributed(_unequal_expert_norms, 2, rank_1_has_experts)
    expected = math.sqrt(30**2 + 3**2 * rank_1_has_experts + 4 * 35)
    for norm, dense, _ in results:
        assert norm == pytest.approx(expected, rel=1e-6)
        assert_close_relative(dense, torch.full((7, 5), 2.0 / expected), 1e-5)
    assert results[0][2].norm().item() == pytest.approx(30 / expected, rel=1e-5)
    if rank_1_has_experts:
        assert results[1][2].norm().item() == pytest.approx(3 / expected, rel=1e-5)


def _draw_gradients() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 4, 6, generator=generator), torch.randn(7, 5, generator=generator), torch.randn(3, generator=generator)


def _mixed_meshes(mesh: tuple[int, int, int], wrap_experts: bool, max_norm: float | None) -> tuple[float, list[Tensor]]:
    meshes = meshes_of(mesh, "cpu")
    local = 4 // meshes.sizes.ep
    model = _Model(local)
    if wrap_experts:
        fully_shard(model.moe.experts, mesh=meshes.expert_shard_mesh)
    fully_shard(model.dense, mesh=meshes.dense_shard_mesh)
    experts, dense, plain = _draw_gradients()
    own = experts[meshes.ep_rank * local : (meshes.ep_rank + 1) * local]
    for parameter, full in ((model.moe.experts.weight, own), (model.dense.weight, dense), (model.plain, plain)):
        _set_grad(parameter, full)
    norm = clip_grad_norm_(model, meshes, max_norm)
    parts = [torch.empty(local, 4, 6) for _ in range(meshes.sizes.ep)]
    dist.all_gather(parts, _whole(model.moe.experts.weight.grad), group=meshes.expert.get_group("ep"))
    return norm.item(), [torch.cat(parts), _whole(model.dense.weight.grad), model.plain.grad]


@pytest.mark.parametrize("max_norm", [0.5, None, 1000.0])
@pytest.mark.parametrize("wrap_experts", [True, False])
@pytest.mark.parametrize("mesh", [(1, 4, 2), (1, 4, 1), (1, 4, 4), (2, 2, 2)], ids=str)
def test_mixed_meshes_and_a_plain_tensor_equal_one_process(mesh: tuple[int, int, int], wrap_experts: bool, max_norm: float | None) -> None:
    """Case B19."""
    expected = [nn.Parameter(torch.zeros_like(gradient)) for gradient in _draw_gradients()]
    for parameter, gradient in zip(expected, _draw_gradients(), strict=True):
        parameter.grad = gradient
    expected_norm = nn.utils.clip_grad_norm_(expected, math.inf if max_norm is None else max_norm).item()
    for norm, gradients in run_distributed(_mixed_meshes, 4, mesh, wrap_experts, max_norm):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for gradient, parameter in zip(gradients, expected, strict=True):
            assert_close_relative(gradient, parameter.grad, 1e-6)


def _nan_on_rank_1() -> float:
    meshes = meshes_of((1, 2, 2), "cpu")
    model = _Model(1)
    model.moe.experts.weight.grad = torch.full((1, 4, 6), math.nan if dist.get_rank() == 1 else 1.0)
    return clip_grad_norm_(model, meshes, None).item()


def test_a_nan_on_one_rank_is_seen_by_all() -> None:
    assert all(math.isnan(norm) for norm in run_distributed(_nan_on_rank_1, 2))


def _no_gradients_at_all() -> float:
    return clip_grad_norm_(_Model(1), meshes_of((1, 2, 2), "cpu"), 1.0).item()


def test_no_gradients_have_norm_zero() -> None:
    assert run_distributed(_no_gradients_at_all, 2) == [0.0, 0.0]
