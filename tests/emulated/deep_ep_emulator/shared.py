"""What the emulated generations share: refusing, exchanging between ranks, undefined memory, events.

Every collective call is one all-gather of (which call, local refusal, values that must agree, payload). So a refusal on
one rank is raised on all of them, where the real library would crash on one rank and hang on the others, and the process
group stays usable for the next test. R ranks, T tokens of a rank, H hidden size, K top-k, E experts, P received rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .rules import RULES, Rule

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


class RuleBroken(AssertionError):
    """A call that the real library does not survive, or does not answer rightly.

    Attributes:
        rule: its name in the table of rules.
    """

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"[{rule.name}] {rule.text}: {detail} (the library: {rule.real}; {rule.state})")
        self.rule = rule.name


class NotEmulated(NotImplementedError):
    """The facts do not say enough about this call to emulate it."""


def require(holds: bool, rule: str, detail: object) -> None:
    if not holds:
        raise RuleBroken(RULES[rule], str(detail))


def exchange(group: dist.ProcessGroup, call: str, prepare: Callable[[], tuple[dict[str, Any], Any]]) -> list[Any]:
    """Check a call on every rank and share what it brings.

    Args:
        call: what must be the same call on every rank.
        prepare: makes the local checks; returns (values that must be equal on all ranks, by the rule that says so; payload).

    Returns:
        The payloads by rank.
    """
    problem: Exception | None = None
    agreed: dict[str, Any] = {}
    payload = None
    try:
        agreed, payload = prepare()
    except Exception as error:  # anything: the other ranks are waiting
        problem = error
    # torch.save, because pickle alone can not carry fp8.
    packed = io.BytesIO()
    torch.save((call, problem and f"{type(problem).__name__}: {problem}", agreed, payload), packed)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, packed.getvalue(), group=group)
    entries = [torch.load(io.BytesIO(data), weights_only=False) for data in gathered]
    if problem is not None:
        raise problem
    calls = [entry[0] for entry in entries]
    require(len(set(calls)) == 1, "any.same_call", calls)
    refusals = [f"rank {rank}: {entry[1]}" for rank, entry in enumerate(entries) if entry[1]]
    require(not refusals, "any.peer_refused", "; ".join(refusals))
    for rule in agreed:
        values = [entry[2].get(rule) for entry in entries]
        require(all(value == values[0] for value in values), rule, values)
    return [entry[3] for entry in entries]


def check_deterministic_fill() -> None:
    both = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    require(not both, "any.deterministic_fill", "both are on")


# ---- rows ----


def split_rows(x: Tensor | Sequence[Tensor], generation: str) -> tuple[Tensor, Tensor | None]:
    """The payload of a dispatch, checked: bf16 [T, H], or (float8_e4m3fn [T, H], scales [T, H / 128] or [T])."""
    data: Tensor
    scales: Tensor | None
    data, scales = (x, None) if isinstance(x, Tensor) else (x[0], x[1])
    require(data.dim() == 2 and data.is_contiguous(), f"{generation}.x_contiguous", f"{tuple(data.shape)}, strides {data.stride()}")
    require(
        data.dtype == (BF16 if scales is None else FP8),
        f"{generation}.x_dtype",
        f"{data.dtype}, {'no' if scales is None else 'with'} scales",
    )
    if scales is not None:
        shapes = ((data.shape[0], data.shape[1] // 128), (data.shape[0],))
        fits = scales.dtype in (torch.float32, torch.int32) and tuple(scales.shape) in shapes
        require(fits, f"{generation}.scales", f"{scales.dtype} {tuple(scales.shape)} for rows {tuple(data.shape)}")
    return data.detach(), None if scales is None else scales.detach()


def of_all(ranks: list[dict[str, Any]], part: str) -> Tensor:
    """One part of every rank's payload, one after another."""
    values = [rank[part] for rank in ranks]
    return torch.cat([value.view(torch.uint8) for value in values]).view(FP8) if values[0].dtype == FP8 else torch.cat(values)


def check_topk(topk_idx: Tensor, num_experts: int, dtype: torch.dtype, generation: str) -> None:
    require(topk_idx.dtype == dtype, f"{generation}.topk_idx_dtype", f"found {topk_idx.dtype}, this build takes {dtype}")
    require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), f"{generation}.topk_idx_contiguous", f"strides {topk_idx.stride()}")
    require(topk_idx.shape[1] <= 32, f"{generation}.topk_limit", topk_idx.shape[1])
    inside = bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())
    require(inside, f"{generation}.topk_idx_range", "ids outside" if not inside else "")


def check_weights(weights: Tensor, shape: tuple[int, ...], rule: str) -> None:
    fits = weights.dtype == torch.float32 and tuple(weights.shape) == shape and weights.is_contiguous()
    require(fits, rule, f"{weights.dtype} {tuple(weights.shape)}, strides {weights.stride()}, for {shape}")


def check_bias(bias: Tensor | Sequence[Tensor] | None, shape: tuple[int, int], rule: str) -> list[Tensor]:
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    fits = len(biases) <= 2 and all(one.dtype == BF16 and tuple(one.shape) == shape and one.is_contiguous() for one in biases)
    require(fits, rule, f"{[(one.dtype, tuple(one.shape)) for one in biases]} for {shape}")
    return [one.detach() for one in biases]


def align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- memory that nobody wrote, and order that nobody promised ----

_noise = torch.Generator()


def seed_noise(seed: int) -> None:
    """From here on, row orders and undefined integers follow from this seed (and from the rank and the calls made)."""
    _noise.manual_seed(7919 * seed + (dist.get_rank() if dist.is_initialized() else 0))


def shuffled(index: Tensor) -> Tensor:
    return index[torch.randperm(index.numel(), generator=_noise)]


def undefined(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """New memory as a kernel leaves it: NaN, or integers of which some look right and some are far outside."""
    if dtype == FP8:
        return torch.full(tuple(shape), 0x7F, dtype=torch.uint8).view(FP8)
    if dtype.is_floating_point:
        return torch.full(tuple(shape), float("nan"), dtype=dtype)
    choices = torch.tensor([1, 0, 1] if dtype is torch.bool else [0, 1, 2, -1, -17, 1 << 20]).to(dtype)
    return choices[torch.randint(choices.numel(), tuple(shape), generator=_noise)]


def place(values: Tensor, index: Tensor, zero: Tensor | None = None) -> Tensor:
    """Row p is values[index[p]]; undefined where index is -1, but zeros where `zero` [P] bool says so."""
    dtype = values.dtype
    out = undefined((index.numel(), *values.shape[1:]), dtype)
    if dtype == FP8:
        values, out = values.view(torch.uint8), out.view(torch.uint8)
    real = index >= 0
    out[real] = values[index[real]]
    if zero is not None:
        out[zero & ~real] = 0
    return out.view(dtype)


# ---- streams and events: order without a device ----


class EventHandle:
    """Marks a point of the current stream. Here: holds the results that become visible when it is waited for."""

    def __init__(self) -> None:
        self._withheld: list[tuple[Tensor, Tensor]] = []

    def current_stream_wait(self) -> None:
        for target, value in self._withheld:
            target.data.copy_(value)  # .data: memory that a kernel writes does not count as changed in place
        self._withheld = []


class EventOverlap:
    """What calls return. `event` is None where the call was synchronous."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        require(self.event is not None, "any.wait_without_event", "this call was not asynchronous")
        assert self.event is not None
        self.event.current_stream_wait()


def finish(results: Sequence[Tensor | None], asynchronous: bool) -> EventOverlap:
    """The event of a call. An asynchronous one leaves undefined memory in `results` until it is waited for."""
    if not asynchronous:
        return EventOverlap()
    event = EventHandle()
    for tensor in results:
        if tensor is not None:
            event._withheld.append((tensor, tensor.clone()))
            tensor.copy_(undefined(tensor.shape, tensor.dtype))
    return EventOverlap(event)
