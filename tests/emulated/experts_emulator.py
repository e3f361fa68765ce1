"""Look-alikes on the CPU of the libraries behind the experts: both packages named `grouped_gemm`, and transformer_engine.

They stand for what the real ones accept, refuse and leave undefined, not for their speed: undefined memory is NaN, and the
gradient of an expert without rows is NaN too where the library promises nothing. `RULES` is the table of what is enforced,
where it is known from, and the run on hardware that confirmed it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

NAN = float("nan")


@dataclass(frozen=True)
class Rule:
    """flavours: that have it. state: "unconfirmed", or the run on real hardware that confirmed it. source: where it is known from."""

    text: str
    flavours: tuple[str, ...]
    source: str
    state: str = "unconfirmed"


_BOTH = ("tgale96", "nvidia")
RULES = {
    "gmm.bf16": Rule("a and b are bf16", _BOTH, "csrc: scalar_type checks"),
    "gmm.shapes": Rule("a is [rows, k], b [E, n, k] with trans_b, else [E, k, n]", _BOTH, "csrc: dimension checks"),
    "gmm.contiguous": Rule("a and b are contiguous", _BOTH, "csrc: is_contiguous checks"),
    "gmm.counts_int64": Rule("batch_sizes is an int64 tensor [E]", _BOTH, "csrc: scalar_type check"),
    "gmm.counts_on_cpu": Rule("batch_sizes is on the CPU (tgale96: unless built with CUTLASS)", _BOTH, "csrc: is_cpu check"),
    "gmm.counts_fit": Rule("the counts do not exceed the rows (memory past them would be read)", _BOTH, "csrc: pointer arithmetic"),
    "gmm.some_rows": Rule("the counts are not all zeros", ("nvidia",), "ops.py: an assertion"),
    "te.list_of_splits": Rule("m_splits is a list of ints (older releases take nothing else)", ("te",), "spec, module/grouped_linear.py"),
    "te.splits_exact": Rule("the splits add up to the rows", ("te",), "torch.split in _split_quantization"),
    "te.one_dtype": Rule("input and weights have one dtype", ("te",), "module/base.py: set_activation_dtype"),
    "te.width": Rule("the input has in_features columns", ("te",), "module/grouped_linear.py"),
    "te.fp8_rows": Rule("in FP8 each expert's rows are a multiple of 16 (MXFP8: 32)", ("te",), "get_align_size_for_quantization"),
    "te.real_weights": Rule("no tensor on the meta device reaches a kernel", ("te",), "a null pointer there"),
}


class RuleBroken(AssertionError):
    """A call that the real library does not survive, or does not answer rightly."""


def require(holds: bool, rule: str, found: object) -> None:
    if not holds:
        raise RuleBroken(f"[{rule}] {RULES[rule].text}: found {found}")


class _Gmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return _each(a, b.mT if trans_b else b, batch_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b, batch_sizes = ctx.saved_tensors
        of_a = _each(gradient, b if ctx.trans_b else b.mT, batch_sizes) if ctx.needs_input_grad[0] else None
        of_b = torch.full_like(b, NAN)  # and stays so for experts without rows
        start = 0
        for expert, count in enumerate(batch_sizes.tolist()):
            left, right = (gradient, a) if ctx.trans_b else (a, gradient)
            if count:
                of_b[expert] = left[start : start + count].t() @ right[start : start + count]
            start += count
        return of_a, of_b if ctx.needs_input_grad[1] else None, None, None


def _each(a: Tensor, b: Tensor, batch_sizes: Tensor) -> Tensor:
    output = a.new_full((a.shape[0], b.shape[2]), NAN)
    start = 0
    for expert, count in enumerate(batch_sizes.tolist()):
        output[start : start + count] = a[start : start + count] @ b[expert]
        start += count
    return output


def grouped_gemm(flavour: str) -> ModuleType:
    """A module `grouped_gemm` like tgale96's (flavour "tgale96") or NVIDIA's ("nvidia")."""
    assert flavour in _BOTH

    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        require(a.dtype is b.dtype is torch.bfloat16, "gmm.bf16", (a.dtype, b.dtype))
        require(a.dim() == 2 and b.dim() == 3 and b.shape[2 if trans_b else 1] == a.shape[1], "gmm.shapes", (a.shape, b.shape, trans_b))
        require(a.is_contiguous() and b.is_contiguous(), "gmm.contiguous", (a.stride(), b.stride()))
        as_should = isinstance(batch_sizes, Tensor) and batch_sizes.dtype is torch.int64 and batch_sizes.shape == b.shape[:1]
        require(as_should, "gmm.counts_int64", batch_sizes)
        require(batch_sizes.is_cpu, "gmm.counts_on_cpu", batch_sizes.device)
        require(int(batch_sizes.sum()) <= a.shape[0], "gmm.counts_fit", (batch_sizes, a.shape))
        if flavour == "nvidia":
            require(bool(batch_sizes.any()), "gmm.some_rows", batch_sizes)
        return _Gmm.apply(a, b, batch_sizes, trans_b)

    ops = ModuleType("grouped_gemm.ops")
    ops.gmm = gmm
    if flavour == "nvidia":
        ops.permute = ops.unpermute = _not_emulated
    package = ModuleType("grouped_gemm")
    package.ops = ops
    return package


def _not_emulated(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("NVIDIA's permute is not emulated")


def _rounded(tensor: Tensor) -> Tensor:
    """To FP8 and back, with one scale."""
    scale = tensor.abs().amax().float().clamp(min=1e-9) / 448 if tensor.numel() else torch.ones(())
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, splits: list[int], packed: bool, fp8: bool, *weights: Tensor) -> Tensor:
        if fp8:
            inp, weights = _rounded(inp), tuple(map(_rounded, weights))
        ctx.save_for_backward(inp, *weights)
        ctx.splits, ctx.packed, ctx.fp8 = splits, packed, fp8
        return torch.cat([rows @ weight.t() for rows, weight in zip(inp.split(splits), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inp, *weights = ctx.saved_tensors
        gradient = _rounded(gradient) if ctx.fp8 else gradient
        of_rows = [rows @ weight for rows, weight in zip(gradient.split(ctx.splits), weights, strict=True)]
        block = inp.new_full((len(weights), *weights[0].shape), NAN)
        of_weights = [block[expert] if ctx.packed else torch.full_like(weight, NAN) for expert, weight in enumerate(weights)]
        for out, given, rows in zip(of_weights, gradient.split(ctx.splits), inp.split(ctx.splits), strict=True):
            if rows.shape[0]:
                out.copy_(given.t() @ rows)
        return torch.cat(of_rows), None, None, None, *of_weights


def transformer_engine(*, packed_gradients: bool = True) -> ModuleType:
    """A module `transformer_engine.pytorch` with GroupedLinear. `packed_gradients`: as since 2.x, one block for all experts."""

    class GroupedLinear(nn.Module):
        def __init__(
            self,
            num_gemms: int,
            in_features: int,
            out_features: int,
            *,
            bias: bool = True,
            params_dtype: torch.dtype | None = None,
            device: torch.device | str = "cpu",
        ) -> None:
            super().__init__()
            assert not bias, "bias is not emulated"
            self.num_gemms, self.in_features = num_gemms, in_features
            for expert in range(num_gemms):
                setattr(self, f"weight{expert}", nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device)))
                setattr(self, f"bias{expert}", torch.empty(0, dtype=params_dtype, device=device))

        def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
            require(isinstance(m_splits, list) and all(type(split) is int for split in m_splits), "te.list_of_splits", m_splits)
            require(sum(m_splits) == inp.shape[0] and len(m_splits) == self.num_gemms, "te.splits_exact", (m_splits, inp.shape))
            weights = [getattr(self, f"weight{expert}") for expert in range(self.num_gemms)]
            biases = [getattr(self, f"bias{expert}") for expert in range(self.num_gemms)]
            require(all(weight.dtype is inp.dtype for weight in weights), "te.one_dtype", inp.dtype)
            require(inp.shape[1] == self.in_features, "te.width", inp.shape)
            require(not any(tensor.is_meta for tensor in (inp, *weights, *biases)), "te.real_weights", "a meta tensor")
            if active:
                require(all(split % active[-1].align == 0 for split in m_splits), "te.fp8_rows", m_splits)
            return _Linear.apply(inp, m_splits, packed_gradients, bool(active), *weights)

    active: list[Any] = []

    @contextmanager
    def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
        active.append(recipe)
        try:
            yield
        finally:
            active.pop()

    @contextmanager
    def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None) -> Iterator[None]:
        with autocast(enabled, fp8_recipe):
            yield

    module = ModuleType("transformer_engine.pytorch")
    module.GroupedLinear = GroupedLinear
    module.Fp8Padding, module.Fp8Unpadding = Fp8Padding, Fp8Unpadding
    if packed_gradients:
        module.autocast = autocast
    else:
        module.fp8_autocast = fp8_autocast
    module.is_fp8_available = lambda return_reason=False: (True, "") if return_reason else True
    module.is_fp8_block_scaling_available = module.is_fp8_available
    module.is_mxfp8_available = lambda return_reason=False: (False, "Device compute capability 10.x required.") if return_reason else False
    return module


class Fp8Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: list[int]) -> list[int]:
        assert len(m_splits) == self.num_gemms and self.align_size
        return [-(-split // self.align_size) * self.align_size for split in m_splits]

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        padded = self.padded(m_splits)
        groups = zip(inp.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([nn.functional.pad(rows, (0, 0, 0, more - split)) for rows, split, more in groups]), padded


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        return torch.cat([rows[:split] for rows, split in zip(inp.split(self.padded(m_splits)), m_splits, strict=True)])


def recipes() -> ModuleType:
    """A module `transformer_engine.common.recipe`."""
    module = ModuleType("transformer_engine.common.recipe")
    for name, align in (("Float8CurrentScaling", 16), ("Float8BlockScaling", 16), ("MXFP8BlockScaling", 32)):
        setattr(module, name, type(name, (), {"align": align}))
    return module


@contextmanager
def in_place(**modules: ModuleType) -> Iterator[None]:
    """The modules under these names in sys.modules, and what was there before at the end."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
