"""The decoder that all model families here share: embedding, layers of attention and feed-forward, norm, output head.

A family is a `DecoderConfig` subclass that maps its Hugging Face config to this, plus a table of checkpoint keys; the
modules' parameter names are those of transformers' models in memory. An output head that is tied to the embedding is
not a second parameter: the one matrix is `model.embed_tokens.weight`, so no copy, move or sharding can untie it.

Left out on purpose: a key/value cache, packed sequences, encoder or vision inputs.

B batch, S sequence, H hidden size, V vocabulary, D head size, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_moe.config import BackendConfig, MoEConfig, RouterConfig
from nemo_moe.layers.attention import Attention
from nemo_moe.layers.mlp import MLP
from nemo_moe.layers.rms_norm import RMSNorm
from nemo_moe.layers.rope import RopeConfig, RotaryEmbedding
from nemo_moe.moe.layer import MoE
from nemo_moe.moe.types import RouterStats

STORED_DTYPES = ("float32", "bfloat16", "float16")  # that weights may be written in


class ModelOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        logits: [B, S, V] in the compute dtype.
        router_stats: each field stacked over the N MoE layers ([N, E], [N]); None in a model without MoE layers.
    """

    logits: Tensor
    router_stats: RouterStats | None


class HFTensor(NamedTuple):
    """Where one tensor of a checkpoint file belongs in a parameter.

    Attributes:
        key: its name in the file.
        shape: its shape in the file.
        offsets: where it starts in the parameter, one number a dimension of the parameter. Where the file's tensor has
            fewer dimensions, the parameter's leading ones are of size 1.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """What the decoder is built from, in Hugging Face's names. A family's `from_hf` fills it.

    Attributes:
        intermediate_size: width of the dense feed-forward layers.
        head_dim: D; need not be hidden_size / num_attention_heads.
        dtype: what the checkpoint's config says its weights are stored in ("bfloat16"), None where it says nothing.
        extra: keys that mean nothing here, kept for `to_hf`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    attention_bias: bool
    attention_dropout: float
    rope: RopeConfig
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router_aux_loss_coef: float
    dtype: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        for name in (*sizes.split(), "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} must be 1 or more, found {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model config: num_attention_heads ({self.num_attention_heads}) must be a multiple of"
                f" num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim must be even for rotary embeddings, found {self.head_dim}")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"model config: attention_dropout must be in [0, 1), found {self.attention_dropout}")
        for name in ("num_experts", "initializer_range", "router_aux_loss_coef"):
            if getattr(self, name) < 0:
                raise ValueError(f"model config: {name} must be 0 or more, found {getattr(self, name)}")
        if self.rms_norm_eps <= 0:
            raise ValueError(f"model config: rms_norm_eps must be above 0, found {self.rms_norm_eps}")
        if self.dtype not in (None, *STORED_DTYPES):
            raise ValueError(f"model config: torch_dtype: unknown value {self.dtype!r} (legal: {', '.join(STORED_DTYPES)})")
        if any(self.is_moe_layer(index) for index in range(self.num_hidden_layers)):
            self.moe(use_expert_bias=False)  # for its checks

    @property
    @abstractmethod
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalised."""

    @abstractmethod
    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` has experts rather than a dense feed-forward."""

    @abstractmethod
    def attention_window(self, index: int) -> int | None:
        """How many tokens layer `index` looks back over, itself included; None is all of them."""

    @abstractmethod
    def moe(self, *, use_expert_bias: bool) -> MoEConfig:
        """The config of an MoE layer."""

    @abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face config: what `from_hf` reads."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward (dense or MoE), each behind a norm and with a residual."""

    def __init__(self, config: DecoderConfig, backend: BackendConfig, router: RouterConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            sliding_window=config.attention_window(index),
            dropout=config.attention_dropout,
        )
        self.mlp: MoE | MLP
        if config.is_moe_layer(index):
            moe = config.moe(use_expert_bias=router.bias_update_rate > 0)
            self.mlp = MoE(moe, backend, fake_balanced_gate=router.fake_balanced)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, token_mask: Tensor | None) -> tuple[Tensor, RouterStats | None]:
        """One layer.

        Args:
            hidden_states: [B, S, H].
            cos, sin: [B or 1, S, D].
            token_mask: [B, S] bool or None.

        Returns:
            [B, S, H], and the router's statistics (None from a dense layer).
        """
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        normed = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, MoE):
            update, stats = self.mlp(normed, token_mask)
            return hidden_states + update, stats
        return hidden_states + self.mlp(normed), None


class Decoder(nn.Module):
    """Embedding, layers, norm: everything before the output head."""

    def __init__(self, config: DecoderConfig, backend: BackendConfig, router: RouterConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, backend, router, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)

    def forward(self, input_ids: Tensor, token_mask: Tensor | None, position_ids: Tensor | None) -> tuple[Tensor, list[RouterStats]]:
        """[B, S] -> [B, S, H] and one statistics per MoE layer."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden_states = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(position_ids, hidden_states.dtype)
        collected = []
        for layer in self.layers:
            hidden_states, stats = layer(hidden_states, cos, sin, token_mask)
            if stats is not None:
                collected.append(stats)
        return self.norm(hidden_states), collected


class DecoderForCausalLM(nn.Module, ABC):
    """A decoder with an output head; a family subclasses it with its table of checkpoint keys.

    Built on a real device the parameters are random (normal with `initializer_range`, from torch's global generator),
    never uninitialised memory. Built under `torch.device("meta")` it needs `to_empty`, then `reset_buffers`, then weights.

    Attributes:
        lm_head: None when the embedding is the output head.
    """

    def __init__(self, config: DecoderConfig, backend: BackendConfig, router: RouterConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, backend, router or RouterConfig())
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._init_parameters()

    @abstractmethod
    def hf_layouts(self, name: str, shape: Sequence[int]) -> list[list[HFTensor]]:
        """How parameter (or stored buffer) `name` of global `shape` is spelt in a checkpoint.

        Returns one list of tensors per known layout; the first is the one to write. Empty where the family's format has
        no place for it.
        """

    def hf_aliases(self) -> dict[str, str]:
        """Names that some files store a parameter under a second time: a tied output head, written out."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    def decoder_layers(self) -> list[nn.Module]:
        """The layers, first to last."""
        return list(self.model.layers)

    def moe_layers(self) -> list[MoE]:
        """The MoE layers, first to last; the order of `ModelOutput.router_stats`."""
        # Not a walk over self.modules(): the gradient norm asks for this in every step.
        feed_forwards = [layer.mlp for layer in self.model.layers]
        return [module for module in feed_forwards if isinstance(module, MoE)]

    def reset_buffers(self) -> None:
        """Give buffers the values they have in a new model; call it after `to_empty` and before loading weights."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.reset_buffers()
            if isinstance(module, MoE) and module.gate.expert_bias is not None:
                module.gate.expert_bias.zero_()

    def forward(self, input_ids: Tensor, token_mask: Tensor | None = None, position_ids: Tensor | None = None) -> ModelOutput:
        """Next-token logits.

        Args:
            input_ids: [B, S] int64.
            token_mask: [B, S] bool, False for padding, which must be on the right; None means that every token is real.
                What it changes is the routing: padding goes to no expert and counts in no statistic.
            position_ids: [B, S] int64 angles of the rotary embedding; None counts from 0. They do not limit attention:
                several documents in one row would see one another.

        Raises:
            ValueError: on the CPU, when a real token stands right of a padding one. (On a GPU looking would be a
                synchronisation; such a token's logits are those of a text with the padding in it.)
        """
        if token_mask is not None and token_mask.device.type == "cpu" and bool((token_mask[:, 1:] & ~token_mask[:, :-1]).any()):
            raise ValueError("token_mask has real tokens right of padding; pad on the right: attention has no mask for padding in between")
        hidden_states, stats = self.model(input_ids, token_mask, position_ids)
        # The embedding is read here, in the root's forward: FSDP2 has it gathered, because it wraps it with the root.
        logits = F.linear(hidden_states, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden_states)
        stacked = RouterStats(*(torch.stack(column) for column in zip(*stats, strict=True))) if stats else None
        return ModelOutput(logits, stacked)

    @torch.no_grad()
    def _init_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=self.config.initializer_range)
            elif name.endswith(".bias"):
                parameter.zero_()  # norms are ones already
