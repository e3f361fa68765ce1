"""Tokens travel by `torch.distributed.all_to_all_single`: gloo on CPUs, NCCL on GPUs; needs torch alone.

Each token is sent once per *rank* that needs it, not once per expert, with its local expert ids and weights beside it;
the receiving rank groups rows by expert and, on the way back, adds a token's rows up in fp32 before it sends one row.
Row counts are exact and read by the host once a dispatch. Rows are ordered by expert, then source rank, then token, so
results are the same in every run.

T tokens, K experts per token, H hidden size, L local experts, N rows sent, M rows received, R grouped rows.
Cost: 2 * H bytes (bf16) and 8 * K bytes a row on the wire, one host synchronisation a dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from nemo_moe.moe.dispatch.base import DispatchManager
from nemo_moe.moe.permute import count_per_expert, rows_of_slots, slots_by_expert, sum_slots
from nemo_moe.moe.types import Dispatched, DispatchHandle


@dataclass(frozen=True, eq=False)
class _AllToAllHandle(DispatchHandle):
    """The route: what this rank sends, what it receives, and how received rows are grouped.

    Attributes:
        send_tokens: [N] int64, the token of each sent row, ordered by destination rank.
        send_splits, recv_splits: rows to and from each rank.
        home_rows: [T, min(K, ep_size)] int64, which returned rows hold a token's sums from the ranks it went to, -1 for none.
        slot_order: [R] int64, flat slots of the received [M, K] table by expert.
        slot_rows: [M, K] int64, which grouped row each received slot became, -1 for none.
    """

    send_tokens: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    home_rows: Tensor
    slot_order: Tensor
    slot_rows: Tensor


class _AllToAllManager(DispatchManager):
    """Exact, deterministic dispatch over any backend of torch.distributed; the oracle of the other dispatchers."""

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        num_tokens, top_k = topk_idx.shape
        owners = torch.where(topk_idx < 0, -1, topk_idx // self.num_local_experts)
        needed = self._needed_by_rank(owners)
        send_splits, recv_splits, num_rows, tokens_per_expert = self._exchange_counts(topk_idx, needed)

        destinations, send_tokens = self._send_order(needed, sum(send_splits))
        local_idx = torch.where(owners[send_tokens] == destinations[:, None], topk_idx[send_tokens] % self.num_local_experts, -1)
        routing = torch.cat([local_idx.int(), topk_weights.detach()[send_tokens].view(torch.int32)], dim=1)
        routing = self._exchange(routing, send_splits, recv_splits)
        recv_idx, recv_weights = routing[:, :top_k].long(), routing[:, top_k:].contiguous().view(torch.float32)

        with record_function("moe/permute"):
            slot_order = slots_by_expert(recv_idx, self.num_local_experts)[:num_rows]
            handle = _AllToAllHandle(
                num_tokens=num_tokens,
                tokens_per_expert=tokens_per_expert,
                topk_weights=recv_weights.reshape(-1)[slot_order],
                send_tokens=send_tokens,
                send_splits=send_splits,
                recv_splits=recv_splits,
                home_rows=self._home_rows(needed, send_tokens, destinations, top_k),
                slot_order=slot_order,
                slot_rows=rows_of_slots(slot_order, recv_idx),
            )
        return Dispatched(
            hidden_states=self.redispatch(hidden_states, handle),
            topk_weights=handle.topk_weights,
            tokens_per_expert=tokens_per_expert,
            handle=handle,
        )

    def redispatch(self, hidden_states: Tensor, handle: DispatchHandle) -> Tensor:
        assert isinstance(handle, _AllToAllHandle)
        with record_function("moe/permute"):
            outgoing = hidden_states.index_select(0, handle.send_tokens)
        received = self._exchange(outgoing, handle.send_splits, handle.recv_splits)
        with record_function("moe/permute"):
            return received.index_select(0, handle.slot_order // handle.slot_rows.shape[1])

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert isinstance(handle, _AllToAllHandle)
        with record_function("moe/permute"):
            partial_sums = sum_slots(rows, handle.slot_rows)
        returned = self._exchange(partial_sums, handle.recv_splits, handle.send_splits)
        with record_function("moe/permute"):
            hidden_states = sum_slots(returned, handle.home_rows)
        if row_weights is None:
            return hidden_states, None
        by_slot = row_weights.new_zeros(handle.slot_rows.numel()).index_copy_(0, handle.slot_order, row_weights)
        returned_weights = self._exchange(by_slot.view(handle.slot_rows.shape), handle.recv_splits, handle.send_splits)
        return hidden_states, sum_slots(returned_weights, handle.home_rows)

    def _needed_by_rank(self, owners: Tensor) -> Tensor:
        """[T, ep_size] bool: which ranks own at least one of a token's experts."""
        needed = torch.zeros(owners.shape[0], self.ep_size + 1, dtype=torch.bool, device=owners.device)
        return needed.scatter_(1, torch.where(owners < 0, self.ep_size, owners), True)[:, : self.ep_size]

    def _exchange_counts(self, topk_idx: Tensor, needed: Tensor) -> tuple[list[int], list[int], int, Tensor]:
        """Tell every rank how many rows and how many of each of its experts' slots it gets; the one host read."""
        slots = count_per_expert(topk_idx, self.num_experts).view(self.ep_size, self.num_local_experts)
        sent = torch.cat([needed.sum(dim=0)[:, None], slots], dim=1)
        received = torch.empty_like(sent)
        with record_function("moe/all_to_all"):
            dist.all_to_all_single(received, sent, group=self.ep_group)
        tokens_per_expert = received[:, 1:].sum(dim=0)
        numbers: list[int] = torch.cat([sent[:, 0], received[:, 0], tokens_per_expert.sum()[None]]).tolist()
        return numbers[: self.ep_size], numbers[self.ep_size : -1], numbers[-1], tokens_per_expert.int()

    def _send_order(self, needed: Tensor, num_sent: int) -> tuple[Tensor, Tensor]:
        """Destination rank [N] and token [N] of each row to send, ordered by rank, then token."""
        by_rank = (~needed.t().reshape(-1)).to(torch.uint8).argsort(stable=True)[:num_sent]
        num_tokens = max(1, needed.shape[0])
        return by_rank // num_tokens, by_rank % num_tokens

    def _home_rows(self, needed: Tensor, send_tokens: Tensor, destinations: Tensor, top_k: int) -> Tensor:
        """[T, min(K, ep_size)]: the positions of token t among the sent rows, -1 past them; a token goes to K ranks at most."""
        positions = torch.full_like(needed, -1, dtype=torch.int64)
        positions.view(-1)[send_tokens * self.ep_size + destinations] = torch.arange(send_tokens.numel(), device=needed.device)
        return positions.sort(dim=1, descending=True).values[:, :top_k]

    def _exchange(self, rows: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        received = rows.new_empty(sum(recv_splits), *rows.shape[1:])
        with record_function("moe/all_to_all"):
            dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=self.ep_group)
        return received
