"""What one MoE layer is built from: the sizes and rules of its routing, and the backends that run it.

`config.py` has the sections of a recipe around it, and these names too. Backend names are plain strings that are checked
against `registry.py`, so a registered backend of the user's own works.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nemo_moe.checks import member, positive, require, sizes
from nemo_moe.registry import DISPATCHERS, EXPERTS


class ScoreFunction(str, Enum):
    """How router logits become scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


@dataclass(kw_only=True)
class BackendConfig:
    """Who moves the tokens and who multiplies them.

    Attributes:
        dispatcher: how tokens travel to the ranks that own their experts; a name in `registry.DISPATCHERS`.
        dispatcher_num_sms: streaming multiprocessors the dispatcher may use; null is its measured default. Refused
            where the dispatcher has no such knob.
        dispatcher_async_dispatch: overlap dispatch with other work; refused where the dispatcher cannot.
        experts: who computes the experts; a name in `registry.EXPERTS`.
        experts_fp8: the experts' matmuls in FP8, forward and backward, by a recipe of the backend (of te: current, block,
            mxfp8); weights, activations and gradients between them stay bf16. null is bf16. Refused where the backend has
            no such recipe, or the GPU cannot.
    """

    dispatcher: str = "all_to_all"
    dispatcher_num_sms: int | None = None
    dispatcher_async_dispatch: bool = False
    experts: str = "grouped_mm"
    experts_fp8: str | None = None

    def __post_init__(self) -> None:
        spec = DISPATCHERS.get(self.dispatcher)
        recipes = EXPERTS.get(self.experts).fp8
        if self.experts_fp8 is not None and self.experts_fp8 not in recipes:
            there = "; ".join(f"{name}: {', '.join(EXPERTS.get(name).fp8)}" for name in EXPERTS if EXPERTS.get(name).fp8)
            raise ValueError(
                f"backend.experts_fp8 is {self.experts_fp8!r}, which the experts {self.experts!r} do not have"
                f" (those that are there: {there}); set it to null, or choose others"
            )
        if self.dispatcher_num_sms is not None:
            multiple = spec.num_sms_multiple_of
            require(
                multiple is not None,
                f"backend.dispatcher_num_sms is {self.dispatcher_num_sms}, but the dispatcher {self.dispatcher!r} has no such knob;"
                " set it to null",
            )
            require(
                self.dispatcher_num_sms > 0 and self.dispatcher_num_sms % (multiple or 1) == 0,
                f"backend.dispatcher_num_sms must be a positive multiple of {multiple} for {self.dispatcher!r},"
                f" found {self.dispatcher_num_sms}",
            )
        if self.dispatcher_async_dispatch and not spec.async_dispatch:
            able = [name for name in DISPATCHERS if DISPATCHERS.get(name).async_dispatch]
            raise ValueError(
                f"backend.dispatcher_async_dispatch is true, but the dispatcher {self.dispatcher!r} has no asynchronous mode"
                f" (those that have: {', '.join(able) or 'none'}); set it to false"
            )


@dataclass(kw_only=True)
class MoEConfig:
    """One MoE layer, as a model family builds it from its Hugging Face config (not a section of a recipe).

    Attributes:
        num_experts: E. num_experts_per_tok: K. hidden_size: H. moe_intermediate_size: I, the width of one expert.
        score_function: softmax or sigmoid of the router logits, in fp32.
        score_before_topk: scores over all experts, then selection (Qwen3-MoE, DeepSeek); False scores the selected
            logits alone (with softmax that is Mixtral's rule).
        norm_topk_prob: divide a token's K weights by their sum.
        routed_scaling_factor: multiplies the weights.
        use_expert_bias: a bias per expert, added to the scores for the selection only, for balancing without a loss.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    score_function: ScoreFunction = ScoreFunction.softmax
    score_before_topk: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = False

    def __post_init__(self) -> None:
        self.score_function = member(ScoreFunction, "score_function", self.score_function)
        sizes(
            num_experts=self.num_experts,
            num_experts_per_tok=self.num_experts_per_tok,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
        )
        positive(routed_scaling_factor=self.routed_scaling_factor)
        require(
            self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok ({self.num_experts_per_tok}) is above num_experts ({self.num_experts})",
        )
