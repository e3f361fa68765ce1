"""Rotary position embedding with the scaling rules of Hugging Face configs.

A head of size D is D/2 planes; plane i turns by position * frequency[i]. The scaling rules change the frequencies (and,
for yarn, the length of the rotated vectors) so that a model serves longer texts than it was trained on:

- default: theta^(-2i/D). linear: all divided by `factor`.
- dynamic: theta grows with the longest position of the batch once that passes max_position_embeddings. Computed anew
  for each batch, so a batch's values do not depend on the batches before it (in transformers a grown theta stays until
  a short sequence comes).
- yarn (arXiv 2309.00071): slow planes are divided by `factor`, fast ones kept, a ramp in between.
- llama3: the same idea with wavelengths as the bounds.

Left out on purpose: longrope, multi-axis and partial rotation; no model family here uses them.

B batch, S sequence, D head size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# rope_type -> (settings it needs, settings it may have), in Hugging Face's names.
ROPE_SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Base and scaling of the rotary embedding; the names are those of Hugging Face's `rope_parameters`.

    Settings that a type does not have stay None. `original_max_position_embeddings` is the length the model was trained
    on before scaling (None: the model's max_position_embeddings).
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        _check_type(self.rope_type)
        given = {name: value for name, value in self.settings().items() if name != "rope_type"}
        for name in ROPE_SETTINGS[self.rope_type][0]:
            if name not in given:
                raise ValueError(f"rope settings: {name} is missing; {_legal(self.rope_type)}")
        for name, value in given.items():
            _check_setting(self.rope_type, name, value)
        if self.rope_type == "yarn" and self.factor is None and self.original_max_position_embeddings is None:
            raise ValueError("rope_type 'yarn' needs factor, or original_max_position_embeddings to take it from")
        if self.factor is not None and self.factor < 1:
            raise ValueError(f"rope settings: factor must be 1 or more, found {self.factor}")
        if self.rope_theta <= 1:
            raise ValueError(f"rope settings: rope_theta must be above 1, found {self.rope_theta}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"rope settings: high_freq_factor ({high}) must be above low_freq_factor ({low})")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RopeConfig:
        """From a `rope_parameters` dict; numbers may be quoted. Raises ValueError for a setting that would be ignored here."""
        given = {name: value for name, value in settings.items() if value is not None}
        if given.get("partial_rotary_factor") in (1, 1.0):
            del given["partial_rotary_factor"]
        rope_type = given.get("rope_type", "default")
        _check_type(rope_type)
        for name, value in given.items():
            if name not in cls.__dataclass_fields__:
                if isinstance(value, Mapping):
                    raise ValueError(f"rope settings per layer type ({name!r}) are not supported; give one set for all layers")
                raise ValueError(f"rope settings: unknown key {name!r}; {_legal(rope_type)}")
            if isinstance(value, str) and name != "rope_type":
                given[name] = _parsed(name, value)
        return cls(**given)

    def settings(self) -> dict[str, Any]:
        """The inverse of `from_settings`: rope_type, rope_theta and what else is set."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _check_type(rope_type: object) -> None:
    if not isinstance(rope_type, str) or rope_type not in ROPE_SETTINGS:
        raise ValueError(f"rope_type: unknown value {rope_type!r} (legal: {', '.join(ROPE_SETTINGS)})")


def _legal(rope_type: str) -> str:
    needed, optional = ROPE_SETTINGS[rope_type]
    return f"rope_type {rope_type!r} takes rope_theta{''.join(', ' + name for name in needed + optional)}"


def _check_setting(rope_type: str, name: str, value: object) -> None:
    if name not in ("rope_theta", *ROPE_SETTINGS[rope_type][0], *ROPE_SETTINGS[rope_type][1]):
        raise ValueError(f"rope settings: {name} is {value!r}, but {_legal(rope_type)}")
    if name == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"rope settings: truncate must be true or false, found {value!r}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"rope settings: {name} must be a number above 0, found {value!r}")


def _parsed(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"rope settings: {name} must be a number, found {value!r}") from None


def inverse_frequencies(config: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Frequencies of the D/2 planes, [D/2] fp32 on the CPU, and the factor on the rotated vectors' length.

    For `dynamic` these are the values up to max_position_embeddings.
    """
    trained_length = config.original_max_position_embeddings or max_position_embeddings
    # The CPU on every machine: the last bit of a power differs between devices, and ranks must agree.
    with torch.device("cpu"):
        plain = _plain(config.rope_theta, head_dim)
        if config.rope_type == "yarn":
            return _yarn(config, plain, trained_length, max_position_embeddings)
        if config.rope_type == "llama3":
            return _llama3(config, plain, trained_length), 1.0
        if config.rope_type == "linear":
            assert config.factor is not None
            return plain / config.factor, 1.0
        return plain, 1.0


def _plain(theta: float | Tensor, head_dim: int) -> Tensor:
    device = theta.device if isinstance(theta, Tensor) else None
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / (theta**exponent)


def _yarn(config: RopeConfig, plain: Tensor, trained_length: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    head_dim = 2 * plain.shape[0]
    factor = config.factor if config.factor is not None else max_position_embeddings / trained_length

    def plane_of(turns: float) -> float:
        """The (fractional) plane that turns this often over the trained length."""
        return head_dim * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    fast, slow = plane_of(config.beta_fast or 32.0), plane_of(config.beta_slow or 1.0)
    if config.truncate is not False:
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, head_dim - 1)
    if fast == slow:
        slow += 0.001
    slowness = ((torch.arange(head_dim // 2, dtype=torch.float32) - fast) / (slow - fast)).clamp(0, 1)
    frequencies = plain / factor * slowness + plain * (1 - slowness)

    def length(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if config.attention_factor is not None:
        return frequencies, config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return frequencies, length(config.mscale) / length(config.mscale_all_dim)
    return frequencies, length(1.0)


def _llama3(config: RopeConfig, plain: Tensor, trained_length: int) -> Tensor:
    factor, low, high = config.factor, config.low_freq_factor, config.high_freq_factor
    assert factor is not None
    assert low is not None
    assert high is not None
    turns = trained_length * plain / (2 * math.pi)
    # 0: few turns over the trained length, divided by factor; 1: many turns, kept; a ramp in between.
    fastness = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - fastness) * plain / factor + fastness * plain


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a batch's positions.

    The frequencies are a buffer that follows the module to its device but is not stored and never anything but fp32:
    whatever moves or empties the module (`to`, `to_empty`) is followed by computing them again.

    Raises ValueError when head_dim is odd.
    """

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, found {head_dim}")
        self.config = config
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        frequencies, self.length_factor = inverse_frequencies(config, head_dim, max_position_embeddings)
        self.register_buffer("inv_freq", frequencies.to(torch.empty(0).device), persistent=False)

    def reset_buffers(self) -> None:
        """Compute the frequencies again, on the device where the buffer is."""
        frequencies, self.length_factor = inverse_frequencies(self.config, self.head_dim, self.max_position_embeddings)
        self.inv_freq = frequencies.to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    @torch.no_grad()
    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Angles of positions.

        Args:
            position_ids: [B or 1, S] int64.
            dtype: of the result; the angles are fp32 whatever it is.

        Returns:
            cos, sin: [B or 1, S, D]; the second half of D repeats the first.
        """
        frequencies = self._grown(position_ids) if self.config.rope_type == "dynamic" else self.inv_freq
        angles = position_ids[..., None].float() * frequencies
        cos, sin = (torch.cat((half, half), dim=-1) * self.length_factor for half in (angles.cos(), angles.sin()))
        return cos.to(dtype), sin.to(dtype)

    def _grown(self, position_ids: Tensor) -> Tensor:
        """Frequencies for the longest position of this batch; stays on the device."""
        assert self.config.factor is not None
        length = (position_ids.max() + 1).clamp(min=self.max_position_embeddings)
        growth = self.config.factor * length / self.max_position_embeddings - (self.config.factor - 1)
        return _plain(self.config.rope_theta * growth ** (self.head_dim / (self.head_dim - 2)), self.head_dim)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [B, N, S, D] query or key heads by cos, sin [B or 1, S, D]; plane i is the pair (i, i + D/2)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
