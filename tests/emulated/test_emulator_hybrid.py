"""The emulated `HybridEPBuffer`: permuted layouts against the plain reference, versions, overflow, each refusal."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from emulated.deep_ep_emulator import VARIANTS, NotEmulated, as_deep_ep
from emulated.routes import BF16, Lab, broken_rule, check_refusal, expected_output, factor, origins
from nemo_moe.testing.run_distributed import run_distributed

EVEN, NOT_A_CHUNK = (24, 24, 24, 24), (70, 70, 70, 70)


def make_buffer(lab: Lab, **options):
    return lab.module.HybridEPBuffer(
        **{"group": lab.group, "hidden_dim": lab.hidden, "max_num_of_tokens_per_rank": 64, "num_local_experts": lab.local, **options}
    )


def maps(lab: Lab, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_map [T, E] bool and probs [T, E] fp32 of a rank's inputs, -1 slots left out."""
    own = lab.own if rank is None else lab.all_inputs[rank]
    routing = torch.zeros(own.x.shape[0], lab.num_experts + 1, dtype=torch.bool)
    probs = torch.zeros(own.x.shape[0], lab.num_experts + 1)
    ids = torch.where(own.topk_idx < 0, lab.num_experts, own.topk_idx)
    routing, probs = routing.scatter(1, ids, True), probs.scatter(1, ids, own.topk_weights)
    return routing[:, :-1].contiguous(), probs[:, :-1].contiguous()


def dispatch(lab: Lab, buffer, **changes):
    routing_map, probs = maps(lab)
    return buffer.dispatch_with_permute(**{"hidden": lab.own.x, "routing_map": routing_map, "probs": probs, **changes})


def redispatch(lab: Lab, buffer, handle, rows: int, **changes):
    return buffer.dispatch_with_permute(**{"hidden": lab.own.x, "handle": handle, "num_permuted_tokens": rows, **changes})


def bits(tensor):
    return tensor.nan_to_num(99.0)


# ---- values ----


def _round_trip(variant: str, tokens: tuple[int, ...], multiple: int | None, extra: int | None, fused: bool) -> int:
    """`extra` rows over the padded ones in a non-blocking call; None is a blocking one. Returns the handle's length."""
    with as_deep_ep("hybrid", variant, seed=4) as module:
        lab = Lab(module, dist.group.WORLD, tokens=tokens)
        buffer, pad = make_buffer(lab), {"pad_multiple": multiple}
        fuse = {"fuse_permute_dispatch": True} if fused else {}
        wanted, step = lab.local_rows(), multiple or 1
        padded = [-(-len(rows) // step) * step for rows in wanted]
        size = {} if extra is None else {"num_permuted_tokens": sum(padded) + extra, "non_blocking": True}
        tokens_, probs, scales, counts, handle = dispatch(lab, buffer, **pad, **size, **fuse)
        assert scales is None and counts.dtype == torch.int64 and counts.tolist() == padded
        assert tokens_.shape[0] == probs.shape[0] == sum(padded) + (extra or 0) and int(handle[-1]) == 0
        output, row_probs, start = torch.full_like(tokens_, float("nan")), torch.full_like(probs, float("nan")), 0
        for expert, rows in enumerate(wanted):
            end, padded_end = start + len(rows), start + padded[expert]
            assert sorted(origins(tokens_[start:end])) == sorted((rank, token) for rank, token, _ in rows)
            weight = {(rank, token): lab.all_inputs[rank].topk_weights[token, slot] for rank, token, slot in rows}
            assert probs[start:end].tolist() == [float(weight[origin]) for origin in origins(tokens_[start:end])]
            padding = torch.cat([tokens_[end:padded_end].float().reshape(-1), probs[end:padded_end]])
            assert torch.isnan(padding).all() if fused else (padding == 0).all()
            scale = factor(torch.tensor(lab.first + expert)) * probs[start:end, None]
            output[start:end], row_probs[start:end] = (tokens_[start:end].float() * scale).to(BF16), probs[start:end] * 4
            start = padded_end
        assert torch.isnan(tokens_[start:].float()).all() and torch.isnan(probs[start:]).all()
        fuse_back = {"fuse_unpermute_combine": True} if fused else {}
        combined, dense = buffer.combine_with_unpermute(hidden=output, probs=row_probs, handle=handle, **pad, **fuse_back)
        assert combined.dtype == BF16 and torch.equal(combined, expected_output(lab.own))
        routing_map, sent = maps(lab)
        assert torch.equal(dense, torch.where(routing_map, sent * 4, 0.0))
        again, no_probs, _, again_counts, _ = redispatch(
            lab, buffer, handle, tokens_.shape[0], non_blocking=extra is not None, **pad, **fuse
        )
        assert no_probs is None and torch.equal(bits(again), bits(tokens_)) and torch.equal(again_counts, counts)
        assert buffer.reallocations == 0
        return len(handle)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tokens", [EVEN, NOT_A_CHUNK], ids=["even", "not_a_chunk"])
@pytest.mark.parametrize(("multiple", "extra"), [(None, None), (16, None), (16, 0), (16, 64), (None, 7)])
def test_round_trip_equals_the_reference(tokens: tuple[int, ...], multiple: int | None, extra: int | None, world_size: int) -> None:
    """rules hybrid.layout, hybrid.padding_rows, hybrid.dense_probs, any.undefined_rows"""
    run_distributed(_round_trip, world_size, "2026-07", tokens, multiple, extra, False)


@pytest.mark.parametrize(
    ("variant", "fused", "entries"),
    [
        ("2026-02", False, 9),
        ("2026-03", False, 9),
        ("2026-03", True, 11),
        ("2026-07", True, 11),
        ("2026-09", False, 12),
        ("2026-09", True, 12),
    ],
)
def test_versions_differ_in_their_handles(variant: str, fused: bool, entries: int) -> None:
    """rules hybrid.versions, hybrid.padding_rows"""
    assert run_distributed(_round_trip, 2, variant, EVEN, 8, 16, fused) == [entries, entries]


def test_versions_differ_in_their_signatures() -> None:
    """rule hybrid.versions"""
    fused, stated = [], []
    for variant in VARIANTS["hybrid"]:
        with as_deep_ep("hybrid", variant) as module:
            parameters = inspect.signature(module.HybridEPBuffer.dispatch_with_permute).parameters
            fused += [variant] if "fuse_permute_dispatch" in parameters else []
            stated += [variant] if "num_of_tokens_per_rank" in parameters else []
            for call in ("dispatch_with_permute", "combine_with_unpermute"):
                with pytest.raises(TypeError, match="unexpected keyword"):
                    getattr(module.HybridEPBuffer, call)(None, hidden=None, handle=None, num_sms=3)
            with pytest.raises(TypeError, match="positional"):
                module.HybridEPBuffer.dispatch_with_permute(None, None)
            with pytest.raises(NotEmulated):
                module.HybridEPBuffer.dispatch(None)
    assert fused == ["2026-07", "2026-03", "2026-09"] and stated == ["2026-09"]


def _uneven() -> None:
    with as_deep_ep("hybrid", "2026-09") as module:
        lab = Lab(module, dist.group.WORLD, tokens=(17, 0, 5, 30))
        buffer = make_buffer(lab)
        tokens, probs, _, counts, handle = dispatch(lab, buffer, num_of_tokens_per_rank=32)
        assert counts.tolist() == [len(rows) for rows in lab.local_rows()]
        experts = torch.repeat_interleave(torch.arange(lab.local), counts) + lab.first
        combined, _ = buffer.combine_with_unpermute(hidden=(tokens.float() * (factor(experts) * probs)[:, None]).to(BF16), handle=handle)
        assert torch.equal(combined, expected_output(lab.own))


@pytest.mark.parametrize("world_size", [2, 4])
def test_unequal_tokens_in_the_newest_version(world_size: int) -> None:
    """rule hybrid.versions"""
    run_distributed(_uneven, world_size)


def _overflow() -> None:
    with as_deep_ep("hybrid") as module:
        lab = Lab(module, dist.group.WORLD, dropped=0.0)
        buffer = make_buffer(lab)
        rows = sum(len(expert) for expert in lab.local_rows())
        tokens, probs, _, counts, handle = dispatch(lab, buffer, num_permuted_tokens=rows - 5, non_blocking=True)
        assert tokens.shape[0] == probs.shape[0] == rows - 5 and int(handle[-1]) == 1 and int(counts.sum()) == rows
        combined, dense = buffer.combine_with_unpermute(hidden=torch.ones_like(tokens), probs=probs, handle=handle)
        routing_map, _ = maps(lab)
        missing = torch.tensor([int(routing_map.sum() - combined[:, 0].float().sum())])
        dist.all_reduce(missing)
        assert int(missing) == 5 * lab.world and int((dense > 0).sum()) == int(combined[:, 0].float().sum())


def test_rows_over_the_capacity_are_dropped_and_flagged() -> None:
    """rules hybrid.overflow, hybrid.overflow_counts"""
    run_distributed(_overflow, 2)


def _values() -> None:
    with as_deep_ep("hybrid") as module:
        lab = Lab(module, dist.group.WORLD, dropped=0.0, num_experts=8, top_k=4)
        buffer, own = make_buffer(lab), lab.own
        orders = []
        for seed in (1, 1, 2):
            with as_deep_ep("hybrid", seed=seed):
                first = dispatch(lab, buffer, hidden=own.x.requires_grad_())[0]
                orders.append(origins(first))
                assert not first.requires_grad
        assert orders[0] == orders[1] != orders[2]
        topk = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights, "num_of_experts": 8, "routing_map": None, "probs": None}
        by_ids = dispatch(lab, buffer, **topk)
        assert by_ids[3].tolist() == [len(rows) for rows in lab.local_rows()]
        # An id named twice: one row and one of its weights.
        twice = torch.tensor([[0, 0, 1, 2]]).repeat(24, 1)
        _, probs, _, counts, _ = dispatch(
            lab, buffer, **{**topk, "topk_idx": twice, "topk_weights": torch.tensor([[0.5, 2.0, 1, 1]]).repeat(24, 1)}
        )
        if lab.rank == 0:
            assert counts.tolist() == [48, 48, 48, 0] and set(probs[:48].tolist()) <= {0.5, 2.0}
        # Two experts of rank 0, one of rank 1: rank 0's sum 256 + 1 crosses in bf16, as 256.
        everyone = {"topk_idx": torch.tensor([[0, 1, 4]]).repeat(24, 1), "topk_weights": torch.ones(24, 3)}
        tokens, _, _, counts, handle = dispatch(lab, buffer, **{**topk, **everyone})
        rows = torch.ones_like(tokens)
        if lab.rank == 0:
            rows[: int(counts[0])] = 256.0
        combined, dense = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        assert dense is None and (combined.float() == 256.0).all()
        # fp8 rows bring their scales; the return way is bf16.
        fp8 = make_buffer(lab, hidden_dim=512, use_fp8=True)
        data, scales = own.x.detach().float().repeat(1, 2).to(torch.float8_e4m3fn), torch.ones(24, 4)
        tokens, _, got, _, handle = dispatch(lab, fp8, hidden=data, scaling_factor=scales, pad_multiple=16)
        assert tokens.dtype == data.dtype and got.shape == (tokens.shape[0], 4) and set(got.unique().tolist()) <= {0.0, 1.0}
        fp8.combine_with_unpermute(hidden=tokens.to(BF16), handle=handle, pad_multiple=16)
        # A larger call grows the buffer, on all ranks.
        assert buffer.max_num_of_tokens_per_rank == 512 and buffer.reallocations == 0
        large = own.x.repeat(24, 1)
        dispatch(lab, buffer, hidden=large, routing_map=maps(lab)[0].repeat(24, 1), probs=None)
        assert buffer.max_num_of_tokens_per_rank == 576 and buffer.reallocations == 1


def test_order_ids_sums_fp8_and_growth() -> None:
    """rules hybrid.slot_order, hybrid.topk_duplicates, hybrid.two_roundings, hybrid.reallocation, any.no_graph"""
    run_distributed(_values, 2)


# ---- refusals ----


def _mixed(lab: Lab, same, other):
    return same if lab.rank == 0 else other


def _with(**changes) -> Callable[[Lab], object]:
    return lambda lab: dispatch(lab, make_buffer(lab), **changes)


def _tokens(count: int | None, variant_arguments: dict | None = None) -> Callable[[Lab], object]:
    def case(lab: Lab) -> object:
        rows = (24 if lab.rank == 0 else 32) if count is None else count
        hidden, routing = torch.zeros(rows, lab.hidden, dtype=BF16), torch.zeros(rows, 8, dtype=torch.bool)
        return dispatch(lab, make_buffer(lab), hidden=hidden, routing_map=routing, probs=None, **(variant_arguments or {}))

    return case


def _ids(**changes) -> Callable[[Lab], object]:
    def case(lab: Lab) -> object:
        ids = torch.arange(3).repeat(24, 1)
        topk = {"topk_idx": ids, "topk_weights": torch.ones(24, 3), "num_of_experts": 8, "routing_map": None, "probs": None}
        return dispatch(lab, make_buffer(lab), **{**topk, **changes})

    return case


def _of_handle(change: Callable) -> Callable[[Lab], object]:
    """A padded dispatch, and then `change(lab, buffer, received rows, handle)`."""

    def case(lab: Lab) -> object:
        buffer = make_buffer(lab)
        tokens, *_, handle = dispatch(lab, buffer, pad_multiple=16)
        return change(lab, buffer, tokens, handle)

    return case


def _back(buffer, tokens, handle, **changes):
    return buffer.combine_with_unpermute(**{"hidden": tokens, "handle": handle, "pad_multiple": 16, **changes})


CASES: dict[str, Callable[[Lab], object]] = {
    "hybrid.sms": lambda lab: make_buffer(lab, num_sms_dispatch_api=0),
    "hybrid.hidden": lambda lab: make_buffer(lab, hidden_dim=264),
    "hybrid.experts": lambda lab: make_buffer(lab, num_local_experts=3),
    "hybrid.same_constructor": lambda lab: make_buffer(lab, max_num_of_tokens_per_rank=_mixed(lab, 64, 640)),
    "hybrid.equal_tokens": _tokens(None),
    "hybrid.token_rest": _tokens(67),
    "hybrid.some_tokens": _tokens(0),
    "hybrid.same_call": lambda lab: dispatch(lab, make_buffer(lab), probs=_mixed(lab, None, maps(lab)[1])),
    "hybrid.hidden_dtype": lambda lab: dispatch(lab, make_buffer(lab), hidden=lab.own.x.float()),
    "hybrid.hidden_contiguous": lambda lab: dispatch(lab, make_buffer(lab), hidden=lab.own.x.repeat(1, 2)[:, ::2]),
    "hybrid.scales": lambda lab: dispatch(
        lab, make_buffer(lab, hidden_dim=512, use_fp8=True), hidden=lab.own.x.repeat(1, 2).to(torch.float8_e4m3fn)
    ),
    "hybrid.one_routing": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=lab.own.topk_idx),
    "hybrid.num_of_experts": _ids(num_of_experts=None),
    "hybrid.topk_shape": _ids(topk_idx=torch.zeros(3, 3, dtype=torch.int64)),
    "hybrid.topk_range": _ids(topk_idx=torch.full((24, 3), -1)),
    "hybrid.topk_weights": _ids(topk_weights=torch.ones(24, 3, dtype=torch.float64)),
    "hybrid.routing_map": lambda lab: dispatch(lab, make_buffer(lab), routing_map=maps(lab)[0].int()),
    "hybrid.probs": lambda lab: dispatch(lab, make_buffer(lab), probs=maps(lab)[1].t().contiguous().t()),
    "hybrid.non_blocking_rows": _with(non_blocking=True),
    "hybrid.rows_multiple": _with(non_blocking=True, num_permuted_tokens=200, pad_multiple=16),
    "hybrid.blocking_rows": _with(num_permuted_tokens=512),
    "hybrid.cached_no_routing": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, len(x), pad_multiple=16, routing_map=maps(lab)[0])),
    "hybrid.cached_rows": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, None, pad_multiple=16)),
    "hybrid.cached_blocking": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, len(x), pad_multiple=16, non_blocking=True)),
    "hybrid.same_padding": _of_handle(lambda lab, b, x, h: _back(b, x, h, pad_multiple=None)),
    "hybrid.same_fuse": _of_handle(lambda lab, b, x, h: _back(b, x, h, fuse_unpermute_combine=True)),
    "hybrid.handle_whole": _of_handle(lambda lab, b, x, h: _back(b, x, h[1:])),
    "hybrid.handle_shape": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, len(x), pad_multiple=16, hidden=lab.own.x[:8])),
    "hybrid.combine_dtype": _of_handle(lambda lab, b, x, h: _back(b, x.float(), h)),
    "hybrid.combine_rows": _of_handle(lambda lab, b, x, h: _back(b, x[:-1], h)),
    "hybrid.combine_probs": _of_handle(lambda lab, b, x, h: _back(b, x, h, probs=torch.ones(len(x), 8))),
}
OTHER_CASES = {"hybrid.stated_tokens": ("2026-09", _tokens(24, {"num_of_tokens_per_rank": 16}))}


def _refused(rule: str) -> str:
    variant, case = OTHER_CASES[rule] if rule in OTHER_CASES else (None, CASES[rule])
    return broken_rule("hybrid", variant, case)


@pytest.mark.parametrize("rule", [*CASES, *OTHER_CASES])
def test_refusal(rule: str) -> None:
    check_refusal(rule, run_distributed(_refused, 2, rule))


def _more_refused(case: str) -> str:
    cases = {
        "padding of a cached dispatch": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, len(x))),
        "fuse of a cached dispatch": _of_handle(
            lambda lab, b, x, h: redispatch(lab, b, h, len(x), pad_multiple=16, fuse_permute_dispatch=True)
        ),
        "rows of a cached dispatch": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, len(x) + 16, pad_multiple=16)),
        "nothing to route by": _with(routing_map=None, probs=None),
    }
    return broken_rule("hybrid", None, cases[case])


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("padding of a cached dispatch", "hybrid.same_padding"),
        ("fuse of a cached dispatch", "hybrid.same_fuse"),
        ("rows of a cached dispatch", "hybrid.cached_rows"),
        ("nothing to route by", "hybrid.one_routing"),
    ],
)
def test_more_refusals(case: str, rule: str) -> None:
    check_refusal(rule, run_distributed(_more_refused, 2, case))


def _accepted(count: int) -> str:
    return broken_rule("hybrid", None, _tokens(count))


@pytest.mark.parametrize("count", [2, 64, 66, 512])
def test_the_legal_side_of_a_limit_passes(count: int) -> None:
    assert run_distributed(_accepted, 2, count) == ["", ""]
