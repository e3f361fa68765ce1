"""Buffers of the emulated libraries: shared, grown by all ranks together, kept for open handles, freed; and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from emulated_backends import EMULATED, emulated
from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.buffers import buffer_count, destroy_deepep_buffers, reset_hybrid_ep_buffer
from nemo_moe.moe.dispatch.deepep import DEFAULT_NUM_SMS, _DeepepManager, set_deepep_num_sms
from nemo_moe.moe.dispatch.hybridep import init_hybrid_ep_buffer
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative

HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 256, 8, 2
GROWING = [name for name in EMULATED if name != "deepep_v1"]  # a ring, whose size is not one of tokens


def _kind(name: str) -> str:
    return "hybridep" if name.startswith("hybridep") else "deepep"


def _batch(num_tokens: int, seed: int = 0, hidden_size: int = HIDDEN_SIZE) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    tokens = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K, dim=1).indices
    return tokens, ids, torch.rand(num_tokens, TOP_K, generator=generator)


def _dispatcher(name: str, group: dist.ProcessGroup | None = None, **backend: object) -> MoEFlexTokenDispatcher:
    return MoEFlexTokenDispatcher(BackendConfig(dispatcher=name, **backend), NUM_EXPERTS, group or dist.group.WORLD)


def _check_identity(dispatcher: MoEFlexTokenDispatcher, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Identity experts: each token comes back once per slot."""
    dispatched = dispatcher.dispatch(*batch)
    returned = dispatcher.combine(dispatched.hidden_states, dispatched.handle)
    assert_close_relative(returned.float(), batch[0].float() * TOP_K, 1e-2, "identity")


def _uneven_steps(name: str) -> list[int]:
    with emulated(name):
        dispatcher = _dispatcher(name)
        rank, counts = dist.get_rank(), []
        for first, second in ((128, 512), (640, 512), (64, 512), (5, 5), (6, 6), (7, 9), (0, 1), (700, 3)):
            batch = _batch((first, second)[rank], seed=first)
            _check_identity(dispatcher, batch)
            counts.append(buffer_count(_kind(name)))
        return counts


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_ranks_with_other_and_odd_numbers_of_tokens_grow_one_buffer_together_b11_b12(dispatcher: str) -> None:
    """cases B11 and B12: no hang, own rows back, and never more than one buffer alive."""
    for counts in run_distributed(_uneven_steps, 2, dispatcher):
        assert counts == [1] * len(counts)


def _grow_between_forward_and_backward(name: str) -> list[int]:
    """Two batches are under way when a third outgrows their buffer; their backwards come after it."""
    with emulated(name):
        dispatcher, counts = _dispatcher(name), []
        pending = []
        for seed in range(2):
            tokens, ids, weights = _batch(20, seed)
            leaf = tokens.requires_grad_()
            dispatched = dispatcher.dispatch(leaf, ids, weights)
            pending.append((leaf, dispatcher.combine(dispatched.hidden_states, dispatched.handle)))
            del dispatched
        for num_tokens in (600, 2000):
            _check_identity(dispatcher, _batch(num_tokens))
            counts.append(buffer_count(_kind(name)))
        for leaf, output in pending:
            output.float().sum().backward()
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, torch.full_like(leaf, TOP_K))
        del pending, leaf, output
        gc.collect()
        _check_identity(dispatcher, _batch(5000))
        counts.append(buffer_count(_kind(name)))
        return counts


@pytest.mark.parametrize("dispatcher", GROWING)
def test_a_replaced_buffer_lives_until_the_backwards_that_need_it_are_done(dispatcher: str) -> None:
    """600 leaves the first for its handles; 2000 replaces 600's, which none holds; 5000 finds both free."""
    for counts in run_distributed(_grow_between_forward_and_backward, 2, dispatcher):
        assert counts == [2, 2, 1]


def _many_steps(name: str) -> tuple[int, int, int]:
    with emulated(name):
        first, second = _dispatcher(name), _dispatcher(name)
        sizes = []
        for step in range(40):
            tokens, ids, weights = _batch(16 + step % 5)
            leaf = tokens.requires_grad_()
            for dispatcher in (first, second):
                dispatched = dispatcher.dispatch(leaf, ids, weights)
                dispatcher.combine(dispatched.hidden_states, dispatched.handle).float().sum().backward()
                del dispatched
            if step in (9, 39):
                gc.collect()
                sizes.append(sum(isinstance(item, Tensor) for item in gc.get_objects()))
        return sizes[0], sizes[1], buffer_count(_kind(name))


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_layers_share_one_buffer_and_steps_leave_nothing_behind_b28(dispatcher: str) -> None:
    """case B28: as many tensors after step 40 as after step 10."""
    for after_10, after_40, buffers in run_distributed(_many_steps, 2, dispatcher):
        assert buffers == 1
        assert after_40 <= after_10 + 2


def _two_groups(name: str) -> int:
    """Four ranks in two groups, and one group of all; layers of each interleave."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with emulated(name):
        dispatchers = [_dispatcher(name, halves[dist.get_rank() // 2]), _dispatcher(name)]
        batches = [_batch(9 + dist.get_rank()), _batch(17)]
        open_rows = [dispatcher.dispatch(*batch) for dispatcher, batch in zip(dispatchers, batches, strict=True)]
        for dispatcher, batch, dispatched in zip(dispatchers, batches, open_rows, strict=True):
            returned = dispatcher.combine(dispatched.hidden_states, dispatched.handle)
            assert_close_relative(returned.float(), batch[0].float() * TOP_K, 1e-2, "identity")
        count = buffer_count(_kind(name))
        del open_rows, dispatched
    return count


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_two_groups_interleave_with_a_buffer_each(dispatcher: str) -> None:
    assert run_distributed(_two_groups, 4, dispatcher) == [2] * 4


def _freed_under_a_handle(name: str) -> tuple[str, int]:
    release = reset_hybrid_ep_buffer if _kind(name) == "hybridep" else destroy_deepep_buffers
    with emulated(name):
        dispatcher = _dispatcher(name)
        dispatched = dispatcher.dispatch(*_batch(4))
        release()
        left = buffer_count(_kind(name))
        message = ""
        try:
            dispatcher.combine(dispatched.hidden_states, dispatched.handle)
        except ValueError as error:
            message = str(error)
        _check_identity(dispatcher, _batch(4))  # builds a new one
        return message, left


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_freeing_buffers_is_one_call_and_a_handle_of_a_freed_one_says_so(dispatcher: str) -> None:
    for message, left in run_distributed(_freed_under_a_handle, 2, dispatcher):
        assert left == 0 and "has been freed" in message


def _refusals(name: str) -> dict[str, str]:
    messages: dict[str, str] = {}

    def note(what: str, *batch: Tensor) -> None:
        try:
            dispatcher.dispatch(*batch)
        except ValueError as error:
            messages[what] = str(error)

    with emulated(name):
        dispatcher = _dispatcher(name)
        tokens, ids, weights = _batch(4)
        note("fp32", tokens.float(), ids, weights)
        note("fp16", tokens.half(), ids, weights)
        note("hidden", torch.zeros(4, 2050).bfloat16(), ids, weights)
        note("top_k", tokens, torch.zeros(4, 40, dtype=torch.int64), torch.zeros(4, 40))
        dispatched = dispatcher.dispatch(tokens, ids, weights)
        try:
            dispatcher.combine(dispatched.hidden_states.float(), dispatched.handle)
        except ValueError as error:
            messages["rows"] = str(error)
    return messages


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_what_a_kernel_would_assert_is_refused_before_it_with_the_value_and_what_is_allowed_b21(dispatcher: str) -> None:
    """case B21: fp16 and fp32 activations, H = 2050."""
    for messages in run_distributed(_refusals, 2, dispatcher):
        assert "torch.float32" in messages["fp32"] and "bf16" in messages["fp32"]
        assert "torch.float16" in messages["fp16"]
        assert "2050" in messages["hidden"] and "multiple of" in messages["hidden"]
        assert "torch.float32" in messages["rows"]
        assert _kind(dispatcher) == "hybridep" or ("up to 32" in messages["top_k"] and "40" in messages["top_k"])


def _num_sms(name: str) -> dict[str, int]:
    with emulated(name) as library:
        found = {"explicit": _dispatcher(name, dispatcher_num_sms=16).manager.num_sms}
        found["default"] = _dispatcher(name).manager.num_sms
        set_deepep_num_sms(12)
        try:
            found["set"], found["explicit wins"] = (
                _dispatcher(name).manager.num_sms,
                _dispatcher(name, dispatcher_num_sms=8).manager.num_sms,
            )
        finally:
            set_deepep_num_sms(None)
        if name == "deepep_v1":
            dispatcher = _dispatcher(name, dispatcher_num_sms=16)
            before = library.Buffer.num_sms
            dispatched = dispatcher.dispatch(*_batch(4))
            library.Buffer.set_num_sms(8)  # as other code in the process might, between a forward and its backward
            try:
                dispatcher.combine(dispatched.hidden_states, dispatched.handle)
            finally:
                library.Buffer.set_num_sms(before)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("dispatcher", [name for name in EMULATED if name.startswith("deepep")])
def test_num_sms_is_what_was_asked_for_and_null_is_the_default_or_what_was_set_b31(dispatcher: str) -> None:
    """case B31. V1's class-wide setting neither changes a handle nor is changed."""
    for found in run_distributed(_num_sms, 2, dispatcher):
        assert found == {"explicit": 16, "default": DEFAULT_NUM_SMS, "set": 12, "explicit wins": 8}


def test_an_odd_number_of_sms_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        set_deepep_num_sms(21)
    assert "even" in str(caught.value) and "21" in str(caught.value)


def _ranks_that_differ(name: str) -> str:
    with emulated(name):
        try:
            _dispatcher(name, dispatcher_num_sms=16 + 4 * dist.get_rank())
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("dispatcher", EMULATED)
def test_ranks_that_come_to_different_kernels_are_all_told_before_they_hang(dispatcher: str) -> None:
    first, second = run_distributed(_ranks_that_differ, 2, dispatcher)
    assert first == second and "rank 1" in first and "20" in first


def _sized_up_front() -> tuple[int, int]:
    with emulated("hybridep_emulated"):
        from emulated_backends import EmulatedHybridEP
        from nemo_moe.moe.dispatch import hybridep

        original = hybridep._HybridEPManager
        hybridep._HybridEPManager = EmulatedHybridEP  # type: ignore[misc]
        try:
            init_hybrid_ep_buffer(dist.group.WORLD, HIDDEN_SIZE, 700, NUM_EXPERTS)
        finally:
            hybridep._HybridEPManager = original  # type: ignore[misc]
        dispatcher = _dispatcher("hybridep_emulated")
        before = buffer_count("hybridep")
        dispatcher.manager.dispatch_worst_case(*_batch(690))
        return before, buffer_count("hybridep")


def test_a_buffer_sized_up_front_serves_what_comes_without_being_built_again() -> None:
    assert run_distributed(_sized_up_front, 2) == [(1, 1)] * 2


def test_a_generation_that_the_library_lacks_is_named() -> None:
    import types

    with pytest.raises(ImportError) as caught:
        _DeepepManager.found_generation(types.ModuleType("deep_ep"))
    assert "EPBuffer" in str(caught.value) and "ElasticBuffer" in str(caught.value)
