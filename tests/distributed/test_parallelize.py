"""What parallelize does to a model: what is sharded how, what is refused, what stays as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_moe.config import BackendConfig, MoEConfig
from nemo_moe.distributed.mesh import MeshSizes, build_meshes
from nemo_moe.distributed.parallelize import expert_shard, init_weights, parallelize
from nemo_moe.moe.layer import MoE
from nemo_moe.testing.parity import Setting, make_model, meshes_of, parallel_model
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative

CONFIG = SimpleNamespace(precision="fp32", train=SimpleNamespace(activation_checkpointing="full"))


@pytest.mark.parametrize(
    ("shape", "efsdp", "dim"),
    [((4, 8, 6), 1, 0), ((4, 8, 6), 2, 0), ((2, 8, 6), 4, 1), ((1, 7, 6), 3, 2), ((3, 8, 6), 2, 1), ((5, 7, 9), 4, 0)],
)
def test_experts_are_sharded_on_the_first_dim_that_divides(shape: tuple[int, ...], efsdp: int, dim: int) -> None:
    assert expert_shard(nn.Parameter(torch.empty(shape)), efsdp).dim == dim


def test_experts_that_cannot_be_sharded_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"\[2, 7, 9\].*efsdp.* = 4 ranks"):
        expert_shard(nn.Parameter(torch.empty(2, 7, 9)), 4)


def _layout(setting: Setting) -> dict[str, object]:
    names = {name for name, _ in make_model(setting).named_parameters()}
    model, _ = parallel_model(setting)
    experts = model.moe_layers()[0].experts
    return {
        "same_names": names == {name for name, _ in model.named_parameters()} == set(model.state_dict()) - _buffers(model),
        "all_sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "all_wrapped": all(isinstance(module, FSDPModule) for module in (model, experts, *model.decoder_layers())),
        "experts": (experts.expert_offset, experts.num_local_experts, tuple(experts.gate_up_proj.shape)),
        "local": tuple(experts.gate_up_proj.to_local().shape),
        "placements": str(experts.gate_up_proj.placements),
    }


def _dtypes_after_an_evaluation(tied: bool) -> tuple[set[torch.dtype], bool]:
    model, _ = parallel_model(Setting(precision="bf16", tied=tied))
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.int64)).logits.dtype is torch.bfloat16
    return {parameter.dtype for parameter in model.parameters()}, all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_an_evaluation_leaves_no_gathered_copies_among_the_parameters(tied: bool) -> None:
    assert run_distributed(_dtypes_after_an_evaluation, 2, tied) == [({torch.float32}, True)] * 2


def _buffers(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_buffers()}


def test_experts_are_wrapped_also_where_one_rank_holds_them() -> None:
    for rank, layout in enumerate(run_distributed(_layout, 2, Setting(mesh=(1, 2, 2)))):
        assert layout["same_names"] and layout["all_sharded"] and layout["all_wrapped"]
        assert layout["experts"] == (4 * rank, 4, (4, 32, 32)) and layout["local"] == (4, 32, 32)


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    layouts = run_distributed(_layout, 4, Setting(mesh=(1, 4, 2)))
    assert [layout["experts"][0] for layout in layouts] == [0, 4, 0, 4]  # type: ignore[index]
    assert all(layout["local"] == (2, 32, 32) for layout in layouts)
    few = run_distributed(_layout, 4, Setting(mesh=(1, 4, 2), num_experts=2, top_k=1))
    assert all(layout["local"] == (1, 16, 32) and "dim=1" in str(layout["placements"]) for layout in few)


def _refusals() -> list[str]:
    messages = []
    for sizes, num_experts in ((MeshSizes(fsdp=1, tp=2, ep=2), 8), (MeshSizes(fsdp=2, ep=2), 5)):
        with torch.device("meta"):
            model = make_model(Setting(num_experts=num_experts))
        try:
            parallelize(model, build_meshes(sizes, "cpu"), CONFIG)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_parallelized_is_refused() -> None:
    for tp, experts in run_distributed(_refusals, 2):
        assert "tp_size is 2" in tp
        assert "2" in experts and "5 experts" in experts


def _from_real_weights() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = make_model(Setting())
    init_weights(model, seed=3, initializer_range=0.2)
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        before = model(ids).logits
        parallelize(model, meshes_of((1, 2, 2), "cpu"), CONFIG)
        return before, model(ids).logits


def test_a_model_with_real_weights_keeps_them() -> None:
    for before, after in run_distributed(_from_real_weights, 2):
        assert_close_relative(after, before, 1e-6)


def test_persistent_buffers_start_at_zero_whatever_memory_held() -> None:
    model = make_model(Setting())
    for moe in model.moe_layers():
        assert moe.gate.expert_bias is not None
        moe.gate.expert_bias.fill_(float("nan"))
    frequencies = [buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name]
    init_weights(model, seed=0, initializer_range=0.02)
    assert all(moe.gate.expert_bias is not None and not moe.gate.expert_bias.any() for moe in model.moe_layers())
    assert frequencies and all(frequency.any() for frequency in frequencies)


def _layer_gradients(num_ranks: int, rank: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """A bare MoE layer: gradient of its input and of its gate, from this rank's share of 24 tokens."""
    torch.manual_seed(4)
    layer = MoE(
        MoEConfig(num_experts=8, num_experts_per_tok=2, hidden_size=32, moe_intermediate_size=16, norm_topk_prob=True), BackendConfig()
    )
    hidden_states, loss_weights = torch.randn(24, 32).chunk(num_ranks)[rank].clone(), torch.randn(24, 32).chunk(num_ranks)[rank]
    layer.shard_experts(group)
    hidden_states.requires_grad_()
    output, _ = layer(hidden_states)
    (output * loss_weights).sum().backward()
    assert hidden_states.grad is not None and layer.gate.weight.grad is not None
    return hidden_states.grad, layer.gate.weight.grad


def _layer_gradients_of_rank() -> tuple[Tensor, Tensor]:
    return _layer_gradients(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_the_input_equal_one_process(ranks: int) -> None:
    """Cases B15 and B16 on the layer alone."""
    input_grad, gate_grad = _layer_gradients(1, 0, None)
    results = run_distributed(_layer_gradients_of_rank, ranks)
    assert_close_relative(torch.cat([result[0] for result in results]), input_grad, 1e-5)
    assert_close_relative(sum(result[1] for result in results), gate_grad, 1e-5)
