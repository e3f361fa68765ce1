"""The conformance suite of dispatchers: what each of them must compute, whatever it is made of.

It is shipped, so that it can be run on a cluster as it is there: `check_case` is called on every rank of an initialised
process group. Each rank draws the tokens of *all* ranks from seeds, computes the whole layer on them by plain loops, and
compares its own slice of outputs and gradients with what the dispatcher under test gave. Ranks hold only their own
experts' weights, so a right answer shows that rows crossed ranks; `Case.crosses_ranks` checks that they had to.

T tokens of a rank, K experts per token, E experts, H hidden size, I expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import build_experts
from nemo_moe.moe.types import Dispatched, route_log_contexts
from nemo_moe.registry import DISPATCHERS
from nemo_moe.testing.tolerances import assert_close_relative

HIDDEN_SIZE, EXPERT_WIDTH = 64, 32


@dataclass(frozen=True)
class Case:
    """One routing situation.

    Attributes:
        tokens: tokens of each of four ranks (the first `world size` are used).
        num_experts, top_k: E, K.
        route: (generator, T, E, K) -> [T, K] ids.
        crosses_ranks: some rank must need an expert of another rank.
        shows: the fault that the case exposes, with its id in the list of known faults where it has one.
    """

    name: str
    tokens: tuple[int, int, int, int]
    num_experts: int
    top_k: int
    route: Callable[[torch.Generator, int, int, int], Tensor]
    shows: str
    crosses_ranks: bool = True


def _random(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    return torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=1).indices


def _dropped(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    ids = _random(generator, num_tokens, num_experts, top_k)
    ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    ids[:1] = -1  # a token that reaches nobody
    return ids


def _duplicates(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    ids = _random(generator, num_tokens, num_experts, top_k)
    ids[::2, 1] = ids[::2, 0]
    return ids


def _constant(expert: int) -> Callable[[torch.Generator, int, int, int], Tensor]:
    return lambda generator, num_tokens, num_experts, top_k: torch.full((num_tokens, top_k), expert, dtype=torch.int64)


def _first_rank_only(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    return _random(generator, num_tokens, max(2, num_experts // 4), top_k)


def _nobody(generator: torch.Generator, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    return torch.full((num_tokens, top_k), -1, dtype=torch.int64)


CASES: tuple[Case, ...] = (
    Case("random", (24, 24, 24, 24), 8, 3, _random, "the plain case"),
    Case("uneven", (17, 23, 31, 11), 8, 2, _random, "B10: ranks with different numbers of tokens"),
    Case("empty_rank", (19, 0, 7, 0), 8, 2, _random, "ranks without tokens take part in every collective"),
    Case("no_tokens", (0, 0, 0, 0), 8, 2, _random, "nobody has a token", crosses_ranks=False),
    Case("one_token", (1, 1, 1, 1), 4, 4, _random, "a single token that needs every expert"),
    Case("hot_expert", (8, 8, 8, 8), 16, 1, _constant(13), "B09: all tokens to one expert, on the last rank"),
    Case("idle_ranks", (9, 12, 9, 9), 8, 2, _first_rank_only, "B01: ranks none of whose experts is used"),
    Case("dropped_slots", (12, 9, 14, 10), 8, 3, _dropped, "B07: -1 slots, and a token without any expert"),
    Case("all_dropped", (6, 6, 6, 6), 8, 2, _nobody, "no slot at all", crosses_ranks=False),
    Case("duplicate_ids", (10, 12, 10, 12), 8, 3, _duplicates, "B06: an id named twice counts as the sum of its weights"),
    Case("top_1", (13, 16, 9, 12), 8, 1, _random, "K = 1"),
)


@dataclass
class Batch:
    """One rank's inputs and the weights of its loss: [T, H], [T, K], [T, K], [T, H]."""

    hidden_states: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    loss_weights: Tensor


@dataclass
class Result:
    """Output [T, H] and gradients of one rank; `experts` are those of its local gate_up_proj and down_proj.

    tokens_per_expert [L], and row_weights [R], sorted: the routing weights as they arrived, which must be bit for bit
    those that were sent (case B20).
    """

    output: Tensor
    hidden_states: Tensor
    topk_weights: Tensor
    experts: list[Tensor]
    tokens_per_expert: Tensor
    row_weights: Tensor


def draw_batches(
    case: Case, world_size: int, *, shared: bool, seed: int, dtype: torch.dtype = torch.float32, hidden_size: int = HIDDEN_SIZE
) -> list[Batch]:
    """The inputs of all ranks, the same on every rank. `shared`: all ranks hold rank 0's batch."""
    batches = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        num_tokens = case.tokens[rank % len(case.tokens)]
        hidden_states = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
        topk_idx = case.route(generator, num_tokens, case.num_experts, case.top_k)
        topk_weights = torch.rand(num_tokens, case.top_k, generator=generator)
        loss_weights = torch.randn(num_tokens, hidden_size, generator=generator)
        batches.append(Batch(hidden_states, topk_idx, topk_weights, loss_weights))
    return [batches[0]] * world_size if shared else batches


def expert_weights(case: Case, seed: int, dtype: torch.dtype = torch.float32, hidden_size: int = HIDDEN_SIZE) -> tuple[Tensor, Tensor]:
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I] of all experts, the same on every rank."""
    generator = torch.Generator().manual_seed(77 + seed)
    gate_up_proj = torch.randn(case.num_experts, 2 * EXPERT_WIDTH, hidden_size, generator=generator) / hidden_size**0.5
    down_proj = torch.randn(case.num_experts, hidden_size, EXPERT_WIDTH, generator=generator) / EXPERT_WIDTH**0.5
    return gate_up_proj.to(dtype), down_proj.to(dtype)


def reference(
    case: Case, batches: list[Batch], rank: int, world_size: int, *, shared: bool, seed: int, merges_duplicates: bool = False
) -> Result:
    """The layer by plain loops in fp64 on the tokens of all ranks; the slice that belongs to `rank`.

    With a shared batch there is one loss (each rank computes the same), otherwise the sum of the ranks' losses.
    `merges_duplicates` changes what arrives (one row for an expert that a token names twice), not what is computed.
    """
    dtype, hidden_size = batches[0].hidden_states.dtype, batches[0].hidden_states.shape[1]
    gate_up_proj, down_proj = (weight.double().requires_grad_() for weight in expert_weights(case, seed, dtype, hidden_size))
    leaves, outputs, loss = [], [], torch.zeros((), dtype=torch.float64)
    for batch in batches[:1] if shared else batches:
        hidden_states = batch.hidden_states.double().requires_grad_()
        topk_weights = batch.topk_weights.double().requires_grad_()
        rows = []
        for token, ids in enumerate(batch.topk_idx.tolist()):
            total = torch.zeros(hidden_size, dtype=torch.float64)
            for slot, expert in enumerate(ids):
                if expert >= 0:
                    gate, up = (gate_up_proj[expert] @ hidden_states[token]).chunk(2)
                    total = total + topk_weights[token, slot] * (down_proj[expert] @ (F.silu(gate) * up))
            rows.append(total)
        output = torch.stack(rows) if rows else torch.zeros(0, hidden_size, dtype=torch.float64)
        # The zero keeps leaves that no slot reaches in the graph: their gradients are zeros, not missing.
        loss = loss + (output * batch.loss_weights.double()).sum() + 0.0 * (hidden_states.sum() + topk_weights.sum())
        leaves.append((hidden_states, topk_weights))
        outputs.append(output.detach())
    (loss + 0.0 * (gate_up_proj.sum() + down_proj.sum())).backward()
    mine = 0 if shared else rank
    local = slice(rank * case.num_experts // world_size, (rank + 1) * case.num_experts // world_size)
    slots = [_slots(batch, merges_duplicates) for batch in (batches[:1] if shared else batches)]
    ids, weights = torch.cat([ids for ids, _ in slots]), torch.cat([weights for _, weights in slots])
    counts = torch.bincount(ids[ids >= 0], minlength=case.num_experts)[local]
    row_weights = weights[(ids >= local.start) & (ids < local.stop)].sort().values
    experts = [_gradient(gate_up_proj)[local], _gradient(down_proj)[local]]
    return Result(outputs[mine], _gradient(leaves[mine][0]), _gradient(leaves[mine][1]), experts, counts, row_weights)


def _slots(batch: Batch, merged: bool) -> tuple[Tensor, Tensor]:
    """Expert ids and routing weights of all slots of a batch; `merged` adds up those of one token and one expert."""
    if not merged:
        return batch.topk_idx.reshape(-1), batch.topk_weights.reshape(-1)
    sums: dict[tuple[int, int], Tensor] = {}
    for token, (ids, weights) in enumerate(zip(batch.topk_idx.tolist(), batch.topk_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            sums[token, expert] = sums[token, expert] + weight if (token, expert) in sums else weight
    ids = torch.tensor([expert for _, expert in sums], dtype=torch.int64)
    return ids, torch.stack(list(sums.values())) if sums else batch.topk_weights.new_zeros(0)


def run_layer(
    case: Case,
    backend: BackendConfig,
    batch: Batch,
    group: dist.ProcessGroup,
    *,
    seed: int,
    device: torch.device,
    recompute: bool = False,
    poison: bool = False,
    dispatcher: MoEFlexTokenDispatcher | None = None,
) -> Result:
    """Forward and backward of one layer with the dispatcher under test, on this rank.

    Args:
        recompute: run it under activation checkpointing with the route log.
        poison: fill freed memory with NaN first, so that reading uninitialised rows shows.
        dispatcher: reuse this one (a second step), instead of building one.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    dispatcher = dispatcher or MoEFlexTokenDispatcher(backend, case.num_experts, group)
    dtype, hidden_size = batch.hidden_states.dtype, batch.hidden_states.shape[1]
    experts = build_experts(backend.experts, case.num_experts, hidden_size, EXPERT_WIDTH, fp8=backend.experts_fp8).to(dtype)
    gate_up_proj, down_proj = expert_weights(case, seed, dtype, hidden_size)
    with torch.no_grad():
        experts.gate_up_proj.copy_(gate_up_proj)
        experts.down_proj.copy_(down_proj)
    experts.keep_local(rank, world_size)
    experts.to(device)
    hidden_states = batch.hidden_states.to(device, copy=True).requires_grad_()
    topk_weights = batch.topk_weights.to(device, copy=True).requires_grad_()
    topk_idx = batch.topk_idx.to(device)
    if poison:
        poisoned = [torch.full((64 + 8 * size, hidden_size), float("nan"), dtype=dtype, device=device) for size in range(32)]
        del poisoned
    recorder = _Recorder(dispatcher)

    def forward(tokens: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = experts(tokens, topk_idx, weights, recorder)
        return output

    if recompute:
        output = checkpoint(forward, hidden_states, topk_weights, use_reentrant=False, context_fn=route_log_contexts)
        assert isinstance(output, Tensor)
    else:
        output = forward(hidden_states, topk_weights)
    (output.float() * batch.loss_weights.to(device)).sum().backward()
    if recompute and hidden_states.numel():
        assert len(recorder.dispatched) == 2, f"the checkpointed layer ran {len(recorder.dispatched)} times, not twice"
    experts_gradients = [_gradient(experts.gate_up_proj), _gradient(experts.down_proj)]
    first = recorder.dispatched[0]
    assert first.topk_weights.dtype is torch.float32, f"routing weights arrived as {first.topk_weights.dtype}"
    row_weights = first.topk_weights.detach()[: int(first.tokens_per_expert.sum())].sort().values
    gradients = (_gradient(hidden_states), _gradient(topk_weights), experts_gradients)
    return Result(output.detach(), *gradients, first.tokens_per_expert, row_weights)


class _Recorder:
    """The dispatcher under test, keeping what its dispatch returned."""

    def __init__(self, dispatcher: MoEFlexTokenDispatcher) -> None:
        self.combine = dispatcher.combine
        self._dispatch = dispatcher.dispatch
        self.dispatched: list[Dispatched] = []

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        self.dispatched.append(self._dispatch(hidden_states, topk_idx, topk_weights))
        return self.dispatched[-1]


def check_case(
    case: Case,
    backend: BackendConfig,
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    steps: int = 1,
    recompute: bool = False,
    poison: bool = False,
    hidden_size: int | None = None,
) -> None:
    """Assert that `backend` computes `case` like the reference, on every rank of `group`. Collective.

    Args:
        tolerance: relative to the norm of each reference tensor; on 16-bit dtypes give that dtype's.
        steps: forward/backward passes with fresh data through one dispatcher (buffers and state must not leak).
        hidden_size: H; None is 64, or the next multiple that the dispatcher's registry entry asks for.

    Raises:
        AssertionError: names the tensor, the error found and the tolerance.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    spec = DISPATCHERS.get(backend.dispatcher)
    shared = spec.needs_shared_batch
    hidden_size = hidden_size or math.lcm(HIDDEN_SIZE, spec.hidden_size_multiple_of)
    device = device or torch.device("cpu")
    dispatcher = MoEFlexTokenDispatcher(backend, case.num_experts, group)
    for seed in range(steps):
        batches = draw_batches(case, world_size, shared=shared, seed=seed, dtype=dtype, hidden_size=hidden_size)
        if case.crosses_ranks and world_size > 1:
            assert _crosses_ranks(case, batches, world_size), f"case {case.name} routes nothing to another rank: it shows nothing"
        merges = spec.merges_duplicates
        expected = reference(case, batches, rank, world_size, shared=shared, seed=seed, merges_duplicates=merges)
        actual = run_layer(
            case, backend, batches[rank], group, seed=seed, device=device, recompute=recompute, poison=poison, dispatcher=dispatcher
        )
        assert actual.tokens_per_expert.tolist() == expected.tokens_per_expert.tolist(), (
            f"tokens_per_expert {actual.tokens_per_expert.tolist()}, expected {expected.tokens_per_expert.tolist()}"
        )
        assert torch.equal(actual.row_weights.cpu(), expected.row_weights), f"{case.name}: routing weights changed on their way"
        for name in ("output", "hidden_states", "topk_weights"):
            assert_close_relative(getattr(actual, name).double().cpu(), getattr(expected, name), tolerance, f"{case.name}: {name}")
        for name, got, wanted in zip(("gate_up_proj", "down_proj"), actual.experts, expected.experts, strict=True):
            assert_close_relative(got.double().cpu(), wanted, tolerance, f"{case.name}: {name}")
            unused = expected.tokens_per_expert == 0
            assert not got.cpu()[unused].any(), f"{case.name}: {name} of an expert without tokens has a gradient that is not exactly zero"


def _crosses_ranks(case: Case, batches: list[Batch], world_size: int) -> bool:
    owners = [batch.topk_idx[batch.topk_idx >= 0] // (case.num_experts // world_size) for batch in batches]
    return any(bool((owner != rank).any()) for rank, owner in enumerate(owners))


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "a gradient is missing where zeros are due"
    return leaf.grad
