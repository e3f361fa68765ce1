"""The gmm and te experts over emulated libraries: what is passed to them, counts, rows nobody wrote, gradients, refusals."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated.experts_emulator import RULES, RuleBroken, grouped_gemm, in_place, recipes, transformer_engine
from emulated_experts import EMULATED_EXPERTS, GmmOfTgale96, NewTE, emulated_experts
from nemo_moe.config import BackendConfig, DataConfig, Device, ModelConfig, Precision, RunConfig, TaskConfig
from nemo_moe.moe.experts.base import Experts, build_experts
from nemo_moe.moe.experts.gmm import GmmExperts, gmm_of
from nemo_moe.moe.experts.te import TEExperts, views_of
from nemo_moe.registry import EXPERTS
from nemo_moe.resolve import resolve
from nemo_moe.testing.tolerances import relative_difference

COUNTS = [[5, 1, 0, 12], [0, 0, 0, 0], [0, 4, 0, 3], [2, 3, 4, 5]]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with emulated_experts():
        yield


def computed(name: str, counts: list[int], *, surplus: int = 0, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    """Output of the real rows and all gradients; the rows past the counts hold NaN."""
    torch.manual_seed(0)
    rows = sum(counts)
    hidden_states, weights, upstream = torch.randn(rows, 16), torch.rand(rows), torch.randn(rows, 16)
    torch.manual_seed(1)
    experts = build_experts(name, 4, 16, 8).to(dtype)
    past = torch.full((surplus, 16), float("nan"))
    tokens = torch.cat([hidden_states, past]).to(dtype).requires_grad_()
    topk_weights = torch.cat([weights, past[:, 0]]).requires_grad_()
    output = experts.compute(tokens, topk_weights, torch.tensor(counts, dtype=torch.int32))
    assert output.shape == tokens.shape and output.dtype is dtype
    output[:rows].backward(upstream.to(dtype))
    results = {"output": output[:rows], "hidden_states": tokens.grad, "topk_weights": topk_weights.grad}
    results |= {parameter: tensor.grad for parameter, tensor in experts.named_parameters()}
    assert set(results) == {"output", "hidden_states", "topk_weights", "gate_up_proj", "down_proj"}
    return {key: tensor.detach().float() for key, tensor in results.items() if tensor is not None}


@pytest.mark.parametrize("surplus", [0, 6])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", EMULATED_EXPERTS)
def test_values_and_gradients_equal_the_loop_in_bf16_twice_over(name: str, counts: list[int], surplus: int) -> None:
    """cases B03, B05: experts without rows, no rows at all, rows past the counts that hold NaN."""
    truth, bf16 = computed("loop", counts, dtype=torch.float32), computed("loop", counts)
    got = computed(name, counts, surplus=surplus)
    assert list(got) == list(truth)
    for key, expected in truth.items():
        found = got[key][: expected.shape[0]]
        assert relative_difference(found, expected) <= 2 * relative_difference(bf16[key], expected) + 1e-6, key
        assert not got[key][expected.shape[0] :].any(), f"{key}: rows past the counts got a gradient"
    idle = torch.tensor(counts) == 0
    assert not got["gate_up_proj"][idle].any() and not got["down_proj"][idle].any()


@pytest.mark.parametrize("name", EMULATED_EXPERTS)
def test_the_stored_parameters_are_the_two_of_every_other_backend(name: str) -> None:
    experts, loop = build_experts(name, 4, 16, 8).to(BF16), build_experts("loop", 4, 16, 8)
    experts.compute(torch.randn(3, 16).to(BF16), torch.ones(3), torch.tensor([1, 0, 2, 0]))
    for module in (experts, loop):
        assert {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()} == {
            "gate_up_proj": (4, 16, 16),
            "down_proj": (4, 16, 8),
        }
        assert [parameter for parameter, _ in module.named_parameters()] == ["gate_up_proj", "down_proj"]
        assert list(module.modules()) == [module]
    experts.load_state_dict(loop.state_dict())
    assert torch.equal(experts.gate_up_proj, loop.gate_up_proj.to(BF16))


@pytest.mark.parametrize("name", EMULATED_EXPERTS)
def test_an_optimizer_step_and_frozen_weights_work_on_the_stored_parameters(name: str) -> None:
    torch.manual_seed(0)
    experts = build_experts(name, 4, 16, 8).to(BF16)
    tokens, counts = torch.randn(7, 16).to(BF16).requires_grad_(), torch.tensor([3, 0, 4, 0])
    before = experts.gate_up_proj.detach().clone()
    experts.compute(tokens, torch.ones(7), counts).sum().backward()
    torch.optim.SGD(experts.parameters(), lr=1.0).step()
    changed = [not torch.equal(old, new) for old, new in zip(before, experts.gate_up_proj, strict=True)]
    assert changed == [True, False, True, False]
    first = experts.compute(tokens, torch.ones(7), counts).detach()
    with torch.no_grad():
        experts.gate_up_proj.zero_()
    assert first.any() and not experts.compute(tokens, torch.ones(7), counts).any(), "weights are read when they are used"
    tokens.grad = None
    experts.requires_grad_(False)
    with torch.no_grad():
        experts.gate_up_proj.fill_(0.1)
    experts.compute(tokens, torch.ones(7), counts).sum().backward()
    assert tokens.grad is not None and tokens.grad.any() and experts.down_proj.grad is not None


@pytest.mark.parametrize("name", EMULATED_EXPERTS)
def test_a_copy_has_its_own_weights_and_computes_the_same(name: str) -> None:
    experts = build_experts(name, 4, 16, 8).to(BF16)
    tokens, counts = torch.randn(3, 16).to(BF16), torch.tensor([1, 0, 2, 0])
    expected = experts.compute(tokens, torch.ones(3), counts)
    copied = copy.deepcopy(experts)
    with torch.no_grad():
        experts.down_proj.zero_()
    assert torch.equal(copied.compute(tokens, torch.ones(3), counts), expected)


def test_pickling_te_experts_leaves_the_library_out() -> None:
    experts = NewTE(4, 16, 8).to(BF16)
    experts.compute(torch.randn(3, 16).to(BF16), torch.ones(3), torch.tensor([1, 0, 2, 0]))
    assert pickle.loads(pickle.dumps(experts))._linears == {}


@pytest.mark.parametrize("name", EMULATED_EXPERTS)
def test_another_dtype_is_refused_with_the_key_to_change(name: str) -> None:
    experts = build_experts(name, 4, 16, 8)
    with pytest.raises(ValueError, match=r"compute in torch.bfloat16, found torch.float32; set precision to bf16"):
        experts.compute(torch.randn(3, 16), torch.ones(3), torch.tensor([1, 0, 2, 0]))


@pytest.mark.parametrize("name", EMULATED_EXPERTS)
def test_compiling_is_refused_with_the_backends_that_can(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = build_experts(name, 4, 16, 8).to(BF16)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"reads row counts on the host.*counts on the device: grouped_mm"):
        experts.compute(torch.randn(3, 16).to(BF16), torch.ones(3), torch.tensor([1, 0, 2, 0]))


# FP8


@pytest.mark.parametrize("counts", [[5, 1, 0, 12], [16, 0, 32, 16]], ids=str)
@pytest.mark.parametrize("name", ["te_new", "te_old"])
def test_fp8_pads_each_experts_rows_and_is_coarser_than_bf16_but_right(name: str, counts: list[int]) -> None:
    results = {}
    for fp8 in (None, "current"):
        torch.manual_seed(0)
        experts = build_experts(name, 4, 32, 16, fp8=fp8).to(BF16)
        tokens, weights = torch.randn(sum(counts), 32).to(BF16).requires_grad_(), torch.rand(sum(counts)).requires_grad_()
        output = experts.compute(tokens, weights, torch.tensor(counts))
        output.square().sum().backward()
        results[fp8] = [output, tokens.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    for exact, coarse in zip(results[None], results["current"], strict=True):
        assert exact is not None and coarse is not None and coarse.dtype is exact.dtype
        assert 5e-3 < relative_difference(coarse.detach().float(), exact.detach().float()) < 0.15
    idle = torch.tensor(counts) == 0
    assert not results["current"][3][idle].any() and not results["current"][4][idle].any()  # type: ignore[index]


@pytest.mark.parametrize("name", ["gmm", "loop", "grouped_mm"])
def test_fp8_is_refused_where_the_experts_have_none(name: str) -> None:
    with pytest.raises(ValueError, match=rf"experts_fp8 is 'current', which the experts '{name}' do not have.*te: current, block, mxfp8"):
        BackendConfig(experts=name, experts_fp8="current")
    with pytest.raises(ValueError, match=r"experts_fp8 is 'delayed', which the experts 'te' do not have"):
        BackendConfig(experts="te", experts_fp8="delayed")


def test_fp8_is_refused_for_sizes_and_hardware_that_cannot() -> None:
    with pytest.raises(ValueError, match=r"experts_fp8 'block' needs moe_intermediate_size to be a multiple of 128, found 64"):
        build_experts("te_new", 4, 128, 64, fp8="block")
    with pytest.raises(ValueError, match=r"'mxfp8', which this GPU cannot: Device compute capability 10.x required.; choose another"):
        build_experts("te_new", 4, 128, 128, fp8="mxfp8")
    config = config_of("te_new", precision=Precision.bf16)
    for fp8, said in (("current", "FP8 by current"), ("block", "needs hidden_size to be a multiple of 128, and the model's is 32")):
        config.backend = BackendConfig(experts="te_new", experts_fp8=fp8)
        try:
            text = "\n".join(resolve(config, 1, device_count=0).lines)
        except ValueError as error:
            text = str(error)
        assert said in text


# Gradients of views


def test_gradients_that_lie_side_by_side_are_taken_without_a_copy() -> None:
    weights = torch.randn(3, 4, 2, requires_grad=True)
    block = torch.randn(3, 4, 2)
    views = views_of(weights)
    assert all(view.data_ptr() == weights[expert].data_ptr() for expert, view in enumerate(views))
    (taken,) = torch.autograd.grad(views, weights, [block[0], block[1], block[2]])
    assert torch.equal(taken, block) and taken.data_ptr() == block.data_ptr()


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 0, 2]])
def test_gradients_that_lie_elsewhere_are_put_together_in_order(order: list[int]) -> None:
    weights = torch.randn(3, 4, 2, requires_grad=True)
    block = torch.randn(3, 4, 2)
    gradients = [block[place] for place in order]
    (taken,) = torch.autograd.grad(views_of(weights), weights, gradients)
    assert torch.equal(taken, torch.stack(gradients)) and taken.data_ptr() != block.data_ptr()
    transposed = [torch.randn(2, 4).t() for _ in range(3)]
    (taken,) = torch.autograd.grad(views_of(weights), weights, transposed)
    assert torch.equal(taken, torch.stack(transposed))


def test_a_view_that_is_not_used_has_a_gradient_of_zeros() -> None:
    weights = torch.randn(3, 4, 2, requires_grad=True)
    (taken,) = torch.autograd.grad(views_of(weights)[1].sum(), weights)
    assert torch.equal(taken[1], torch.ones(4, 2)) and not taken[0].any() and not taken[2].any()


# The libraries, and what is said where they are not


def test_a_module_that_is_no_grouped_gemm_is_named() -> None:
    with pytest.raises(ImportError, match=r"gmm: the installed module stranger has no ops.gmm.*pip install 'nemo_moe\[gmm\]'"):
        gmm_of(ModuleType("stranger"))
    assert gmm_of(grouped_gemm("nvidia")) is not None


def test_a_transformer_engine_without_grouped_linear_is_named() -> None:
    class Ancient(TEExperts):
        @classmethod
        def library(cls) -> ModuleType:
            return ModuleType("transformer_engine.pytorch")

    with pytest.raises(ImportError, match=r"te: .*no GroupedLinear; upgrade it: pip install -U 'nemo_moe\[te\]'"):
        Ancient(4, 16, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA device")
@pytest.mark.parametrize("experts", [GmmExperts, TEExperts])
def test_without_a_cuda_device_building_them_says_so(experts: type[Experts]) -> None:
    for call in (experts.check_available, lambda: experts(4, 16, 8)):
        with pytest.raises(ImportError, match=r"needs a CUDA device"):
            call()


def config_of(experts: str, **changes: Any) -> RunConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 8, "num_experts_per_tok": 2}
    model = ModelConfig(config={**sizes, "vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 1})
    data = DataConfig(tasks=[TaskConfig(name="chain_sum", train_size=10)])
    return RunConfig(model=model, data=data, backend=BackendConfig(experts=experts), **changes)


@pytest.mark.parametrize("experts", ["gmm", "te"])
def test_a_run_in_fp32_or_on_the_cpu_is_refused_before_any_library_is_asked_for(experts: str) -> None:
    with pytest.raises(ValueError, match=rf"precision is fp32, but backend.experts '{experts}' computes in bf16 only"):
        config_of(experts, precision=Precision.fp32)
    with pytest.raises(ValueError, match=rf"backend.experts '{experts}' runs on cuda only, and this run's device is cpu"):
        resolve(config_of(experts, precision=Precision.bf16, device=Device.cpu), 1)


@pytest.mark.parametrize(("experts", "package"), [("gmm", "grouped_gemm"), ("te", "transformer_engine")])
def test_a_missing_package_is_named_with_the_extra(experts: str, package: str) -> None:
    if package in sys.modules:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=rf"backend.experts: '{experts}' needs the package {package}.*'nemo_moe\[{experts}\]'"):
        EXPERTS.load(experts)


# The emulators refuse what the real libraries do not survive


def refused(rule: str, call: object, *args: object, **options: object) -> None:
    with pytest.raises(RuleBroken, match=rf"\[{rule}\]"):
        call(*args, **options)  # type: ignore[operator]


@pytest.mark.parametrize("flavour", ["tgale96", "nvidia"])
def test_the_emulated_grouped_gemm_refuses_what_the_real_one_does(flavour: str) -> None:
    gmm = grouped_gemm(flavour).ops.gmm
    a, b, counts = torch.randn(6, 8).to(BF16), torch.randn(2, 4, 8).to(BF16), torch.tensor([2, 4])
    assert gmm(a, b, counts, trans_b=True).shape == (6, 4)
    refused("gmm.bf16", gmm, a.float(), b, counts, trans_b=True)
    refused("gmm.shapes", gmm, a, b, counts)
    refused("gmm.contiguous", gmm, a, b.mT.contiguous().mT, counts, trans_b=True)
    refused("gmm.counts_int64", gmm, a, b, counts.int(), trans_b=True)
    refused("gmm.counts_int64", gmm, a, b, [2, 4], trans_b=True)
    refused("gmm.counts_on_cpu", gmm, a, b, counts.to("meta"), trans_b=True)
    refused("gmm.counts_fit", gmm, a, b, torch.tensor([2, 5]), trans_b=True)
    with pytest.raises(TypeError):
        gmm(a, b, counts, transpose_b=True)
    nothing = torch.tensor([0, 0])
    if flavour == "nvidia":
        refused("gmm.some_rows", gmm, a, b, nothing, trans_b=True)
    else:
        assert gmm(a, b, nothing, trans_b=True).isnan().all(), "rows past the counts are undefined"


def test_the_emulated_grouped_linear_refuses_what_the_real_one_does() -> None:
    library = transformer_engine()
    linear: nn.Module = library.GroupedLinear(2, 8, 4, bias=False, params_dtype=BF16)
    rows = torch.randn(6, 8).to(BF16)
    assert linear(rows, [2, 4]).shape == (6, 4)
    refused("te.list_of_splits", linear, rows, torch.tensor([2, 4]))
    refused("te.splits_exact", linear, rows, [2, 3])
    refused("te.one_dtype", linear, rows.float(), [2, 4])
    refused("te.width", linear, rows[:, :4], [2, 4])
    with library.autocast(recipe=recipes().Float8CurrentScaling()):
        refused("te.fp8_rows", linear, rows, [2, 4])
    refused("te.real_weights", transformer_engine().GroupedLinear(2, 8, 4, bias=False, params_dtype=BF16, device="meta"), rows, [2, 4])


def test_every_rule_has_a_source_and_a_state_and_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for name, rule in RULES.items():
        assert rule.source and rule.state and f'refused("{name}"' in text, name
        print(f"{name:20} {rule.state:14} {rule.text} ({', '.join(rule.flavours)}; {rule.source})")


def test_emulated_modules_leave_sys_modules_as_it_was() -> None:
    before = sys.modules.get("grouped_gemm")
    with in_place(grouped_gemm=grouped_gemm("tgale96")):
        assert not hasattr(sys.modules["grouped_gemm"].ops, "permute")
    assert sys.modules.get("grouped_gemm") is before
    assert GmmOfTgale96(4, 16, 8).NAME == "gmm"
