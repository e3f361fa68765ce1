"""Every experts backend on one GPU: against fp32 truth, over dirty memory, without rows, in FSDP2, under capture.

A backend whose library is not there is skipped with its reason.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.registry import EXPERTS
from nemo_moe.testing.conformance import CASES, check_case
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative, relative_difference

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HOST_COUNTS = [name for name in ("gmm", "te") if name in EXPERTS]
SMALL = (256, 128)  # H, I
QWEN3_30B = (2048, 768)

ROUTINGS = {
    "uneven": [64, 1, 0, 200],
    "no_rows": [0, 0, 0, 0],
    "mostly_idle": [0, 5, 0, 3],
    "one_expert": [0, 0, 0, 333],
    "all_busy": [17, 130, 64, 129],
}


def need(name: str) -> None:
    try:
        EXPERTS.load(name).check_available()
    except ImportError as error:
        pytest.skip(str(error))


def dirty_memory() -> None:
    """Fill what the allocator will hand out next with NaN: blocks of every size class, and large ones of which it cuts pieces."""
    sizes = [2**power for power in range(9, 28)]
    blocks = [torch.full((size // 4,), float("nan"), device="cuda") for size in sizes for _ in range(4)]
    blocks += [torch.full((2**28,), float("nan"), device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    del blocks


def computed(
    name: str, counts: list[int], dtype: torch.dtype, sizes: tuple[int, int] = SMALL, *, surplus: int = 0, fp8: str | None = None
) -> dict[str, Tensor]:
    """Output of the real rows and all gradients. Rows past the counts hold NaN, going in and coming back."""
    hidden_size, width = sizes
    torch.manual_seed(0)
    device, rows = torch.device("cuda"), sum(counts)
    hidden_states, weights = torch.randn(rows, hidden_size, device=device), torch.rand(rows, device=device)
    upstream = torch.randn(rows, hidden_size, device=device)
    torch.manual_seed(1)
    experts = build_experts(name, len(counts), hidden_size, width, fp8=fp8).to(device, dtype)
    past = torch.full((surplus, hidden_size), float("nan"), device=device)
    tokens = torch.cat([hidden_states, past]).to(dtype).requires_grad_()
    topk_weights = torch.cat([weights, past[:, 0]]).requires_grad_()
    dirty_memory()
    output = experts.compute(tokens, topk_weights, torch.tensor(counts, dtype=torch.int32, device=device))
    assert output.shape == tokens.shape and output.dtype is dtype
    dirty_memory()
    output.backward(torch.cat([upstream, past]).to(dtype) if surplus else upstream.to(dtype))
    idle = (torch.tensor(counts) == 0).to(device)
    results = {"output": output[:rows], "hidden_states": tokens.grad, "topk_weights": topk_weights.grad}
    for parameter, tensor in experts.named_parameters():
        assert tensor.grad is not None
        assert not tensor.grad[idle].any(), f"{name}: {parameter} of an idle expert has a gradient that is not exactly zero"
        results[parameter] = tensor.grad
    return {key: tensor[:rows].float() if key in ("hidden_states", "topk_weights") else tensor.float() for key, tensor in results.items()}


def assert_within_twice_bf16(name: str, counts: list[int], sizes: tuple[int, int] = SMALL, surplus: int = 0) -> None:
    truth, bf16 = computed("loop", counts, torch.float32, sizes), computed("loop", counts, BF16, sizes)
    got = computed(name, counts, BF16, sizes, surplus=surplus)
    for key, expected in truth.items():
        error, allowed = relative_difference(got[key], expected), 2 * relative_difference(bf16[key], expected) + 1e-6
        print(f"{name} {key}: {error:.2e} (bf16 torch: {(allowed - 1e-6) / 2:.2e})")
        assert error <= allowed, f"{name}: {key} is {error} off, allowed {allowed}"


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_stay_within_twice_the_error_of_bf16_torch(name: str, routing: str) -> None:
    """case B03: outputs and all gradients, idle experts exact zeros, over memory full of NaN."""
    need(name)
    assert_within_twice_bf16(name, ROUTINGS[routing])


@pytest.mark.parametrize("routing", ["uneven", "no_rows", "all_busy"])
@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_rows_past_the_counts_are_not_read(name: str, routing: str) -> None:
    """case B05: they hold NaN, and so does their gradient."""
    need(name)
    assert_within_twice_bf16(name, ROUTINGS[routing], surplus=77)


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_at_the_width_of_qwen3_30b(name: str) -> None:
    need(name)
    counts = torch.multinomial(torch.rand(16) ** 2, 4096, replacement=True).bincount(minlength=16)
    counts[3] = 0
    assert_within_twice_bf16(name, counts.tolist(), QWEN3_30B)


def _conformance(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in CASES:
        backend = BackendConfig(experts=name)
        check_case(case, backend, dist.group.WORLD, device=torch.device("cuda"), dtype=BF16, tolerance=2.5e-2, steps=2, poison=True)


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_the_conformance_suite_passes_on_one_rank(name: str) -> None:
    need(name)
    run_distributed(_conformance, 1, name, backend="nccl")


def _sharded(name: str) -> None:
    """Two steps of an optimizer on parameters that FSDP2 holds, casts to bf16 and reduces."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    results = []
    for experts_name in ("loop", name):
        torch.manual_seed(0)
        experts = build_experts(experts_name, 4, *SMALL).cuda()
        # As `parallelize` has it: inputs keep their dtypes, because routing weights stay fp32.
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(experts, mesh=init_device_mesh("cuda", (1,)), mp_policy=policy)
        assert [key for key, _ in experts.named_parameters()] == ["gate_up_proj", "down_proj"]
        optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
        dispatcher = MoEFlexTokenDispatcher(BackendConfig(experts=experts_name), 4, None)
        torch.manual_seed(1)
        for _ in range(2):
            tokens, ids = torch.randn(90, SMALL[0]).cuda().to(BF16), torch.randint(0, 3, (90, 2)).cuda()
            experts(tokens, ids, torch.rand(90, 2).cuda(), dispatcher).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.dtype is torch.float32 for parameter in experts.parameters())
        results.append([parameter.full_tensor().detach() for parameter in experts.parameters()])
    for expected, got in zip(*results, strict=True):
        assert_close_relative(got, expected, 2.5e-2, name)
        assert torch.equal(got[3], expected[3]), "an expert without tokens moved"


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_fsdp2_trains_the_stored_parameters(name: str) -> None:
    need(name)
    run_distributed(_sharded, 1, name, backend="nccl")


def prepared(name: str) -> tuple[Experts, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    experts = build_experts(name, 4, *SMALL).to("cuda", BF16)
    return experts, torch.randn(64, SMALL[0], device="cuda", dtype=BF16), torch.rand(64, device="cuda"), torch.tensor([9, 0, 40, 15]).cuda()


@pytest.mark.parametrize("name", HOST_COUNTS)
def test_capture_is_refused_and_the_process_goes_on(name: str) -> None:
    need(name)
    experts, tokens, weights, counts = prepared(name)
    expected = experts.compute(tokens, weights, counts)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"reads row counts on the host.*grouped_mm"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        experts.compute(tokens, weights, counts)
    torch.cuda.synchronize()
    assert torch.equal(experts.compute(tokens, weights, counts), expected)


@pytest.mark.parametrize("routing", ["uneven", "no_rows", "mostly_idle"])
@pytest.mark.parametrize("fp8", ["current", "block", "mxfp8"])
def test_fp8_of_te_is_near_the_truth(fp8: str, routing: str) -> None:
    need("te")
    try:
        EXPERTS.load("te").check_available(fp8)
    except ValueError as error:
        pytest.skip(str(error))
    counts = ROUTINGS[routing]
    truth, got = computed("loop", counts, torch.float32), computed("te", counts, BF16, fp8=fp8)
    for key, expected in truth.items():
        error = relative_difference(got[key], expected)
        print(f"te {fp8} {key}: {error:.2e}")
        assert error <= 0.15, key
        assert not sum(counts) or error > 5e-3, f"{key} is as exact as bf16: nothing ran in FP8"


@pytest.mark.parametrize("name", HOST_COUNTS)
def test_fp32_is_refused(name: str) -> None:
    need(name)
    experts, tokens, weights, counts = prepared(name)
    with pytest.raises(ValueError, match=r"compute in torch.bfloat16, found torch.float32"):
        experts.float().compute(tokens.float(), weights, counts)


@pytest.mark.parametrize("name", HOST_COUNTS)
def test_memory_is_flat_over_many_steps(name: str) -> None:
    need(name)
    experts, tokens, weights, counts = prepared(name)
    seen = []
    for step in range(30):
        experts.compute(tokens.requires_grad_(), weights, counts.roll(step)).sum().backward()
        experts.zero_grad()
        tokens.grad = None
        seen.append(torch.cuda.memory_allocated())
    assert seen[-1] <= seen[5], seen


def test_the_weight_gradients_of_te_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    need("te")
    experts, tokens, weights, counts = prepared("te")
    stacked: list[torch.Size] = []
    stack = torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda tensors, *args, **kwargs: stacked.append(tensors[0].shape) or stack(tensors, *args, **kwargs)
    )
    experts.compute(tokens.requires_grad_(), weights, counts).sum().backward()
    assert not {experts.gate_up_proj.shape[1:], experts.down_proj.shape[1:]} & set(stacked)
