"""The emulated V1 `Buffer`: round trips against the plain reference, its layouts, and each of its refusals."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from emulated.deep_ep_emulator import as_deep_ep
from emulated.routes import BF16, Lab, broken_rule, check_refusal, expected_output, factor, origins, single_rank_group
from nemo_moe.testing.run_distributed import run_distributed

UNEVEN = (17, 0, 5, 30)


def make_buffer(lab: Lab, size: int = 1 << 28, **options):
    return lab.module.Buffer(lab.group, size, **options)


def layout_of(lab: Lab, buffer, topk_idx=None):
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
    layout = buffer.get_dispatch_layout(lab.own.topk_idx if topk_idx is None else topk_idx, lab.num_experts)
    return dict(zip(names, layout[:4], strict=True))


def dispatch(lab: Lab, buffer, **changes):
    arguments = {"x": lab.own.x, "topk_idx": lab.own.topk_idx, "topk_weights": lab.own.topk_weights, **layout_of(lab, buffer)}
    return buffer.dispatch(**{**arguments, **changes})


def apply_experts(lab: Lab, recv_x, recv_idx, recv_weights):
    """The weighted sum over the slots that are here; rows without one stay as they came, NaN included."""
    here = recv_idx >= 0
    scale = torch.where(here, factor(torch.where(here, recv_idx + lab.first, -1)) * recv_weights, 0.0).sum(1)
    return torch.where(here.any(1)[:, None], recv_x.float() * scale[:, None], recv_x.float()).to(BF16)


# ---- values ----


def _round_trip(variant: str, tokens: tuple[int, ...], worst: bool, asynchronous: bool) -> None:
    with as_deep_ep("v1", variant, seed=3) as module:
        lab = Lab(module, dist.group.WORLD, tokens=tokens)
        buffer = make_buffer(lab)
        own = lab.own
        if variant == "int32":
            own = lab.own = type(own)(own.x, own.topk_idx.int(), own.topk_weights)
        options: dict = {"async_finish": asynchronous}
        if asynchronous:
            options |= {"previous_event": module.Buffer.capture(), "allocate_on_comm_stream": True}
        worst_rows = max(1, *tokens[: lab.world]) * lab.world
        size = {"num_worst_tokens": worst_rows} if worst else {"expert_alignment": 16}
        recv_x, recv_idx, recv_weights, counts, handle, event = dispatch(lab, buffer, **options, **size)
        if asynchronous:
            assert torch.isnan(recv_x.float()).all()
            event.current_stream_wait()
        rows = lab.compact_rows()
        used = len(rows)
        assert sorted(origins(recv_x[:used])) == rows
        assert [rank for rank, _ in origins(recv_x[:used])] == [rank for rank, _ in rows], "rows come by source rank"
        assert recv_idx.dtype == own.topk_idx.dtype and recv_weights.dtype == torch.float32
        for (rank, token), ids, weights in zip(origins(recv_x[:used]), recv_idx.tolist(), recv_weights, strict=False):
            source = lab.all_inputs[rank]
            here = (source.topk_idx[token] >= lab.first) & (source.topk_idx[token] < lab.first + lab.local)
            assert ids == torch.where(here, source.topk_idx[token] - lab.first, -1).tolist()
            assert torch.equal(weights, torch.where(here, source.topk_weights[token], 0.0))
        if worst:
            assert counts == [] and recv_x.shape[0] == worst_rows
            assert torch.isnan(recv_x[used:].float()).all() and (recv_idx[used:] == -1).all()
        else:
            assert counts == [-(-len(expert) // 16) * 16 for expert in lab.local_rows()] and recv_x.shape[0] == used
        output = apply_experts(lab, recv_x, recv_idx, recv_weights)
        combined, gradients, event = buffer.combine(output, handle, topk_weights=recv_weights * 4, **options)
        if asynchronous:
            assert torch.isnan(combined.float()).all()
            event.current_stream_wait()
        assert combined.dtype == BF16 and torch.equal(combined, expected_output(own))
        assert torch.equal(gradients, torch.where(own.topk_idx >= 0, own.topk_weights * 4, 0.0))
        again, *nothing, event = buffer.dispatch(own.x, handle=handle, **options)
        if asynchronous:
            event.current_stream_wait()
        assert nothing == [None] * 4 and torch.equal(again.nan_to_num(99), recv_x.nan_to_num(99))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tokens", [(24, 24, 24, 24), UNEVEN, (0, 0, 0, 0)], ids=["even", "uneven", "none"])
@pytest.mark.parametrize("worst", [False, True])
def test_round_trip_equals_the_reference(tokens: tuple[int, ...], worst: bool, world_size: int) -> None:
    """rules v1.row_order, v1.local_ids, v1.worst_tail, any.undefined_rows, any.no_tokens_of_a_rank"""
    run_distributed(_round_trip, world_size, "1.2.1", tokens, worst, False)


@pytest.mark.parametrize("variant", ["legacy", "int32"])
def test_asynchronous_results_are_there_after_the_wait(variant: str) -> None:
    """rule any.async_results"""
    run_distributed(_round_trip, 2, variant, UNEVEN, False, True)
    run_distributed(_round_trip, 2, variant, UNEVEN, True, True)


def _values() -> None:
    with as_deep_ep("v1") as module:
        lab = Lab(module, dist.group.WORLD, dropped=0.0)
        buffer = make_buffer(lab)
        orders = []
        for seed in (1, 1, 2):
            with as_deep_ep("v1", seed=seed):
                orders.append(origins(dispatch(lab, buffer, x=lab.own.x.requires_grad_())[0]))
        assert orders[0] == orders[1] != orders[2], "the order follows the seed"
        # An id named twice: one row, both slots kept, both counted.
        twice = torch.zeros(24, 3, dtype=torch.int64)
        layout = layout_of(lab, buffer, twice)
        assert layout["num_tokens_per_expert"][0] == 72 and layout["num_tokens_per_rank"].tolist() == [24, 0]
        recv_x, recv_idx, _, counts, handle, _ = dispatch(lab, buffer, topk_idx=twice, **layout)
        assert not recv_x.requires_grad
        if lab.rank == 0:
            assert recv_x.shape[0] == 48 and (recv_idx == 0).all() and counts == [144, 0, 0, 0]
        # combine is a plain sum in fp32, rounded once; the biases are part of it: in bf16 steps 256 + 1 + 1 + 0 is 256.
        both = torch.tensor([[0, 4, -1]]).repeat(24, 1)
        recv_x, *_, handle, _ = dispatch(lab, buffer, topk_idx=both, **layout_of(lab, buffer, both))
        bias = torch.ones(24, lab.hidden, dtype=BF16)
        rows = torch.full_like(recv_x, 256.0 if lab.rank == 0 else 1.0)
        total, weights, _ = buffer.combine(rows, handle, bias=(bias, torch.zeros_like(bias)))
        assert weights is None and (total.float() == 258.0).all()
        # fp8 rows with scales, and SM counts that go with the handle.
        fp8, scales = lab.own.x.detach().float().to(torch.float8_e4m3fn), torch.ones(24, 2)
        config = module.Config(12, 24, 256, 6, 128)
        (values, got), *_, handle, _ = dispatch(lab, buffer, x=(fp8, scales), config=config)
        assert values.dtype == torch.float8_e4m3fn and got.shape == (values.shape[0], 2) and (got == 1).all()
        assert len(handle) == 6 and handle[1].shape == (2, 6)
        buffer.combine(values.to(BF16), list(handle), config=module.Config(12, 10, 256, 6, 128))
        # Without top-k: counts still come, from the layout.
        recv_x, recv_idx, recv_weights, counts, _, _ = dispatch(lab, buffer, topk_idx=None, topk_weights=None)
        assert recv_idx is None and recv_weights is None and counts == [len(rows) for rows in lab.local_rows()]


def test_order_duplicates_bias_fp8_and_no_topk() -> None:
    """rules v1.duplicates, v1.row_order, any.fp32_sum, any.no_graph"""
    run_distributed(_values, 2)


def _sizes() -> None:
    with as_deep_ep("v1") as module:
        assert module.Buffer.num_sms == 20
        config = module.Buffer.get_dispatch_config(2)
        assert (config.num_sms, config.nvl_send, config.nvl_recv) == (20, 24, 256)
        assert module.Buffer.get_combine_config(2).nvl_send == 10
        assert config.get_nvl_buffer_size_hint(8192, 2) % 128 == 0 and config.get_rdma_buffer_size_hint(8192, 8) == 0
        module.Buffer.set_num_sms(8)
    with as_deep_ep("v1") as module:
        assert module.Buffer.num_sms == 20, "a new module starts afresh"


def test_configs_and_sizes() -> None:
    _sizes()


def _low_latency(use_fp8: bool) -> None:
    with as_deep_ep("v1") as module:
        lab = Lab(module, dist.group.WORLD, hidden=2048, tokens=(7, 4, 0, 7))
        size = module.Buffer.get_low_latency_rdma_size_hint(8, 2048, lab.world, 8)
        buffer = module.Buffer(lab.group, 0, size, low_latency_mode=True)
        own = lab.own
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            own.x, own.topk_idx, 8, 8, use_fp8=use_fp8, return_recv_hook=True
        )
        assert hook is not None
        hook()
        assert counts.tolist() == [len(rows) for rows in lab.local_rows()]
        rows = received if not use_fp8 else (received[0].float().unflatten(-1, (-1, 128)) * received[1][..., None]).flatten(-2)
        scale = factor(torch.arange(lab.local) + lab.first)[:, None, None]
        combined, event, hook = buffer.low_latency_combine((rows.float() * scale).to(BF16), own.topk_idx, own.topk_weights, handle)
        assert hook is None and event.event is None
        torch.testing.assert_close(combined, expected_output(own), rtol=0.1 if use_fp8 else 0, atol=0.5 if use_fp8 else 0)


@pytest.mark.parametrize("use_fp8", [False, True])
def test_low_latency_applies_the_weights(use_fp8: bool) -> None:
    run_distributed(_low_latency, 4, use_fp8)


# ---- refusals ----


def _wide(lab: Lab, hidden: int):
    return lab.own.x[:, :1].expand(-1, hidden).contiguous()


def _mixed(lab: Lab, same, other):
    return same if lab.rank == 0 else other


def _of_handle(change: Callable) -> Callable[[Lab], object]:
    """A dispatch, and then `change(lab, buffer, received rows, handle)`."""

    def case(lab: Lab) -> object:
        buffer = make_buffer(lab)
        recv_x, *_, handle, _ = dispatch(lab, buffer)
        return change(lab, buffer, recv_x, handle)

    return case


def _ll(lab: Lab, limit: int = 32, hidden: int = 2048, mode: bool = True, **changes):
    size = lab.module.Buffer.get_low_latency_rdma_size_hint(64, 8192, lab.world, 64)
    buffer = lab.module.Buffer(lab.group, 0, size, low_latency_mode=mode)
    arguments = {"x": _wide(lab, hidden), "topk_idx": lab.own.topk_idx, **changes}
    return buffer, buffer.low_latency_dispatch(arguments.pop("x"), arguments.pop("topk_idx"), limit, 8, use_fp8=False, **arguments)


def _ll_handle(lab: Lab) -> None:
    buffer, (recv_x, _, handle, _, _) = _ll(lab)
    buffer.low_latency_combine(recv_x, lab.own.topk_idx[:3].contiguous(), lab.own.topk_weights, handle)


def _queue_depth(lab: Lab) -> None:
    os.environ["NVSHMEM_QP_DEPTH"] = "16"
    try:
        _ll(lab)
    finally:
        del os.environ["NVSHMEM_QP_DEPTH"]


def _deterministic(lab: Lab) -> None:
    buffer = make_buffer(lab)
    torch.use_deterministic_algorithms(True)
    try:
        layout_of(lab, buffer)
    finally:
        torch.use_deterministic_algorithms(False)


def _destroyed(lab: Lab) -> None:
    buffer = make_buffer(lab, explicitly_destroy=True)
    buffer.destroy()
    layout_of(lab, buffer)


def _changed_layout(lab: Lab) -> None:
    buffer = make_buffer(lab)
    layout = layout_of(lab, buffer)
    dispatch(lab, buffer, num_tokens_per_rank=layout["num_tokens_per_rank"] + 1)


CASES: dict[str, Callable[[Lab], object]] = {
    "any.same_call": _of_handle(lambda lab, b, x, h: _mixed(lab, lambda: b.combine(x, h), lambda: b.dispatch(lab.own.x, handle=h))()),
    "any.peer_refused": lambda lab: dispatch(lab, make_buffer(lab), x=_mixed(lab, lab.own.x, lab.own.x.float())),
    "any.deterministic_fill": _deterministic,
    "any.wait_without_event": lambda lab: dispatch(lab, make_buffer(lab))[-1].current_stream_wait(),
    "v1.ranks": lambda lab: lab.module.Buffer(single_rank_group(), 1 << 20),
    "v1.buffer_bytes": lambda lab: make_buffer(lab, 1000),
    "v1.same_bytes": lambda lab: make_buffer(lab, _mixed(lab, 1 << 20, 1 << 21)),
    "v1.even_sms": lambda lab: lab.module.Buffer.set_num_sms(21),
    "v1.config_table": lambda lab: lab.module.Buffer.get_dispatch_config(12),
    "v1.buffer_size": lambda lab: dispatch(lab, make_buffer(lab, 1 << 20)),
    "v1.explicit_destroy": lambda lab: make_buffer(lab).destroy(),
    "v1.destroyed": _destroyed,
    "v1.previous_event": lambda lab: dispatch(lab, make_buffer(lab), previous_event=lab.module.Buffer.capture().event),
    "v1.comm_stream": lambda lab: dispatch(lab, make_buffer(lab), async_finish=True, allocate_on_comm_stream=True),
    "v1.x_dtype": lambda lab: dispatch(lab, make_buffer(lab), x=lab.own.x.half()),
    "v1.x_contiguous": lambda lab: dispatch(lab, make_buffer(lab), x=lab.own.x.repeat(1, 2)[:, ::2]),
    "v1.scales": lambda lab: dispatch(lab, make_buffer(lab), x=(lab.own.x.to(torch.float8_e4m3fn), torch.ones(24, 3))),
    "v1.row_16": lambda lab: dispatch(lab, make_buffer(lab), x=_wide(lab, 52)),
    "v1.row_32": lambda lab: dispatch(lab, make_buffer(lab), x=_wide(lab, 56)),
    "v1.row_limit": lambda lab: dispatch(lab, make_buffer(lab), x=_wide(lab, 8192)),
    "v1.topk_idx_dtype": lambda lab: dispatch(lab, make_buffer(lab), topk_idx=lab.own.topk_idx.int()),
    "v1.topk_idx_contiguous": lambda lab: layout_of(lab, make_buffer(lab), lab.own.topk_idx.t().contiguous().t()),
    "v1.topk_limit": lambda lab: layout_of(lab, make_buffer(lab), lab.own.topk_idx.repeat(1, 11)),
    "v1.topk_idx_range": lambda lab: layout_of(lab, make_buffer(lab), lab.own.topk_idx + 8),
    "v1.topk_both": lambda lab: dispatch(lab, make_buffer(lab), topk_weights=None),
    "v1.topk_weights": lambda lab: dispatch(lab, make_buffer(lab), topk_weights=lab.own.topk_weights.bfloat16()),
    "v1.expert_division": lambda lab: make_buffer(lab).get_dispatch_layout(lab.own.topk_idx, 9),
    "v1.local_experts": lambda lab: make_buffer(lab).get_dispatch_layout(lab.own.topk_idx, 258),
    "v1.layout": _changed_layout,
    "v1.worst_needs_topk": _of_handle(lambda lab, b, x, h: b.dispatch(lab.own.x, handle=h, num_worst_tokens=48)),
    "v1.worst_rows": lambda lab: dispatch(lab, make_buffer(lab), num_worst_tokens=47),
    "v1.cached_no_topk": _of_handle(lambda lab, b, x, h: b.dispatch(lab.own.x, handle=h, topk_weights=lab.own.topk_weights)),
    "v1.handle_tuple": _of_handle(lambda lab, b, x, h: b.combine(x, h[:5])),
    "v1.handle_sms": _of_handle(lambda lab, b, x, h: b.combine(x, h, config=lab.module.Config(10, 10, 256, 6, 128))),
    "v1.handle_shape": _of_handle(lambda lab, b, x, h: b.dispatch(lab.own.x[:9], handle=h)),
    "v1.same_sms": lambda lab: dispatch(lab, make_buffer(lab), config=lab.module.Config(_mixed(lab, 12, 10), 24, 256, 6, 128)),
    "v1.same_row": lambda lab: dispatch(lab, make_buffer(lab), x=_wide(lab, _mixed(lab, 256, 128))),
    "v1.same_experts": lambda lab: dispatch(
        lab, make_buffer(lab), num_tokens_per_expert=torch.zeros(_mixed(lab, 8, 16), dtype=torch.int32)
    ),
    "v1.same_mode": _of_handle(lambda lab, b, x, h: b.dispatch(lab.own.x, handle=h) if lab.rank else dispatch(lab, b)),
    "v1.combine_dtype": _of_handle(lambda lab, b, x, h: b.combine(x.float(), h)),
    "v1.combine_rows": _of_handle(lambda lab, b, x, h: b.combine(x[1:], h)),
    "v1.combine_weights": _of_handle(lambda lab, b, x, h: b.combine(x, h, topk_weights=torch.ones(x.shape[0], 3).double())),
    "v1.bias": _of_handle(lambda lab, b, x, h: b.combine(x, h, bias=lab.own.x[:3])),
    "v1.ll_mode": lambda lab: _ll(lab, mode=False),
    "v1.ll_hidden": lambda lab: _ll(lab, hidden=1024),
    "v1.ll_topk": lambda lab: _ll(lab, topk_idx=lab.own.topk_idx.repeat(1, 4)),
    "v1.ll_queue_depth": _queue_depth,
    "v1.ll_tokens": lambda lab: _ll(lab, limit=16),
    "v1.ll_rows": lambda lab: _ll(lab, x=_wide(lab, 2048).float()),
    "v1.ll_handle": _ll_handle,
    "v1.ll_hook": lambda lab: _ll(lab, async_finish=True, return_recv_hook=True),
    "v1.ll_same": lambda lab: _ll(lab, limit=_mixed(lab, 32, 33)),
}


def _refused(rule: str) -> str:
    return broken_rule("v1", None, CASES[rule])


@pytest.mark.parametrize("rule", CASES)
def test_refusal(rule: str) -> None:
    check_refusal(rule, run_distributed(_refused, 2, rule))


def _accepted(case: str) -> str:
    near = {
        "8176 in bf16": lambda lab: dispatch(lab, make_buffer(lab), x=_wide(lab, 8176)),
        "exact worst": lambda lab: dispatch(lab, make_buffer(lab), num_worst_tokens=48),
        "an event before": lambda lab: dispatch(lab, make_buffer(lab), previous_event=lab.module.Buffer.capture()),
        "128 experts a rank": lambda lab: make_buffer(lab).get_dispatch_layout(lab.own.topk_idx, 256),
        "nobody chosen": lambda lab: layout_of(lab, make_buffer(lab), torch.full((24, 32), -1)),
    }
    return broken_rule("v1", None, near[case])


@pytest.mark.parametrize("case", ["8176 in bf16", "exact worst", "an event before", "128 experts a rank", "nobody chosen"])
def test_the_legal_side_of_a_limit_passes(case: str) -> None:
    assert run_distributed(_accepted, 2, case) == ["", ""]


def test_unknown_arguments_are_type_errors() -> None:
    with as_deep_ep("v1") as module:
        for call in ("dispatch", "combine", "get_dispatch_layout", "low_latency_dispatch"):
            with pytest.raises(TypeError, match="unexpected keyword"):
                getattr(module.Buffer, call)(None, num_sms=4)
