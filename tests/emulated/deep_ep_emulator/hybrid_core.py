"""What the versions of `HybridEPBuffer` share: dense routing maps, rows per (token, local expert), expert-major.

One NVLink domain. Rows of one expert come in a shuffled order. The plain (unpermuted) dispatch and combine, the JIT
compiler and a device's memory are not emulated. The handle's entries other than the last are opaque.
R ranks, T tokens of a rank, H hidden size, K top-k, E experts, L = E / R, P received rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .shared import BF16, FP8, NotEmulated, align, check_weights, exchange, of_all, place, require, shuffled, undefined

CHUNK = 64
_GAP, _TAIL = -1, -2  # in place of a source rank: rows that fill up an expert to the multiple, rows after the last


@dataclass(frozen=True)
class HybridEpConfigInstance:
    """What a call was compiled for; one sits in every handle."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_local_experts: int
    pad_multiple: int | None
    use_fp8: bool
    fuse: bool
    non_blocking: bool = False
    num_permuted_tokens: int = 0


@dataclass(frozen=True)
class Call:
    """One dispatch_with_permute, whatever the version calls its arguments."""

    hidden: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_of_experts: int | None
    num_of_experts_per_rank: int | None
    use_fp8: bool | None
    routing_map: Tensor | None
    probs: Tensor | None
    scaling_factor: Tensor | None
    num_permuted_tokens: int | None
    pad_multiple: int | None
    handle: tuple[Any, ...] | None
    non_blocking: bool
    fuse: bool
    num_of_tokens_per_rank: int | None = None


class HybridCore:
    """`handle_size(fused)`: entries of a handle in this version."""

    def handle_size(self, fused: bool) -> int:
        raise NotImplementedError

    def _set_up(
        self, group: dist.ProcessGroup, hidden_dim: int, max_tokens: int, local_experts: int, use_fp8: bool, sms: dict[str, int | None]
    ) -> None:
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.hidden_dim, self.num_local_experts, self.use_fp8 = hidden_dim, local_experts, use_fp8
        self.max_num_of_tokens_per_rank = align(max(max_tokens, 512), CHUNK)
        self.reallocations = 0  # the emulator's own: how often a call outgrew the buffer

        def prepare() -> tuple[dict[str, Any], None]:
            require(all(count is None or count > 0 for count in sms.values()), "hybrid.sms", sms)
            require(self.group_size <= 72, "hybrid.ranks", self.group_size)
            self._check_sizes(hidden_dim, local_experts, use_fp8)
            return {"hybrid.same_constructor": (hidden_dim, max_tokens, local_experts, use_fp8, sms)}, None

        exchange(group, "HybridEPBuffer()", prepare)

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **fields: Any,
    ) -> HybridEpConfigInstance:
        """The configuration of a call; grows the buffer, silently and on all ranks, where the call is larger than it."""
        hidden_dim, num_local_experts = hidden_dim or self.hidden_dim, num_local_experts or self.num_local_experts
        tokens = align(align(num_of_tokens_per_rank or self.max_num_of_tokens_per_rank, 16), CHUNK)
        use_fp8 = self.use_fp8 if use_fp8 is None else use_fp8
        if hidden_dim > self.hidden_dim or tokens > self.max_num_of_tokens_per_rank or num_local_experts > self.num_local_experts:
            self.reallocations += 1
            self.hidden_dim = max(self.hidden_dim, hidden_dim)
            self.max_num_of_tokens_per_rank = max(self.max_num_of_tokens_per_rank, tokens)
            self.num_local_experts = max(self.num_local_experts, num_local_experts)
        return HybridEpConfigInstance(
            hidden_dim, self.max_num_of_tokens_per_rank, num_local_experts, pad_multiple, use_fp8, fuse_permute_dispatch
        )

    def empty_jit_cache(self) -> None:
        """Looks in another folder than the compiler's, so nothing is ever emptied."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        raise NotEmulated("the unpermuted HybridEPBuffer.dispatch")

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        raise NotEmulated("the unpermuted HybridEPBuffer.combine")

    # ---- dispatch ----

    def _dispatch(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        ranks = exchange(self.group, "HybridEPBuffer.dispatch_with_permute", lambda: self._prepare_dispatch(call))
        lengths = [rank["hidden"].shape[0] for rank in ranks]
        num_tokens = call.num_of_tokens_per_rank or lengths[self.rank]
        config = self.update_template_config(
            call.hidden.shape[1], num_tokens, ranks[0]["local"], call.pad_multiple, ranks[0]["scales"] is not None, call.fuse
        )
        if call.handle is None:
            handle = self._make_handle(call, ranks, config)
        else:
            handle = call.handle
        meta, counts, config = self._read_handle(handle)
        firsts = torch.tensor([0, *lengths]).cumsum(0)
        index = torch.where(meta[:, 0] >= 0, firsts[meta[:, 0].clamp(min=0)] + meta[:, 1], -1)
        gaps = None if config.fuse else meta[:, 0] == _GAP
        tokens = place(of_all(ranks, "hidden"), index, gaps)
        scales = None if ranks[0]["scales"] is None else place(of_all(ranks, "scales"), index, gaps)
        probs = None
        if ranks[0]["probs"] is not None:
            dense = of_all(ranks, "probs")
            probs = place(dense.reshape(-1), torch.where(index >= 0, index * dense.shape[1] + meta[:, 2], -1), gaps)
        return tokens, probs, scales, counts.clone(), handle

    def _prepare_dispatch(self, call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
        hidden, handle = call.hidden.detach(), call.handle
        use_fp8 = self.use_fp8 if call.use_fp8 is None else call.use_fp8
        require(
            hidden.dim() == 2 and hidden.is_contiguous(), "hybrid.hidden_contiguous", f"{tuple(hidden.shape)}, strides {hidden.stride()}"
        )
        require(hidden.dtype in ((torch.uint8, FP8) if use_fp8 else (BF16,)), "hybrid.hidden_dtype", hidden.dtype)
        local = call.num_of_experts_per_rank or self.num_local_experts
        self._check_sizes(hidden.shape[1], local, use_fp8)
        self._check_tokens(hidden.shape[0], call.num_of_tokens_per_rank)
        if use_fp8:
            scales, wanted = call.scaling_factor, (hidden.shape[0], hidden.shape[1] // 128)
            right = scales is not None and scales.dtype == torch.float32 and tuple(scales.shape) == wanted
            require(right, "hybrid.scales", None if scales is None else (scales.dtype, tuple(scales.shape)))
        multiple = call.pad_multiple or 1
        if handle is None:
            routing, probs = self._dense_maps(call, local * self.group_size)
            if call.non_blocking:
                require(call.num_permuted_tokens is not None, "hybrid.non_blocking_rows", "num_permuted_tokens is None")
                assert call.num_permuted_tokens is not None
                require(call.num_permuted_tokens % multiple == 0, "hybrid.rows_multiple", f"{call.num_permuted_tokens} for {multiple}")
        else:
            require(call.topk_idx is None and call.routing_map is None, "hybrid.cached_no_routing", "a routing beside a handle")
            self._check_handle(handle, call.pad_multiple, call.fuse)
            meta, _, config = self._read_handle(handle)
            require(
                call.num_permuted_tokens == meta.shape[0], "hybrid.cached_rows", f"{call.num_permuted_tokens}, made with {meta.shape[0]}"
            )
            require(call.non_blocking == config.non_blocking, "hybrid.cached_blocking", f"non_blocking={call.non_blocking}")
            same = hidden.shape == (handle[self._tokens_at(handle)], config.hidden_dim)
            require(same, "hybrid.handle_shape", f"{tuple(hidden.shape)} for {handle[self._tokens_at(handle)]} tokens")
            local, routing, probs = config.num_local_experts, None, call.probs
            if probs is not None:
                check_weights(probs, (hidden.shape[0], local * self.group_size), "hybrid.probs")
        agreed = {
            "hybrid.equal_tokens": hidden.shape[0] if call.num_of_tokens_per_rank is None else call.num_of_tokens_per_rank,
            "hybrid.same_call": (hidden.shape[1], hidden.dtype, local, handle is None, probs is None, call.fuse),
        }
        probs = None if probs is None else probs.detach()
        return agreed, {
            "hidden": hidden,
            "scales": call.scaling_factor if use_fp8 else None,
            "routing": routing,
            "probs": probs,
            "local": local,
        }

    def _dense_maps(self, call: Call, num_experts: int) -> tuple[Tensor, Tensor | None]:
        num_tokens = call.hidden.shape[0]
        if call.topk_idx is None:
            routing, probs = call.routing_map, call.probs
            require(routing is not None, "hybrid.one_routing", "neither topk_idx nor routing_map")
            assert routing is not None
            right = routing.dtype == torch.bool and tuple(routing.shape) == (num_tokens, num_experts) and routing.is_contiguous()
            require(right, "hybrid.routing_map", f"{routing.dtype} {tuple(routing.shape)} for {(num_tokens, num_experts)}")
            if probs is not None:
                check_weights(probs, (num_tokens, num_experts), "hybrid.probs")
            return routing, probs
        require(call.routing_map is None and call.probs is None, "hybrid.one_routing", "topk_idx and routing_map or probs")
        ids, weights = call.topk_idx, call.topk_weights
        require(call.num_of_experts == num_experts, "hybrid.num_of_experts", f"{call.num_of_experts}, the buffer has {num_experts}")
        require(ids.dim() == 2 and ids.shape[0] == num_tokens and not ids.is_floating_point(), "hybrid.topk_shape", tuple(ids.shape))
        require(bool((ids >= 0).all()) and bool((ids < num_experts).all()), "hybrid.topk_range", "ids outside [0, E)")
        routing = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, ids.long(), True)
        if weights is None:
            return routing, None
        check_weights(weights, tuple(ids.shape), "hybrid.topk_weights")
        return routing, torch.zeros(num_tokens, num_experts).scatter_(1, ids.long(), weights.detach())  # an id named twice keeps one weight

    def _make_handle(self, call: Call, ranks: list[dict[str, Any]], config: HybridEpConfigInstance) -> tuple[Any, ...]:
        multiple, local = call.pad_multiple or 1, ranks[0]["local"]
        pieces, counts = [], []
        for expert in range(self.rank * local, (self.rank + 1) * local):
            found = [F.pad(rank["routing"][:, expert].nonzero(), (1, 1), value=source) for source, rank in enumerate(ranks)]
            rows = torch.cat(found)
            rows[:, 2] = expert
            rows = rows[shuffled(torch.arange(rows.shape[0]))]
            counts.append(align(rows.shape[0], multiple))
            pieces.append(F.pad(rows, (0, 0, 0, counts[-1] - rows.shape[0]), value=_GAP))
        meta = torch.cat(pieces)
        exact, given = meta.shape[0], call.num_permuted_tokens
        if not call.non_blocking:
            require(given is None or given == exact, "hybrid.blocking_rows", f"{given}, the exact number is {exact}")
            given = exact
        assert given is not None
        meta = F.pad(meta[:given], (0, 0, 0, max(0, given - exact)), value=_TAIL).int()
        config = replace(config, non_blocking=call.non_blocking, num_permuted_tokens=given)
        flag = torch.tensor([int(exact > given)], dtype=torch.int32)
        return self._pack(call, meta, torch.tensor(counts, dtype=torch.int64), config, flag)

    # ---- handles ----

    def _pack(self, call: Call, meta: Tensor, counts: Tensor, config: HybridEpConfigInstance, flag: Tensor) -> tuple[Any, ...]:
        num_tokens = call.hidden.shape[0]
        opaque = [undefined((num_tokens, self.group_size), torch.int32) for _ in range(4)]
        size = self.handle_size(call.fuse)
        if size == 9:  # counts hide among the opaque entries
            return (counts, *opaque, meta, num_tokens, config, flag)
        handle = (*opaque, undefined((1,), torch.int32), undefined((1,), torch.int32), meta, counts, num_tokens, config)
        valid = (torch.tensor([num_tokens], dtype=torch.int32),) if size == 12 else ()
        return (*handle, *valid, flag)

    @staticmethod
    def _tokens_at(handle: tuple[Any, ...]) -> int:
        return 6 if len(handle) == 9 else 8

    def _read_handle(self, handle: tuple[Any, ...]) -> tuple[Tensor, Tensor, HybridEpConfigInstance]:
        if len(handle) == 9:
            return handle[5].long(), handle[0], handle[7]
        return handle[6].long(), handle[7], handle[9]

    def _check_handle(self, handle: tuple[Any, ...], pad_multiple: int | None, fuse: bool) -> None:
        config = handle[7] if len(handle) == 9 else handle[9] if len(handle) in (11, 12) else None
        require(isinstance(config, HybridEpConfigInstance), "hybrid.handle_whole", f"{len(handle)} entries")
        assert isinstance(config, HybridEpConfigInstance)
        require(config.fuse == fuse, "hybrid.same_fuse", f"{fuse}, made with {config.fuse}")
        require(
            (pad_multiple or 1) == (config.pad_multiple or 1), "hybrid.same_padding", f"{pad_multiple}, made with {config.pad_multiple}"
        )

    # ---- combine ----

    def _combine(
        self, hidden: Tensor, probs: Tensor | None, handle: tuple[Any, ...], pad_multiple: int | None, fuse: bool
    ) -> tuple[Tensor, Tensor | None]:
        def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
            self._check_handle(handle, pad_multiple, fuse)
            meta, _, config = self._read_handle(handle)
            right = hidden.dim() == 2 and hidden.is_contiguous()
            require(right, "hybrid.hidden_contiguous", f"{tuple(hidden.shape)}, strides {hidden.stride()}")
            require(hidden.dtype == BF16, "hybrid.combine_dtype", hidden.dtype)
            require(
                tuple(hidden.shape) == (meta.shape[0], config.hidden_dim),
                "hybrid.combine_rows",
                f"{tuple(hidden.shape)} for {meta.shape[0]} rows",
            )
            if probs is not None:
                check_weights(probs, (meta.shape[0],), "hybrid.combine_probs")
            agreed = {"hybrid.same_call": (hidden.shape[1], probs is None, fuse)}
            return agreed, {"hidden": hidden.detach(), "meta": meta, "probs": None if probs is None else probs.detach()}

        ranks = exchange(self.group, "HybridEPBuffer.combine_with_unpermute", prepare)
        config = self._read_handle(handle)[2]
        num_tokens = handle[self._tokens_at(handle)]
        total = torch.zeros(num_tokens, hidden.shape[1])
        dense = None if probs is None else torch.zeros(num_tokens, config.num_local_experts * self.group_size)
        for brought in ranks:
            mine = brought["meta"][:, 0] == self.rank
            tokens, experts = brought["meta"][mine, 1], brought["meta"][mine, 2]
            part = torch.zeros_like(total).index_add_(0, tokens, brought["hidden"][mine].float())
            total += part.to(BF16).float()  # the unpermute's sum crosses the wire in bf16
            if dense is not None:
                dense[tokens, experts] = brought["probs"][mine]
        return total.to(BF16), dense

    # ---- checks ----

    def _check_sizes(self, hidden_dim: int, local_experts: int, use_fp8: bool) -> None:
        require(hidden_dim > 0 and hidden_dim % (512 if use_fp8 else 16) == 0, "hybrid.hidden", hidden_dim)
        require(local_experts > 0 and local_experts * self.group_size % 4 == 0, "hybrid.experts", f"{local_experts} * {self.group_size}")

    def _check_tokens(self, num_tokens: int, stated: int | None) -> None:
        require(stated is None or num_tokens <= stated, "hybrid.stated_tokens", f"{num_tokens}, stated {stated}")
        counted = num_tokens if stated is None else stated
        require(counted > 0, "hybrid.some_tokens", "T = 0")
        rest = counted % CHUNK
        require(rest * self.group_size % 4 == 0, "hybrid.token_rest", f"T = {counted} on {self.group_size} ranks")
