"""Adding a dispatcher is one file and one registry entry: this one is the file.

`_GatherManager` sends every token to every rank. It is registered, passes the conformance suite, is named in a config
like any other, and trains a tiny Qwen3-MoE to the same losses as `all_to_all`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.config import BackendConfig, TrainConfig
from nemo_moe.distributed.mesh import MeshSizes, build_meshes
from nemo_moe.distributed.parallelize import init_weights, parallelize
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.permute import count_per_expert, rows_of_slots, slots_by_expert, sum_slots
from nemo_moe.moe.types import Dispatched, DispatchHandle
from nemo_moe.registry import DISPATCHERS, DispatcherSpec
from nemo_moe.testing.conformance import CASES, Case, check_case
from nemo_moe.testing.run_distributed import run_distributed


@dataclass(frozen=True, eq=False)
class _GatherHandle(DispatchHandle):
    slot_order: Tensor
    idx: Tensor
    slot_rows: Tensor


class _GatherManager(DispatchManager):
    """Every rank gets every token, padded to the largest rank's count, and keeps the rows of its own experts."""

    def _gather(self, tensor: Tensor) -> Tensor:
        most = torch.tensor([tensor.shape[0]])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.ep_group)
        padded = torch.zeros(int(most), *tensor.shape[1:], dtype=tensor.dtype)
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.ep_size)]
        dist.all_gather(parts, padded, group=self.ep_group)
        return torch.cat(parts)

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        # Padding rows must reach no expert, so ids travel one up and 0 means dropped.
        idx = self._gather(topk_idx + 1) - 1 - self.ep_rank * self.num_local_experts
        idx = torch.where((idx >= 0) & (idx < self.num_local_experts), idx, -1)
        counts = count_per_expert(idx, self.num_local_experts)
        slot_order = slots_by_expert(idx, self.num_local_experts)[: int(counts.sum())]
        weights = self._gather(topk_weights.detach()).reshape(-1)[slot_order]
        handle = _GatherHandle(hidden_states.shape[0], counts.int(), weights, slot_order, idx, rows_of_slots(slot_order, idx))
        return Dispatched(self.redispatch(hidden_states, handle), weights, handle.tokens_per_expert, handle)

    def redispatch(self, hidden_states: Tensor, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle, _GatherHandle)
        return self._gather(hidden_states)[handle.slot_order // handle.idx.shape[1]]

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(handle, _GatherHandle)
        hidden_states = self._mine(sum_slots(rows, handle.slot_rows), handle)
        if row_weights is None:
            return hidden_states, None
        by_slot = torch.zeros(handle.idx.numel()).index_copy_(0, handle.slot_order, row_weights)
        return hidden_states, self._mine(by_slot.view(handle.idx.shape), handle)

    def _mine(self, total: Tensor, handle: DispatchHandle) -> Tensor:
        dist.all_reduce(total, group=self.ep_group)
        return total.chunk(self.ep_size)[self.ep_rank][: handle.num_tokens] if total.numel() else total[: handle.num_tokens]


@contextmanager
def _registered() -> Iterator[None]:
    DISPATCHERS.register("gather", DispatcherSpec(target=f"{__name__}:_GatherManager", summary="a toy"))
    try:
        yield
    finally:
        DISPATCHERS.unregister("gather")


def _check(case: Case) -> None:
    with _registered():
        check_case(case, BackendConfig(dispatcher="gather", experts="grouped_mm"), dist.group.WORLD, steps=2)


@pytest.mark.parametrize("name", ["random", "uneven", "empty_rank", "dropped_slots", "duplicate_ids"])
def test_a_toy_dispatcher_passes_the_conformance_suite(name: str) -> None:
    run_distributed(_check_by_name, 2, name)


def _check_by_name(name: str) -> None:
    _check(next(case for case in CASES if case.name == name))


@dataclass
class _Run:
    precision: str
    train: TrainConfig


def _losses(dispatcher: str) -> list[float]:
    with _registered():
        config = Qwen3MoeConfig.from_hf(
            {
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "moe_intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            }
        )
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config, BackendConfig(dispatcher=dispatcher))
        meshes = build_meshes(MeshSizes(dp_replicate=1, fsdp=2, tp=1, ep=2), "cpu")
        parallelize(model, meshes, _Run("fp32", TrainConfig()))
        model.to_empty(device="cpu")
        model.reset_buffers()
        init_weights(model, seed=0, initializer_range=0.05)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        input_ids = torch.randint(0, 64, (4, 12), generator=generator)
        for _ in range(8):
            logits = model(input_ids).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten(), reduction="sum") / 88
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(total.item())
        return losses


def test_a_toy_dispatcher_trains_a_model_like_all_to_all() -> None:
    toy, expected = run_distributed(_losses, 2, "gather")[0], run_distributed(_losses, 2, "all_to_all")[0]
    assert toy == pytest.approx(expected, rel=1e-5)
    assert toy[-1] < 0.8 * toy[0], "eight steps on one batch must lower the loss"


def test_the_registry_refuses_a_name_twice() -> None:
    with _registered(), pytest.raises(ValueError, match="'gather' is already registered"), _registered():
        pass
