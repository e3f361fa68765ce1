"""The router: scores, top-k selection, routing weights, and what the auxiliary losses need. All of it in fp32.

The selection is made once a step: under activation checkpointing the recomputation gets the forward's selection back
(`types.remembered`), so the weights are recomputed for the same experts. The losses themselves are in `load_balance`.

T tokens, K experts per token, E experts, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_moe.config import MoEConfig, ScoreFunction
from nemo_moe.moe.permute import count_per_expert
from nemo_moe.moe.types import RouterStats, remembered


class Gate(nn.Module):
    """Chooses K experts for each token and weighs them.

    Attributes:
        weight: [E, H]; the router's only parameter.
        expert_bias: [E] fp32 buffer, or None; added to the scores for the selection alone (loss-free balancing).
    """

    expert_bias: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32) if config.use_expert_bias else None)

    def forward(self, hidden_states: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor, RouterStats]:
        """Route tokens.

        Args:
            hidden_states: [T, H], any floating dtype.
            token_mask: [T] bool, False for padding, whose hidden states may be anything; None means that every token is real.

        Returns:
            topk_idx: [T, K] int64, -1 for padding.
            topk_weights: [T, K] fp32, differentiable, 0 for padding.
            stats: sums over this rank's real tokens; probs_sum and z_sum are differentiable.
        """
        if token_mask is not None:
            # Zeros, since a weight's gradient sums over all rows: one NaN in padding would be in all of it.
            hidden_states = hidden_states.masked_fill(~token_mask[:, None], 0.0)
        router_logits = F.linear(hidden_states.float(), self.weight.float())
        scores = self._scores(router_logits)
        topk_idx = remembered(lambda: self._select(scores))
        topk_weights = self._weights(router_logits, scores, topk_idx)
        if token_mask is not None:
            topk_idx = torch.where(token_mask[:, None], topk_idx, -1)
            topk_weights = torch.where(token_mask[:, None], topk_weights, 0.0)
        return topk_idx, topk_weights, self._stats(router_logits, scores, topk_idx, token_mask)

    def _scores(self, router_logits: Tensor) -> Tensor:
        if self.config.score_function is ScoreFunction.sigmoid:
            return router_logits.sigmoid()
        return router_logits.softmax(dim=-1)

    def _select(self, scores: Tensor) -> Tensor:
        choice = scores.detach()
        if self.expert_bias is not None:
            choice = choice + self.expert_bias
        return choice.topk(self.config.num_experts_per_tok, dim=-1).indices

    def _weights(self, router_logits: Tensor, scores: Tensor, topk_idx: Tensor) -> Tensor:
        if self.config.score_before_topk or self.config.score_function is ScoreFunction.sigmoid:
            weights = scores.gather(1, topk_idx)
        else:
            weights = router_logits.gather(1, topk_idx).softmax(dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.config.routed_scaling_factor

    def _stats(self, router_logits: Tensor, scores: Tensor, topk_idx: Tensor, token_mask: Tensor | None) -> RouterStats:
        probs = scores / scores.sum(dim=-1, keepdim=True) if self.config.score_function is ScoreFunction.sigmoid else scores
        squares = router_logits.logsumexp(dim=-1).square()
        num_tokens = torch.full((), float(topk_idx.shape[0]), device=scores.device)
        if token_mask is not None:
            probs = torch.where(token_mask[:, None], probs, 0.0)
            squares = torch.where(token_mask, squares, 0.0)
            num_tokens = token_mask.sum().float()
        return RouterStats(
            probs_sum=probs.sum(dim=0),
            tokens_per_expert=count_per_expert(topk_idx, self.config.num_experts).float(),
            num_tokens=num_tokens,
            z_sum=squares.sum(),
        )


class FakeBalancedGate(Gate):
    """Perfectly even routing with equal weights, for benchmarks: what a dispatcher costs without imbalance.

    The parameters are those of `Gate` and get a zero gradient; the statistics are those of the routing it makes.
    """

    def _select(self, scores: Tensor) -> Tensor:
        num_tokens, top_k = scores.shape[0], self.config.num_experts_per_tok
        slots = torch.arange(num_tokens * top_k, device=scores.device).view(num_tokens, top_k)
        # Neighbouring slots go to experts far apart, so that a token's K experts lie on different ranks.
        stride = max(1, self.config.num_experts // top_k)
        return (slots % top_k * stride + slots // top_k) % self.config.num_experts

    def _weights(self, router_logits: Tensor, scores: Tensor, topk_idx: Tensor) -> Tensor:
        even = torch.full_like(topk_idx, 1, dtype=torch.float32) / self.config.num_experts_per_tok
        return even + 0.0 * router_logits.sum()
