"""The MoE layer: gate -> experts, which are handed the dispatcher.

Its output comes with the gate's statistics as a return value, not as a side effect, so that activation checkpointing
cannot count twice and nothing has to be collected from modules. Shared experts are left out: no model family here has
them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_moe.config import BackendConfig, MoEConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.moe.gate import FakeBalancedGate, Gate
from nemo_moe.moe.types import RouterStats


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer.

    It works in one process as built; `shard_experts` (called by `distributed.parallelize`) spreads the experts over the
    ranks of an expert-parallel group.

    Args:
        config: sizes and routing rules.
        backend: dispatcher and experts by name.
        fake_balanced_gate: even routing instead of the learnt one, for benchmarks.
    """

    def __init__(self, config: MoEConfig, backend: BackendConfig, *, fake_balanced_gate: bool = False) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.gate: Gate = FakeBalancedGate(config) if fake_balanced_gate else Gate(config)
        self.experts: Experts = build_experts(
            backend.experts, config.num_experts, config.hidden_size, config.moe_intermediate_size, fp8=backend.experts_fp8
        )
        self.dispatcher = MoEFlexTokenDispatcher(backend, config.num_experts, ep_group=None)

    def shard_experts(self, ep_group: dist.ProcessGroup | None) -> None:
        """Keep this rank's contiguous experts and send tokens to the others' over `ep_group`.

        Raises ValueError when the group's size does not divide the experts, and what building the dispatcher raises.
        """
        if ep_group is not None:
            self.experts.keep_local(dist.get_rank(ep_group), dist.get_world_size(ep_group))
        self.dispatcher = MoEFlexTokenDispatcher(self.backend, self.config.num_experts, ep_group)

    def forward(self, hidden_states: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, RouterStats]:
        """Route tokens through their experts.

        Args:
            hidden_states: [B, S, H] or [T, H].
            token_mask: [B, S] or [T] bool, False for padding, which is not routed, not counted and returns a zero row.

        Returns:
            The weighted sum of each token's experts, in the shape and dtype of `hidden_states`, and the gate's
            statistics of this rank's tokens.

        Raises:
            ValueError: a tensor of another shape or dtype.
        """
        self._check(hidden_states, token_mask)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        topk_idx, topk_weights, stats = self.gate(tokens, None if token_mask is None else token_mask.reshape(-1))
        output = self.experts(tokens, topk_idx, topk_weights, self.dispatcher)
        return output.view(hidden_states.shape), stats

    def _check(self, hidden_states: Tensor, token_mask: Tensor | None) -> None:
        shape, hidden_size = tuple(hidden_states.shape), self.config.hidden_size
        if len(shape) not in (2, 3) or shape[-1] != hidden_size:
            raise ValueError(f"hidden_states must be [T, {hidden_size}] or [B, S, {hidden_size}], found {list(shape)}")
        if token_mask is None:
            return
        if token_mask.dtype is not torch.bool:
            raise ValueError(f"token_mask must be torch.bool, True for real tokens, found {token_mask.dtype}; write mask != 0")
        if token_mask.shape != shape[:-1]:
            raise ValueError(f"token_mask must have an entry for each token, {list(shape[:-1])}, found {list(token_mask.shape)}")
