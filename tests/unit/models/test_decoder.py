"""The decoder's shell: building it on the meta device, its start values, what it offers to parallelize and save."""

from __future__ import annotations

import torch

from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from nemo_moe.moe.gate import FakeBalancedGate
from nemo_moe.moe.layer import MoE
from tiny_qwen3_moe import SIZES, hf_model, ids, ours_like


def _build(router: RouterConfig | None = None, **changes: object) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf({**SIZES, **changes}), BackendConfig(), router)


def test_built_on_meta_and_emptied_it_equals_one_built_directly() -> None:
    expected = ours_like(hf_model())
    with torch.device("meta"):
        model = _build(RouterConfig(bias_update_rate=0.1))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    for moe in model.moe_layers():
        assert moe.gate.expert_bias is not None
        moe.gate.expert_bias.fill_(torch.nan)  # what memory may hold
    model.reset_buffers()
    model.load_state_dict(expected.state_dict(), strict=False)
    torch.testing.assert_close(model.eval()(ids()).logits, expected(ids()).logits, rtol=0, atol=1e-6)


def test_a_new_model_has_no_uninitialised_memory() -> None:
    model = _build(initializer_range=0.3, attention_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert 0.2 < parameter.std().item() < 0.4, name


def test_a_tied_head_is_no_second_parameter() -> None:
    untied, tied = _build(), _build(tie_word_embeddings=True)
    assert {name for name, _ in untied.named_parameters()} - {name for name, _ in tied.named_parameters()} == {"lm_head.weight"}
    weights = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    tied.to_empty(device="cpu")  # the move that unties two names of one parameter
    tied.reset_buffers()
    tied.load_state_dict(weights)
    torch.nn.init.zeros_(tied.model.embed_tokens.weight)
    assert not tied(ids()).logits.any()


def test_layers_come_in_order_with_the_dense_ones_left_out() -> None:
    model = _build(mlp_only_layers=[1])
    layers = model.decoder_layers()
    assert len(layers) == 3
    assert model.moe_layers() == [layers[0].mlp, layers[2].mlp]
    assert not isinstance(layers[1].mlp, MoE)
    output = model(ids())
    assert output.router_stats is not None
    assert output.router_stats.tokens_per_expert.shape == (2, 8)
    assert output.router_stats.num_tokens.shape == (2,)


def test_a_model_without_moe_layers_has_no_router_statistics() -> None:
    model = _build(mlp_only_layers=[0, 1, 2])
    assert model.moe_layers() == []
    assert model(ids()).router_stats is None


def test_the_router_section_decides_bias_and_fake_routing() -> None:
    assert all(moe.gate.expert_bias is None for moe in _build().moe_layers())
    assert all(moe.gate.expert_bias is not None for moe in _build(RouterConfig(bias_update_rate=0.1)).moe_layers())
    assert all(isinstance(moe.gate, FakeBalancedGate) for moe in _build(RouterConfig(fake_balanced=True)).moe_layers())
