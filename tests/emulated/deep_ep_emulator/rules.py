"""The table of rules: what the real libraries ask and do, where that is known from, and who has seen it on hardware.

Sources are sections of the project's facts about these libraries ("2" `Buffer`, "3" `HybridEPBuffer`, "4" `ElasticBuffer`,
"4.5" `EPBuffer`, "table" what a wrapper must hide). "assumed": the facts do not say, and the strict reading was taken, so
that code which passes here passes there.

To record a run on hardware, name it in CONFIRMED: {"v1.row_limit": "2026-12-03 two H200s, DeepEP 1.2.1"}.
"""

from __future__ import annotations

from dataclasses import dataclass

CONFIRMED: dict[str, str] = {}
CONTRADICTED: dict[str, str] = {}  # rule -> what a run showed instead; the emulator has to follow


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        real: what breaking it does in the real library: "host error", "device assertion" (the process is lost), "hang",
            "undefined" (wrong values), "unstated"; "-" for behaviour that nobody breaks.
        kind: "refused" (raises RuleBroken here), "behaviour" (emulated, shown by a test), "not emulated".
    """

    name: str
    source: str
    real: str
    text: str
    kind: str = "refused"

    @property
    def state(self) -> str:
        if self.name in CONTRADICTED:
            return f"contradicted by {CONTRADICTED[self.name]}"
        return f"confirmed by {CONFIRMED[self.name]}" if self.name in CONFIRMED else "unconfirmed"


_BEHAVIOUR, _ABSENT = "behaviour", "not emulated"

_RULES = (
    # All generations
    Rule("any.same_call", "7", "hang", "all ranks make the same collective call"),
    Rule("any.peer_refused", "7", "hang", "no rank stays away from a collective call because its own was refused"),
    Rule(
        "any.deterministic_fill", "2", "host error", "torch.use_deterministic_algorithms is not on together with fill_uninitialized_memory"
    ),
    Rule("any.wait_without_event", "assumed", "host error", "current_stream_wait is called on the event of an asynchronous call only"),
    Rule("any.no_graph", "assumed", "-", "results carry no autograd graph", _BEHAVIOUR),
    Rule("any.undefined_rows", "2, 3, 4", "-", "rows that nobody sent hold whatever was in memory", _BEHAVIOUR),
    Rule(
        "any.async_results", "2, 4", "undefined", "results of an asynchronous call are there after event.current_stream_wait()", _BEHAVIOUR
    ),
    Rule("any.fp32_sum", "assumed", "-", "sums over rows accumulate in fp32 and are rounded to bf16", _BEHAVIOUR),
    Rule("any.no_tokens_of_a_rank", "assumed", "-", "V1 and Elastic take a rank with T = 0", _BEHAVIOUR),
    Rule(
        "any.device", "2, 3, 4", "host error", "tensors are on a CUDA device; NCCL, nvcc, NVLink and compute capability are there", _ABSENT
    ),
    # V1 Buffer: construction and settings
    Rule("v1.ranks", "2", "host error", "2, 4 or 8 ranks on one host (1 in low-latency mode)"),
    Rule("v1.buffer_bytes", "2", "host error", "buffer sizes are multiples of 128 and below 2^31 units of 16 bytes"),
    Rule("v1.same_bytes", "assumed", "unstated", "all ranks build the buffer with the same sizes"),
    Rule("v1.even_sms", "2", "host error", "the SM count is even"),
    Rule("v1.config_table", "2", "host error", "get_*_config knows 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144 and 160 ranks"),
    Rule("v1.buffer_size", "2", "host error", "the buffer holds get_nvl_buffer_size_hint of the config and row in use"),
    Rule("v1.explicit_destroy", "2", "host error", "destroy() needs explicitly_destroy=True, and is called once"),
    Rule("v1.destroyed", "assumed", "undefined", "a destroyed buffer is not used"),
    # V1: calls
    Rule("v1.previous_event", "table", "host error", "previous_event is an EventOverlap that holds an event"),
    Rule("v1.comm_stream", "2", "host error", "allocate_on_comm_stream needs previous_event and async_finish"),
    Rule("v1.x_dtype", "2", "host error", "x is bf16, or float8_e4m3fn with scales"),
    Rule("v1.x_contiguous", "2", "host error", "x is contiguous [T, H]"),
    Rule("v1.scales", "2", "host error", "scales are f32 or packed i32, [T, H / 128] or [T]"),
    Rule("v1.row_16", "2", "host error", "a row is a multiple of 16 bytes"),
    Rule("v1.row_32", "2", "device assertion", "a row is a multiple of 32 bytes (SM90 TMA)"),
    Rule("v1.row_limit", "2", "device assertion", "half a row and 8 bytes fit in 8192 bytes at dispatch: H <= 8176 in bf16"),
    Rule("v1.topk_idx_dtype", "2", "host error", "topk_idx has the dtype deep_ep.topk_idx_t"),
    Rule("v1.topk_idx_contiguous", "2", "host error", "topk_idx is contiguous [T, K]"),
    Rule("v1.topk_limit", "2", "host error", "K <= 32"),
    Rule("v1.topk_idx_range", "2", "undefined", "expert ids are in [-1, E)"),
    Rule("v1.topk_both", "2", "host error", "topk_idx and topk_weights come both or neither"),
    Rule("v1.topk_weights", "2", "host error", "topk_weights is contiguous f32 [T, K]"),
    Rule("v1.expert_division", "2", "host error", "E is a multiple of the number of ranks"),
    Rule("v1.local_experts", "2", "device assertion", "at most 128 experts a rank"),
    Rule("v1.layout", "2", "host error", "the layout is i32 [R], bool [T, R], i32 [E], contiguous, and agrees with x and with itself"),
    Rule("v1.worst_needs_topk", "2", "host error", "num_worst_tokens needs top-k tensors, so no handle"),
    Rule("v1.worst_rows", "2", "undefined", "num_worst_tokens is at least R times the largest T"),
    Rule("v1.cached_no_topk", "2", "host error", "with a handle no top-k arguments are given"),
    Rule("v1.handle_tuple", "2", "host error", "an intranode handle has six entries"),
    Rule("v1.handle_sms", "2", "undefined", "a handle is used with the SM count that it was made with"),
    Rule("v1.handle_shape", "2", "host error", "cached x has the T of the handle"),
    Rule("v1.same_sms", "7", "hang", "all ranks use one SM count"),
    Rule("v1.same_row", "assumed", "hang", "all ranks send the same H and dtype"),
    Rule("v1.same_experts", "assumed", "hang", "all ranks state the same E"),
    Rule("v1.same_mode", "assumed", "hang", "all ranks use a handle, and top-k or weights, or none does"),
    Rule("v1.combine_dtype", "2", "host error", "combine takes bf16"),
    Rule("v1.combine_rows", "2", "host error", "combine takes as many rows as dispatch gave"),
    Rule("v1.combine_weights", "2", "host error", "combine's topk_weights is contiguous f32 [P, K]"),
    Rule("v1.bias", "2", "host error", "up to two bf16 biases of [T, H]"),
    Rule("v1.row_order", "2", "-", "rows come by source rank, then channel; inside a channel in no promised order", _BEHAVIOUR),
    Rule("v1.local_ids", "2", "-", "recv_topk_idx has local ids and -1, recv_topk_weights 0 for those", _BEHAVIOUR),
    Rule("v1.duplicates", "assumed", "-", "an id named twice stays in both slots of the one row and counts twice", _BEHAVIOUR),
    Rule("v1.worst_tail", "2", "-", "in worst-case rows recv_topk_idx is -1, the list of counts is empty", _BEHAVIOUR),
    Rule("v1.internode", "2", "-", "several hosts over RDMA", _ABSENT),
    # V1: low latency
    Rule("v1.ll_mode", "2", "host error", "low-latency calls need low_latency_mode=True"),
    Rule("v1.ll_hidden", "2", "host error", "H is one of 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192"),
    Rule("v1.ll_topk", "2", "host error", "K <= 11"),
    Rule("v1.ll_queue_depth", "2", "host error", "NVSHMEM_QP_DEPTH >= 2 (max_tokens + 1)"),
    Rule("v1.ll_tokens", "2", "host error", "T <= max_tokens"),
    Rule("v1.ll_rows", "2", "host error", "low-latency x is contiguous bf16 [T, H], or [L, max_tokens * R, H] at combine"),
    Rule("v1.ll_handle", "2", "host error", "topk_idx at combine is the one of the dispatch"),
    Rule("v1.ll_hook", "assumed", "host error", "async_finish and return_recv_hook are not given together"),
    Rule("v1.ll_same", "assumed", "hang", "all ranks state the same max_tokens, E and H"),
    Rule("v1.ll_two_results", "2", "undefined", "only two low-latency results are alive at once", _ABSENT),
    # ElasticBuffer and EPBuffer: construction
    Rule("elastic.size_given", "4", "host error", "the constructor gets num_bytes, or max_T and H"),
    Rule("elastic.same_options", "assumed", "unstated", "all ranks build the buffer with the same options"),
    Rule("elastic.same_max_tokens", "4", "hang", "max_T is the same on all ranks"),
    Rule("elastic.buffer_size", "4", "host error", "the buffer holds get_buffer_size_hint of the call"),
    Rule("elastic.explicit_destroy", "4", "host error", "destroy() needs explicitly_destroy=True"),
    Rule("elastic.destroyed", "assumed", "undefined", "a destroyed buffer is not used"),
    Rule("elastic.size_hint", "4", "-", "sizes are 2 MiB multiples, near the two examples of the facts", _BEHAVIOUR),
    Rule("elastic.nccl", "4", "host error", "the group is NCCL with an initialised communicator", _ABSENT),
    # Elastic: calls
    Rule("elastic.previous_event", "4", "host error", "previous_event is an EventHandle"),
    Rule("elastic.comm_stream", "4", "host error", "previous_event needs allocate_on_comm_stream"),
    Rule("elastic.x_dtype", "4", "host error", "x is bf16, or float8_e4m3fn with scales"),
    Rule("elastic.x_contiguous", "assumed", "host error", "x is contiguous [T, H]"),
    Rule("elastic.scales", "assumed", "host error", "scales as in V1; column-major ones only with fp8"),
    Rule("elastic.row_32", "4", "device assertion", "a row is a multiple of 32 bytes (TMA)"),
    Rule("elastic.fresh_needs_topk", "4", "host error", "without a handle topk_idx and num_experts are given"),
    Rule("elastic.topk_idx_dtype", "assumed", "host error", "topk_idx has the dtype deep_ep.topk_idx_t"),
    Rule("elastic.topk_idx_contiguous", "assumed", "host error", "topk_idx is contiguous [T, K]"),
    Rule("elastic.topk_limit", "4", "host error", "K <= 32"),
    Rule("elastic.topk_idx_range", "assumed", "undefined", "expert ids are in [-1, E)"),
    Rule("elastic.topk_rows", "assumed", "host error", "topk_idx has the T of x"),
    Rule("elastic.topk_weights", "assumed", "host error", "topk_weights is contiguous f32 [T, K]"),
    Rule("elastic.duplicates", "4", "device assertion", "no token names an expert twice"),
    Rule("elastic.max_tokens", "4", "host error", "T <= max_T"),
    Rule("elastic.experts", "4", "host error", "E is a multiple of the ranks, at most 2048, at most 256 a rank"),
    Rule("elastic.zero_padding", "4", "host error", "do_zero_padding needs do_expand"),
    Rule("elastic.cached_no_topk", "4", "host error", "with a handle topk_idx is None"),
    Rule("elastic.cached_no_sync", "4", "host error", "with a handle do_cpu_sync is not True"),
    Rule("elastic.cached_sizes", "4", "host error", "with a handle E, alignment and max_T are those of the handle"),
    Rule("elastic.cached_expand", "assumed", "unstated", "with a handle do_expand is that of the handle"),
    Rule("elastic.expanded_cached", "7", "unstated", "cached expanded dispatch, and weights in an expanded combine, need 2.1.0"),
    Rule("elastic.handle_type", "4", "host error", "handle is an EPHandle"),
    Rule("elastic.handle_shape", "assumed", "host error", "cached x has the T of the handle"),
    Rule("elastic.handle_sms", "assumed", "unstated", "num_sms is 0 or that of the handle"),
    Rule("elastic.same_sms", "assumed", "hang", "all ranks use one SM count"),
    Rule("elastic.same_row", "assumed", "hang", "all ranks send the same H and dtype"),
    Rule("elastic.same_experts", "assumed", "hang", "all ranks state the same E, K and alignment"),
    Rule("elastic.same_mode", "assumed", "hang", "all ranks expand, use a handle and send weights, or none does"),
    Rule("elastic.combine_dtype", "4", "host error", "combine takes bf16"),
    Rule("elastic.combine_hidden", "4", "host error", "H is a multiple of 256 at combine"),
    Rule("elastic.combine_rows", "assumed", "host error", "combine takes as many rows as dispatch gave"),
    Rule("elastic.combine_weights", "4", "host error", "combine's topk_weights is contiguous f32, [P, K] compact, [P] expanded"),
    Rule("elastic.expanded_weights", "4", "device assertion", "no weights in an expanded combine with allow_multiple_reduction=False"),
    Rule("elastic.bias", "4", "host error", "up to two bf16 biases of [T, H]"),
    Rule("elastic.raw_weights", "4", "-", "compact weights of slots of other ranks are not zeroed", _BEHAVIOUR),
    Rule("elastic.expanded_layout", "4", "-", "expanded rows lie by expert from aligned starts; psum = start + real count", _BEHAVIOUR),
    Rule("elastic.gaps", "4", "-", "alignment gaps are undefined, rows of x are zeros with do_zero_padding", _BEHAVIOUR),
    Rule(
        "elastic.no_sync_rows",
        "4",
        "-",
        "do_cpu_sync=False: max_T * R rows, expanded R * max_T * min(K, L) + (a-1) * L; empty list",
        _BEHAVIOUR,
    ),
    Rule(
        "elastic.slot_order",
        "4",
        "-",
        "slot order varies from call to call, not with deterministic=True; a handle keeps its order",
        _BEHAVIOUR,
    ),
    Rule("elastic.aligned_list", "assumed", "-", "num_recv_tokens_per_expert_list is rounded up to the alignment", _BEHAVIOUR),
    Rule("elastic.psum_rank", "assumed", "-", "psum_num_recv_tokens_per_scaleup_rank counts (token, rank) rows, also expanded", _BEHAVIOUR),
    Rule(
        "elastic.two_roundings",
        "assumed",
        "-",
        "with several reductions a rank's sum is rounded to bf16 before the sum over ranks",
        _BEHAVIOUR,
    ),
    Rule("elastic.theoretical_sms", "4", "-", "get_theoretical_num_sms is 4 without a readable NVLink, 64 without overlap", _BEHAVIOUR),
    Rule("elastic.handle_copy", "4", "undefined", "do_handle_copy=False keeps topk_idx by reference", _BEHAVIOUR),
    # EPBuffer
    Rule("ep25.topk_version", "4.5", "host error", "topk_idx is not changed while a handle refers to it"),
    Rule(
        "ep25.signatures", "4.5", "-", "no num_cpu_bytes, no previous_event_before_epilogue; do_handle_copy is False by default", _BEHAVIOUR
    ),
    Rule("ep25.defer_epilogue", "4.5", "-", "defer_epilogue returns an event only", _ABSENT),
    Rule("ep25.load_balance", "4.5", "-", "allocation plans, lb_prefetch_weights, lb_reduce_grads", _ABSENT),
    # HybridEPBuffer
    Rule("hybrid.ranks", "3", "host error", "at most 72 ranks in a domain"),
    Rule("hybrid.sms", "assumed", "host error", "SM and block counts are positive"),
    Rule("hybrid.hidden", "3", "host error", "H is a multiple of 16 in bf16, of 512 in fp8"),
    Rule("hybrid.experts", "3", "host error", "experts of a domain are a multiple of 4"),
    Rule("hybrid.same_constructor", "assumed", "hang", "all ranks build the buffer alike"),
    Rule("hybrid.equal_tokens", "3", "hang", "every rank passes the same T"),
    Rule("hybrid.token_rest", "3", "host error", "(T mod 64) * ranks is a multiple of 4"),
    Rule("hybrid.some_tokens", "assumed", "unstated", "T > 0"),
    Rule("hybrid.stated_tokens", "assumed", "unstated", "T <= num_of_tokens_per_rank where that is given (PR 744)"),
    Rule("hybrid.same_call", "assumed", "hang", "all ranks make the call alike"),
    Rule("hybrid.hidden_dtype", "3", "host error", "hidden is bf16, with use_fp8 uint8 or e4m3"),
    Rule("hybrid.hidden_contiguous", "assumed", "host error", "hidden is contiguous [T, H]"),
    Rule("hybrid.scales", "3", "host error", "fp8 rows come with f32 scales [T, H / 128]"),
    Rule("hybrid.one_routing", "3", "host error", "either topk_idx, topk_weights, num_of_experts or routing_map, probs"),
    Rule("hybrid.num_of_experts", "3", "host error", "num_of_experts is local experts times ranks"),
    Rule("hybrid.topk_shape", "3", "host error", "topk_idx is integer [T, K]"),
    Rule("hybrid.topk_range", "3", "device assertion", "topk_idx has no -1 and nothing from E on"),
    Rule("hybrid.topk_weights", "3", "host error", "topk_weights is contiguous f32 [T, K]"),
    Rule("hybrid.routing_map", "3", "host error", "routing_map is contiguous bool [T, E]"),
    Rule("hybrid.probs", "3", "host error", "probs is contiguous f32 [T, E]"),
    Rule("hybrid.non_blocking_rows", "3", "host error", "non_blocking needs num_permuted_tokens"),
    Rule("hybrid.rows_multiple", "3", "host error", "num_permuted_tokens is a multiple of pad_multiple when non-blocking"),
    Rule("hybrid.blocking_rows", "assumed", "unstated", "a blocking call gets no num_permuted_tokens, or the exact one"),
    Rule("hybrid.cached_no_routing", "assumed", "unstated", "with a handle no routing is given"),
    Rule("hybrid.cached_rows", "3", "host error", "with a handle num_permuted_tokens is given again as the same int"),
    Rule("hybrid.cached_blocking", "3", "unstated", "with a handle non_blocking is repeated"),
    Rule("hybrid.same_padding", "3", "undefined", "with a handle pad_multiple is repeated, at combine too"),
    Rule("hybrid.same_fuse", "3", "undefined", "with a handle fuse_* is repeated, at combine too"),
    Rule("hybrid.handle_whole", "3", "host error", "a handle is passed on whole"),
    Rule("hybrid.handle_shape", "assumed", "host error", "cached hidden has the T and H of the handle"),
    Rule("hybrid.combine_dtype", "3", "host error", "combine takes bf16"),
    Rule("hybrid.combine_rows", "3", "host error", "combine takes as many rows as dispatch gave"),
    Rule("hybrid.combine_probs", "3", "host error", "combine's probs is contiguous f32 [P]"),
    Rule("hybrid.layout", "3", "-", "rows lie by expert, one a (token, local expert); tokens_per_expert i64, padded", _BEHAVIOUR),
    Rule("hybrid.padding_rows", "3", "-", "padding rows are zeros in the standalone permute (fused: undefined, assumed)", _BEHAVIOUR),
    Rule("hybrid.overflow", "3", "-", "non-blocking: rows over P are dropped and handle[-1] set; rows below are undefined", _BEHAVIOUR),
    Rule("hybrid.overflow_counts", "assumed", "-", "tokens_per_expert counts dropped rows too", _BEHAVIOUR),
    Rule("hybrid.dense_probs", "3", "-", "combine gives probs as [T, E], zero where nothing was routed", _BEHAVIOUR),
    Rule("hybrid.slot_order", "assumed", "-", "row order inside an expert is not promised; a handle keeps its order", _BEHAVIOUR),
    Rule(
        "hybrid.topk_duplicates",
        "3",
        "undefined",
        "topk_idx is scattered: an id named twice keeps one row and one of its weights",
        _BEHAVIOUR,
    ),
    Rule("hybrid.reallocation", "3", "-", "a call that outgrows the buffer reallocates on all ranks, silently", _BEHAVIOUR),
    Rule("hybrid.versions", "3", "-", "signatures and handle lengths by version; 12 entries and unequal T from PR 744 on", _BEHAVIOUR),
    Rule("hybrid.two_roundings", "assumed", "-", "a rank's sum is rounded to bf16 before the sum over ranks", _BEHAVIOUR),
    Rule("hybrid.plain", "3", "-", "unpermuted dispatch and combine", _ABSENT),
    Rule("hybrid.domains", "3", "-", "several NVLink domains", _ABSENT),
    Rule("hybrid.recycled_pinned", "3", "undefined", "before 17cfb81 the handle outlives the permute kernel", _ABSENT),
)

RULES = {rule.name: rule for rule in _RULES}
assert len(RULES) == len(_RULES), "two rules of one name"


def table() -> str:
    """The rules as text, one a line: name, kind, state, source, what the library does."""
    return "\n".join(f"{r.name:26} {r.kind:12} {r.state:14} {r.source:8} {r.real:16} {r.text}" for r in RULES.values())
