"""Keeping experts evenly loaded: the load-balance loss, the router z-loss, and the bias update that needs no loss.

Convention. The load-balance loss of one layer is E * sum_i f_i * P_i, with f_i the number of slots that chose expert i
over the number of real tokens (so the f_i sum to K) and P_i the mean score of expert i. Fractions and means run over
all ranks of one micro-batch; layers are averaged. An even load gives K. transformers scales alike but pools all layers
before it multiplies, so its value differs where layers are skewed differently; a coefficient carries over.

Every gradient reduction in this project is a sum, so each function returns this rank's *part*: the parts of all ranks
add up to the loss. A run averages the result over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.moe.types import RouterStats

if TYPE_CHECKING:
    from nemo_moe.moe.gate import Gate


class RouterTotals(NamedTuple):
    """Counts of one micro-batch over all ranks, per MoE layer; no gradients.

    Attributes:
        tokens_per_expert: [N, E] fp32 for N layers.
        num_tokens: [N] fp32 real tokens.
    """

    tokens_per_expert: Tensor
    num_tokens: Tensor


def sum_over_ranks(stats: RouterStats, group: dist.ProcessGroup | None) -> RouterTotals:
    """Add up the counts of the ranks that hold different tokens. One all-reduce of [N, E + 1] fp32 for all layers.

    Args:
        stats: stacked over N layers: probs_sum and tokens_per_expert [N, E], num_tokens and z_sum [N].
        group: the ranks with distinct batches; None where there is one rank.
    """
    counts = torch.cat([stats.tokens_per_expert, stats.num_tokens[:, None]], dim=1).detach()
    if group is not None and dist.get_world_size(group) > 1:
        counts = counts.clone()
        dist.all_reduce(counts, group=group)
    return RouterTotals(tokens_per_expert=counts[:, :-1], num_tokens=counts[:, -1])


def load_balance_loss(stats: RouterStats, totals: RouterTotals) -> Tensor:
    """This rank's part of the load-balance loss, a scalar in fp32, differentiable in the scores.

    Args:
        stats: this rank's, stacked over N layers.
        totals: `sum_over_ranks(stats, group)`.
    """
    num_tokens = totals.num_tokens.clamp(min=1.0)[:, None]
    fractions = totals.tokens_per_expert / num_tokens
    mean_scores = stats.probs_sum / num_tokens
    return (fractions * mean_scores).sum(dim=1).mean() * totals.tokens_per_expert.shape[1]


def router_z_loss(stats: RouterStats, totals: RouterTotals) -> Tensor:
    """This rank's part of mean over tokens of logsumexp(router_logits)^2, averaged over layers; scalar fp32."""
    return (stats.z_sum / totals.num_tokens.clamp(min=1.0)).mean()


@torch.no_grad()
def update_expert_bias(gates: Sequence[Gate], tokens_per_expert: Tensor, rate: float) -> None:
    """Move each gate's expert bias one step towards an even load: up where an expert got less than the mean, else down.

    Call it once per optimizer step, with the same counts on all ranks. The rule is DeepSeek-V3's.

    Args:
        gates: N gates that have an expert bias.
        tokens_per_expert: [N, E] summed over the step's micro-batches and over ranks.
        rate: the step.
    """
    direction = torch.sign(tokens_per_expert.mean(dim=1, keepdim=True) - tokens_per_expert).to(gates[0].weight.device)
    for gate, step in zip(gates, direction, strict=True):
        assert gate.expert_bias is not None, "this gate has no expert bias: build the model with use_expert_bias"
        gate.expert_bias.add_(step, alpha=rate)
