"""Tiny Qwen3-MoE models of transformers' own making, and ours with the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from nemo_moe.config import BackendConfig
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    import transformers

Model = TypeVar("Model", bound=nn.Module)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size / heads
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def hf_model(**changes: Any) -> transformers.Qwen3MoeForCausalLM:
    """fp32, weights large enough that a wrong rule shows; norms and biases are random too. The same for equal changes."""
    import transformers  # not above: rank processes import this module, and need seconds for that one

    torch.manual_seed(7)
    return strong(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SIZES, **changes})))


def strong(model: Model) -> Model:
    """A model of transformers, fp32, with weights as `hf_model` says."""
    model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def ours_like(theirs: nn.Module, experts: str = "loop") -> Qwen3MoeForCausalLM:
    """Our model from the config and, by name, the weights of a transformers model; no checkpoint code involved."""
    return with_weights_of(theirs, Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(theirs.config.to_dict()), BackendConfig(experts=experts)))


def with_weights_of(theirs: nn.Module, model: Model) -> Model:
    weights = dict(theirs.named_parameters())
    assert {name for name, _ in model.named_parameters()} == weights.keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval()


def ids(rows: int = 3, length: int = 17, vocab_size: int = SIZES["vocab_size"]) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Of the next-token cross-entropy summed over labels that are not -100; zeros where there is none."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
