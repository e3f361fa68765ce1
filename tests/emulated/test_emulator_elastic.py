"""The emulated `ElasticBuffer` and `EPBuffer`: both layouts against the plain reference, and each of their refusals."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from emulated.deep_ep_emulator import NotEmulated, as_deep_ep
from emulated.routes import BF16, Lab, broken_rule, check_refusal, expected_output, factor, origins
from nemo_moe.testing.run_distributed import run_distributed

UNEVEN = (17, 0, 5, 30)
MAX_TOKENS, ALIGNMENT = 32, 8


def make_buffer(lab: Lab, **options):
    name = "ElasticBuffer" if hasattr(lab.module, "ElasticBuffer") else "EPBuffer"
    return getattr(lab.module, name)(
        lab.group, **{"num_max_tokens_per_rank": MAX_TOKENS, "hidden": lab.hidden, "num_topk": lab.top_k, **options}
    )


def dispatch(lab: Lab, buffer, **changes):
    arguments = {"x": lab.own.x, "topk_idx": lab.own.topk_idx, "topk_weights": lab.own.topk_weights, "num_experts": lab.num_experts}
    return buffer.dispatch(**{**arguments, **changes})


def redispatch(lab: Lab, buffer, handle, **changes):
    return buffer.dispatch(**{"x": lab.own.x, "handle": handle, "do_expand": handle.do_expand, **changes})


def bits(tensor):
    return tensor.nan_to_num(99.0)


# ---- values ----


def _asynchronous(module, wanted: bool) -> dict:
    buffer = getattr(module, "ElasticBuffer", None) or module.EPBuffer
    return {"async_with_compute_stream": True, "previous_event": buffer.capture(), "allocate_on_comm_stream": True} if wanted else {}


def _compact(generation: str, tokens: tuple[int, ...], sync: bool | None, asynchronous: bool) -> None:
    with as_deep_ep(generation, seed=5) as module:
        lab = Lab(module, dist.group.WORLD, tokens=tokens)
        buffer, options = make_buffer(lab), _asynchronous(module, asynchronous)
        recv_x, recv_idx, recv_weights, handle, event = dispatch(lab, buffer, do_cpu_sync=sync, **options)
        if asynchronous:
            assert torch.isnan(recv_x.float()).all()
            event.current_stream_wait()
        rows = lab.compact_rows()
        used = len(rows)
        assert sorted(origins(recv_x[:used])) == rows
        assert recv_x.shape[0] == (used if sync is not False else MAX_TOKENS * lab.world)
        assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == used
        assert handle.num_recv_tokens_per_expert_list == ([] if sync is False else [len(expert) for expert in lab.local_rows()])
        assert torch.isnan(recv_x[used:].float()).all() and torch.isnan(recv_weights[used:]).all()
        for (rank, token), ids, weights in zip(origins(recv_x[:used]), recv_idx.tolist(), recv_weights, strict=False):
            source = lab.all_inputs[rank]
            here = (source.topk_idx[token] >= lab.first) & (source.topk_idx[token] < lab.first + lab.local)
            assert ids == torch.where(here, source.topk_idx[token] - lab.first, -1).tolist()
            assert torch.equal(weights, source.topk_weights[token]), "weights of other ranks' slots are not zeroed"
        here = recv_idx[:used] >= 0
        weights = torch.where(here, recv_weights[:used], 0.0)
        scale = (factor(torch.where(here, recv_idx[:used] + lab.first, -1)) * weights).sum(1)
        output, row_weights = torch.full_like(recv_x, float("nan")), torch.full_like(recv_weights, float("nan"))
        output[:used], row_weights[:used] = (recv_x[:used].float() * scale[:, None]).to(BF16), weights * 4
        combined, gradients, event = buffer.combine(output, handle, topk_weights=row_weights, **options)
        if asynchronous:
            event.current_stream_wait()
        assert torch.equal(combined, expected_output(lab.own))
        assert torch.equal(gradients, torch.where(lab.own.topk_idx >= 0, lab.own.topk_weights * 4, 0.0))
        again, again_idx, no_weights, same, event = redispatch(lab, buffer, handle, **options)
        if asynchronous:
            event.current_stream_wait()
        assert same is handle and no_weights is None and torch.equal(bits(again), bits(recv_x))
        assert torch.equal(again_idx[:used], recv_idx[:used])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tokens", [(24, 24, 24, 24), UNEVEN, (0, 0, 0, 0)], ids=["even", "uneven", "none"])
@pytest.mark.parametrize("sync", [None, False])
def test_compact_round_trip(tokens: tuple[int, ...], sync: bool | None, world_size: int) -> None:
    """rules elastic.raw_weights, elastic.no_sync_rows, elastic.psum_rank, any.undefined_rows, any.no_tokens_of_a_rank"""
    run_distributed(_compact, world_size, "elastic", tokens, sync, False)


def _expanded(generation: str, tokens: tuple[int, ...], sync: bool | None, zeros: bool, asynchronous: bool) -> None:
    with as_deep_ep(generation, seed=6) as module:
        lab = Lab(module, dist.group.WORLD, tokens=tokens)
        buffer, options = make_buffer(lab), _asynchronous(module, asynchronous)
        layout = {"do_expand": True, "do_zero_padding": zeros}
        recv_x, recv_idx, recv_weights, handle, event = dispatch(
            lab, buffer, expert_alignment=ALIGNMENT, do_cpu_sync=sync, **layout, **options
        )
        if asynchronous:
            assert torch.isnan(recv_x.float()).all()
            event.current_stream_wait()
        rows, start = lab.local_rows(), 0
        output, row_weights = torch.full_like(recv_x, float("nan")), torch.full_like(recv_weights, float("nan"))
        for expert, wanted in enumerate(rows):
            end, aligned_end = start + len(wanted), start + -(-len(wanted) // ALIGNMENT) * ALIGNMENT
            assert int(handle.psum_num_recv_tokens_per_expert[expert]) == end
            assert int(handle.num_unaligned_recv_tokens_per_expert[expert]) == len(wanted)
            assert sorted(origins(recv_x[start:end])) == sorted((rank, token) for rank, token, _ in wanted)
            weight = {(rank, token): lab.all_inputs[rank].topk_weights[token, slot] for rank, token, slot in wanted}
            assert recv_weights[start:end].tolist() == [float(weight[origin]) for origin in origins(recv_x[start:end])]
            gap = recv_x[end:aligned_end].float()
            assert (gap == 0).all() if zeros else torch.isnan(gap).all()
            scale = factor(torch.tensor(lab.first + expert)) * recv_weights[start:end, None]
            output[start:end] = (recv_x[start:end].float() * scale).to(BF16)
            row_weights[start:end] = recv_weights[start:end] * 4
            start = aligned_end
        worst = lab.world * MAX_TOKENS * min(lab.top_k, lab.local) + (ALIGNMENT - 1) * lab.local
        assert recv_x.shape[0] == (start if sync is not False else -(-worst // ALIGNMENT) * ALIGNMENT)
        assert torch.isnan(recv_x[start:].float()).all() and recv_idx is None
        aligned = [-(-len(expert) // ALIGNMENT) * ALIGNMENT for expert in rows]
        assert handle.num_recv_tokens_per_expert_list == ([] if sync is False else aligned)
        assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == len(lab.compact_rows())
        combined, gradients, event = buffer.combine(output, handle, topk_weights=row_weights, **options)
        if asynchronous:
            event.current_stream_wait()
        assert torch.equal(combined, expected_output(lab.own))
        assert torch.equal(gradients, torch.where(lab.own.topk_idx >= 0, lab.own.topk_weights * 4, 0.0))
        again, none, again_weights, _, event = redispatch(
            lab, buffer, handle, topk_weights=lab.own.topk_weights, do_zero_padding=zeros, **options
        )
        if asynchronous:
            event.current_stream_wait()
        assert none is None and torch.equal(bits(again), bits(recv_x)) and torch.equal(bits(again_weights), bits(recv_weights))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tokens", [(24, 24, 24, 24), UNEVEN, (0, 0, 0, 0)], ids=["even", "uneven", "none"])
@pytest.mark.parametrize(("sync", "zeros"), [(True, False), (None, True), (False, True), (False, False)])
def test_expanded_round_trip(tokens: tuple[int, ...], sync: bool | None, zeros: bool, world_size: int) -> None:
    """rules elastic.expanded_layout, elastic.gaps, elastic.no_sync_rows, elastic.aligned_list, elastic.psum_rank"""
    run_distributed(_expanded, world_size, "elastic", tokens, sync, zeros, False)


def test_ep25_has_the_same_layouts() -> None:
    run_distributed(_compact, 2, "ep25", UNEVEN, None, False)
    run_distributed(_expanded, 2, "ep25", UNEVEN, False, False, True)


def test_asynchronous_results_are_there_after_the_wait() -> None:
    """rule any.async_results"""
    run_distributed(_compact, 2, "elastic", UNEVEN, False, True)
    run_distributed(_expanded, 2, "elastic", UNEVEN, None, True, True)


def _orders() -> None:
    for deterministic in (False, True):
        for expand in (False, True):
            orders = []
            for seed in (1, 1, 2):
                with as_deep_ep("elastic", seed=seed) as module:
                    lab = Lab(module, dist.group.WORLD, dropped=0.0)
                    buffer = make_buffer(lab, deterministic=deterministic)
                    first = dispatch(lab, buffer, do_expand=expand, x=lab.own.x.requires_grad_())[0]
                    orders.append((origins(first), origins(dispatch(lab, buffer, do_expand=expand)[0])))
                    assert not first.requires_grad
            assert orders[0] == orders[1]
            assert (orders[0] == orders[2]) == deterministic == (orders[0][0] == orders[0][1])


def test_slot_order_varies_unless_deterministic() -> None:
    """rules elastic.slot_order, any.no_graph"""
    run_distributed(_orders, 2)


def _sums() -> None:
    with as_deep_ep("elastic") as module:
        lab = Lab(module, dist.group.WORLD)
        everyone = torch.tensor([[0, 1, 4]]).repeat(24, 1)  # two experts of rank 0, one of rank 1
        for several, expected in ((True, 256.0), (False, 258.0)):  # (256 + 1) + 1 in bf16 steps, and at once
            buffer = make_buffer(lab, allow_multiple_reduction=several)
            recv_x, _, _, handle, _ = dispatch(lab, buffer, topk_idx=everyone, topk_weights=None, do_expand=True)
            rows = torch.ones_like(recv_x)
            if lab.rank == 0:
                rows[: int(handle.num_unaligned_recv_tokens_per_expert[0])] = 256.0
            combined, weights, _ = buffer.combine(rows, handle)
            assert weights is None and (combined.float() == expected).all()
        bias = torch.ones(24, lab.hidden, dtype=BF16)
        assert (buffer.combine(rows, handle, bias=(bias, bias))[0].float() == 260.0).all()


def test_sums_round_where_rows_cross() -> None:
    """rules any.fp32_sum, elastic.two_roundings"""
    run_distributed(_sums, 2)


def _smaller_things() -> None:
    with as_deep_ep("elastic") as module:
        lab = Lab(module, dist.group.WORLD)
        buffer = make_buffer(lab)
        stats = torch.full((lab.local,), 3, dtype=torch.int32)
        fp8, scales = lab.own.x.float().to(torch.float8_e4m3fn), torch.ones(24, 2)
        (values, got), *_ = dispatch(
            lab, buffer, x=(fp8, scales), cumulative_local_expert_recv_stats=stats, use_tma_aligned_col_major_sf=True
        )
        assert values.dtype == torch.float8_e4m3fn and got.stride()[0] == 1 and (got == 1).all()
        assert stats.tolist() == [3 + len(rows) for rows in lab.local_rows()]
        assert buffer.get_theoretical_num_sms(8, 3) == 4
        assert make_buffer(lab, prefer_overlap_with_compute=False).get_theoretical_num_sms(8, 3) == 64
        # By reference the ids of a cached call are those of now, by copy those of then.
        for copy in (True, False):
            ids = lab.own.topk_idx.clone()
            _, first, _, handle, _ = dispatch(lab, buffer, topk_idx=ids, do_handle_copy=copy)
            ids.fill_(-1)
            again = redispatch(lab, buffer, handle)[1]
            assert torch.equal(again, first) == copy
        size, mib = module.ElasticBuffer.get_buffer_size_hint, 1 << 20
        several, single = size(lab.group, 8192, 4096, 8), size(lab.group, 8192, 4096, 8, allow_multiple_reduction=False)
        assert several % (2 * mib) == 0 and 128 * mib < several < 136 * mib and 512 * mib <= single < 544 * mib
        assert size(lab.group, 8192, 4096) > several, "0 means K = 32"


def test_stats_scales_copies_and_sizes() -> None:
    """rules elastic.handle_copy, elastic.size_hint, elastic.theoretical_sms"""
    run_distributed(_smaller_things, 2)


# ---- refusals ----


def _mixed(lab: Lab, same, other):
    return same if lab.rank == 0 else other


def _with_x(hidden: int) -> Callable[[Lab], object]:
    return lambda lab: dispatch(lab, make_buffer(lab), x=lab.own.x[:, :1].expand(-1, hidden).contiguous())


def _with(**changes) -> Callable[[Lab], object]:
    return lambda lab: dispatch(lab, make_buffer(lab), **changes)


def _of_handle(change: Callable, **first) -> Callable[[Lab], object]:
    """A dispatch, and then `change(lab, buffer, received rows, handle)`."""

    def case(lab: Lab) -> object:
        buffer = make_buffer(lab)
        recv_x, _, _, handle, _ = dispatch(lab, buffer, **first)
        return change(lab, buffer, recv_x, handle)

    return case


def _expanded_weights(lab: Lab) -> None:
    buffer = make_buffer(lab, allow_multiple_reduction=False)
    recv_x, _, weights, handle, _ = dispatch(lab, buffer, do_expand=True)
    buffer.combine(recv_x, handle, topk_weights=weights)


def _destroyed(lab: Lab) -> None:
    buffer = make_buffer(lab, explicitly_destroy=True)
    buffer.destroy()
    dispatch(lab, buffer)


def _changed_ids(lab: Lab) -> None:
    ids = lab.own.topk_idx.clone()
    buffer = make_buffer(lab)
    recv_x, _, _, handle, _ = dispatch(lab, buffer, topk_idx=ids)
    buffer.combine(recv_x, handle)
    ids.fill_(0)
    buffer.combine(recv_x, handle)


def _narrow(lab: Lab) -> None:
    buffer = make_buffer(lab)
    recv_x, _, _, handle, _ = dispatch(lab, buffer, x=lab.own.x[:, :128].contiguous())
    buffer.combine(recv_x, handle)


CASES: dict[str, Callable[[Lab], object]] = {
    "elastic.size_given": lambda lab: make_buffer(lab, hidden=0),
    "elastic.same_options": lambda lab: make_buffer(lab, deterministic=_mixed(lab, True, False)),
    "elastic.same_max_tokens": lambda lab: dispatch(lab, make_buffer(lab), num_max_tokens_per_rank=_mixed(lab, 32, 31)),
    "elastic.buffer_size": _with(num_max_tokens_per_rank=4096),
    "elastic.explicit_destroy": lambda lab: make_buffer(lab).destroy(),
    "elastic.destroyed": _destroyed,
    "elastic.previous_event": lambda lab: dispatch(
        lab, make_buffer(lab), previous_event=dispatch(lab, make_buffer(lab))[-1], allocate_on_comm_stream=True
    ),
    "elastic.comm_stream": lambda lab: dispatch(lab, make_buffer(lab), previous_event=make_buffer(lab).capture()),
    "elastic.x_dtype": lambda lab: dispatch(lab, make_buffer(lab), x=lab.own.x.float()),
    "elastic.x_contiguous": lambda lab: dispatch(lab, make_buffer(lab), x=lab.own.x.repeat(1, 2)[:, ::2]),
    "elastic.scales": _with(use_tma_aligned_col_major_sf=True),
    "elastic.row_32": _with_x(40),
    "elastic.fresh_needs_topk": _with(num_experts=None),
    "elastic.topk_idx_dtype": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=lab.own.topk_idx.int()),
    "elastic.topk_idx_contiguous": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=lab.own.topk_idx.t().contiguous().t()),
    "elastic.topk_limit": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=torch.full((24, 33), -1), topk_weights=None),
    "elastic.topk_idx_range": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=lab.own.topk_idx - 1),
    "elastic.topk_rows": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=lab.own.topk_idx[:5]),
    "elastic.topk_weights": lambda lab: dispatch(lab, make_buffer(lab), topk_weights=lab.own.topk_weights.double()),
    "elastic.duplicates": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=torch.zeros(24, 3, dtype=torch.int64)),
    "elastic.max_tokens": _with(num_max_tokens_per_rank=23),
    "elastic.experts": _with(num_experts=514),
    "elastic.zero_padding": _with(do_zero_padding=True),
    "elastic.cached_no_topk": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, topk_idx=lab.own.topk_idx)),
    "elastic.cached_no_sync": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, do_cpu_sync=True)),
    "elastic.cached_sizes": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, expert_alignment=8)),
    "elastic.cached_expand": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, do_expand=True)),
    "elastic.handle_type": _of_handle(lambda lab, b, x, h: b.dispatch(lab.own.x, handle=tuple(vars(h).values()))),
    "elastic.handle_shape": _of_handle(lambda lab, b, x, h: redispatch(lab, b, h, x=lab.own.x[:8])),
    "elastic.handle_sms": _of_handle(lambda lab, b, x, h: b.combine(x, h, num_sms=h.num_sms + 2)),
    "elastic.same_sms": lambda lab: dispatch(lab, make_buffer(lab), num_sms=_mixed(lab, 8, 10)),
    "elastic.same_row": lambda lab: _with_x(_mixed(lab, 256, 128))(lab),
    "elastic.same_experts": lambda lab: dispatch(lab, make_buffer(lab), num_experts=_mixed(lab, 8, 16)),
    "elastic.same_mode": lambda lab: dispatch(lab, make_buffer(lab), do_expand=_mixed(lab, True, False)),
    "elastic.combine_dtype": _of_handle(lambda lab, b, x, h: b.combine(x.half(), h)),
    "elastic.combine_hidden": _narrow,
    "elastic.combine_rows": _of_handle(lambda lab, b, x, h: b.combine(x[1:], h)),
    "elastic.combine_weights": _of_handle(lambda lab, b, x, h: b.combine(x, h, topk_weights=torch.ones(x.shape[0]))),
    "elastic.expanded_weights": _expanded_weights,
    "elastic.bias": _of_handle(lambda lab, b, x, h: b.combine(x, h, bias=[lab.own.x] * 3)),
}
OTHER_CASES: dict[str, tuple[str, str, Callable[[Lab], object]]] = {
    "elastic.expanded_cached": ("elastic", "2.0.0", _of_handle(lambda lab, b, x, h: redispatch(lab, b, h), do_expand=True)),
    "ep25.topk_version": ("ep25", "2.5", _changed_ids),
}


def _refused(rule: str) -> str:
    generation, variant, case = OTHER_CASES[rule] if rule in OTHER_CASES else ("elastic", "2.1.0", CASES[rule])
    return broken_rule(generation, variant, case)


@pytest.mark.parametrize("rule", [*CASES, *OTHER_CASES])
def test_refusal(rule: str) -> None:
    check_refusal(rule, run_distributed(_refused, 2, rule))


def _weights_in_expanded_combine_of_2_0_0(lab: Lab) -> None:
    buffer = make_buffer(lab)
    recv_x, _, weights, handle, _ = dispatch(lab, buffer, do_expand=True)
    buffer.combine(recv_x, handle)
    buffer.combine(recv_x, handle, topk_weights=weights)


def _refused_by_2_0_0() -> str:
    return broken_rule("elastic", "2.0.0", _weights_in_expanded_combine_of_2_0_0)


def test_2_0_0_has_no_weights_in_an_expanded_combine() -> None:
    check_refusal("elastic.expanded_cached", run_distributed(_refused_by_2_0_0, 2))


def _accepted(case: str) -> str:
    near = {
        "exact max_T": _with(num_max_tokens_per_rank=24),
        "odd SM count": _with(num_sms=5),
        "512 experts": _with(num_experts=512),
        "-1 twice": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=torch.full((24, 3), -1)),
        "no weights": _with(topk_weights=None),
        "sizes of the handle": _of_handle(
            lambda lab, b, x, h: redispatch(lab, b, h, expert_alignment=1, num_experts=8, num_max_tokens_per_rank=32, do_cpu_sync=False)
        ),
    }
    return broken_rule("elastic", None, near[case])


@pytest.mark.parametrize("case", ["exact max_T", "odd SM count", "512 experts", "-1 twice", "no weights", "sizes of the handle"])
def test_the_legal_side_of_a_limit_passes(case: str) -> None:
    assert run_distributed(_accepted, 2, case) == ["", ""]


def test_signatures_of_the_generations() -> None:
    """rule ep25.signatures"""
    with as_deep_ep("elastic") as module:
        elastic = inspect.signature(module.ElasticBuffer.dispatch).parameters
        with pytest.raises(TypeError, match="unexpected keyword"):
            module.ElasticBuffer.dispatch(None, None, async_finish=True)
        with pytest.raises(TypeError, match="unexpected keyword"):
            module.ElasticBuffer.combine(None, None, None, defer_epilogue=True)
    with as_deep_ep("ep25") as module:
        ep25 = inspect.signature(module.EPBuffer.dispatch).parameters
        built = inspect.signature(module.EPBuffer).parameters
        with pytest.raises(TypeError, match="unexpected keyword"):
            module.EPBuffer.dispatch(None, None, previous_event_before_epilogue=None)
        with pytest.raises(NotEmulated):
            module.EPBuffer.dispatch(None, None, defer_epilogue=True)
    assert elastic["do_handle_copy"].default is True and ep25["do_handle_copy"].default is False
    assert "num_cpu_bytes" not in built and "lb_allocation_plan_or_num_bytes" in built and "defer_epilogue" in ep25
