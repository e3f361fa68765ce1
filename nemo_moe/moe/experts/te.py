"""Experts by TransformerEngine's `GroupedLinear`: bf16, counts on the host.

`GroupedLinear` keeps a parameter per expert (`weight0`, `weight1`, ...). Those would be what FSDP, optimizers and
checkpoints see, in a layout of their own; so the two modules here are built on the meta device, stand outside the module
tree, and are called with views of gate_up_proj [L, 2I, H] and down_proj [L, H, I] in the place of their parameters
(`torch.func.functional_call`). Nothing is copied on the way in. On the way back TransformerEngine writes the L gradients
into one block, which is taken as the parameter's gradient as it is; from a release that allocates them one by one they are
copied together (2 * bytes of the parameter).

FP8 (`experts_fp8`) is TransformerEngine's: both matmuls and their backward, by one of the recipes that keep no state between
steps, so that checkpoints do not change and recomputation sees the same scales. Its kernels want each expert's rows in
multiples of 16 (mxfp8: 32); rows are padded with zeros before each matmul and the padding is cut off after it (a copy of the
rows each way), and weights are quantised anew in every forward.

Left out on purpose:
- Delayed scaling: its history of amax values would be state in checkpoints. FP8 parameters: the stored layout is bf16 or fp32.
- fp32: TransformerEngine multiplies fp32 in TF32, which nobody asked for.
- `use_grouped_tensor`, the path with counts on the device: on Hopper it needs cuBLASLt 13.4, and where that is missing
  the module falls back to the path with host counts without a word.

Cost: one host synchronisation a layer; a few microseconds an expert to put the views in place.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nemo_moe.availability import load_te
from nemo_moe.moe.experts.host_counts import HostCountExperts, zero_gradient_of_idle

# Value of `experts_fp8` -> the library's question for the hardware, its recipe, the multiple of rows an expert is padded to.
_FP8 = {
    "current": ("is_fp8_available", "Float8CurrentScaling", 16),
    "block": ("is_fp8_block_scaling_available", "Float8BlockScaling", 16),
    "mxfp8": ("is_mxfp8_available", "MXFP8BlockScaling", 32),
}


class TEExperts(HostCountExperts):
    """Experts computed by `transformer_engine.pytorch.GroupedLinear`. `fp8`: the recipe key `experts_fp8`."""

    NAME = "te"

    def __init__(self, num_experts: int, hidden_size: int, moe_intermediate_size: int, *, fp8: str | None = None) -> None:
        super().__init__(num_experts, hidden_size, moe_intermediate_size)
        self.check_available(fp8)
        self.fp8 = fp8
        # By [out, in], built on first use: only then are L, the dtype and the device final. In a dict, nn.Module does not see them.
        self._linears: dict[tuple[object, ...], nn.Module] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_linears": {}}  # a copy builds its own

    @classmethod
    def library(cls) -> ModuleType:
        """transformer_engine.pytorch. Raises ImportError naming what is missing, and the fix."""
        return load_te()

    @classmethod
    def check_available(cls, fp8: str | None = None) -> None:
        """Raise ImportError or ValueError naming what this machine lacks and the fix; return where nothing is missing."""
        library = cls.library()
        if not hasattr(library, "GroupedLinear"):
            raise ImportError("te: the installed transformer_engine has no GroupedLinear; upgrade it: pip install -U 'nemo_moe[te]'")
        if fp8 is None:
            return
        probe, recipe = _FP8[fp8][:2]
        if not hasattr(library, probe) or not hasattr(cls.recipes(), recipe):
            raise ImportError(f"te: the installed transformer_engine has no {recipe}; upgrade it: pip install -U 'nemo_moe[te]'")
        able, reason = getattr(library, probe)(return_reason=True)
        if not able:
            raise ValueError(f"backend.experts_fp8 is {fp8!r}, which this GPU cannot: {reason.strip()}; choose another recipe, or null")

    @classmethod
    def recipes(cls) -> ModuleType:
        """transformer_engine.common.recipe."""
        return importlib.import_module("transformer_engine.common.recipe")

    def _weights(self, stored: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        return views_of(zero_gradient_of_idle(stored, counts))

    def grouped_linear(self, rows: Tensor, weights: tuple[Tensor, ...], counts: list[int]) -> Tensor:
        if rows.dtype is not torch.bfloat16:
            raise ValueError(f"experts 'te' compute in torch.bfloat16, found {rows.dtype}; set precision to bf16, or choose other experts")
        linear = self._linear(weights[0], len(weights))
        named = {f"weight{expert}": weight for expert, weight in enumerate(weights)}
        # A list: older releases take nothing else, newer ones make a CPU tensor of it.
        if self.fp8 is None:
            output: Tensor = torch.func.functional_call(linear, named, (rows.contiguous(), counts))
            return output
        align = _FP8[self.fp8][2]
        padded, padded_counts = self.library().Fp8Padding(len(counts), align_size=align)(rows.contiguous(), counts)
        with self._autocast():
            output = torch.func.functional_call(linear, named, (padded, padded_counts))
        unpadded: Tensor = self.library().Fp8Unpadding(len(counts), align_size=align)(output, counts)
        return unpadded

    def _autocast(self) -> AbstractContextManager[None]:
        assert self.fp8 is not None
        library, recipe = self.library(), getattr(self.recipes(), _FP8[self.fp8][1])()
        if hasattr(library, "autocast"):
            context: AbstractContextManager[None] = library.autocast(enabled=True, recipe=recipe)
        else:  # before 2.8
            context = library.fp8_autocast(enabled=True, fp8_recipe=recipe)
        return context

    def _linear(self, weight: Tensor, num_experts: int) -> nn.Module:
        key = (num_experts, *weight.shape, weight.dtype, weight.device)
        if key not in self._linears:
            out_features, in_features = weight.shape
            linear = self.library().GroupedLinear(
                num_experts, in_features, out_features, bias=False, params_dtype=weight.dtype, device="meta"
            )
            for expert in range(num_experts):  # placeholders of no elements, but passed to the kernels
                if isinstance(getattr(linear, f"bias{expert}", None), Tensor):
                    setattr(linear, f"bias{expert}", weight.new_empty(0))
            self._linears[key] = linear
        return self._linears[key]


def views_of(weights: Tensor) -> tuple[Tensor, ...]:
    """weights [L, ...] as L views, whose gradients become one [L, ...] tensor: without a copy where they lie side by side."""
    if not weights.requires_grad:
        return weights.unbind()
    views: tuple[Tensor, ...] = _Views.apply(weights)
    return views


class _Views(torch.autograd.Function):
    """`unbind`, whose own backward always stacks."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> tuple[Tensor, ...]:
        return weights.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first, size = gradients[0], gradients[0].numel()
        side_by_side = all(
            gradient.is_contiguous()
            and gradient.dtype is first.dtype
            and gradient.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and gradient.storage_offset() == first.storage_offset() + expert * size
            for expert, gradient in enumerate(gradients)
        )
        if side_by_side:
            return first.as_strided((len(gradients), *first.shape), (size, *first.stride()))
        return torch.stack(gradients)
