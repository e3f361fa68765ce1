"""Folders written by transformers, in both key layouts, and folders with something wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_moe.checkpoint.hf import load_hf_folder
from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from tiny_qwen3_moe import hf_model, ids

WEIGHTS = "model.safetensors"
GATE_PROJ = "model.layers.1.mlp.experts.2.gate_proj.weight"


def _model(folder: Path, router: RouterConfig | None = None, **changes: Any) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(read_hf_config(folder), changes), BackendConfig(experts="loop"), router)


def _load(folder: Path, **changes: Any) -> Qwen3MoeForCausalLM:
    model = _model(folder, **changes)
    load_hf_folder(model, folder)
    return model.eval()


def _edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _fuse(tensors: dict[str, Tensor]) -> None:
    """From one tensor an expert to the stacked parameters, by a loop of its own."""
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts"
        parts: dict[str, list[Tensor]] = {
            part: [tensors.pop(f"{experts}.{expert}.{part}_proj.weight") for expert in range(8)] for part in ("gate", "up", "down")
        }
        tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)])
        tensors[f"{experts}.down_proj"] = torch.stack(parts["down"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_per_expert_keys_give_transformers_logits(tmp_path: Path, shard_size: str) -> None:
    """case B38; case B22 through files"""
    theirs = hf_model()
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("model*.safetensors"))) > 1) == (shard_size == "20KB")
    assert (_load(tmp_path)(ids()).logits - theirs(ids()).logits).abs().max().item() < 1e-5


def test_fused_keys_give_transformers_logits(folder: Path) -> None:
    """case B38"""
    expected = _load(folder)
    _edit(folder, _fuse)
    assert len(load_file(folder / WEIGHTS)) == len(dict(expected.named_parameters()))
    fused = _load(folder)
    for (name, theirs), ours in zip(expected.named_parameters(), fused.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert (fused(ids()).logits - hf_model()(ids()).logits).abs().max().item() < 1e-5


def test_a_missing_tensor_is_named_and_nothing_is_loaded(folder: Path) -> None:
    """case B38"""
    _edit(folder, lambda tensors: tensors.pop(GATE_PROJ))
    model = _model(folder)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(
        ValueError, match=r"1 missing from model\.safetensors: model\.layers\.1\.mlp\.experts\.2\.gate_proj\.weight \(for .*gate_up_proj\)"
    ):
        load_hf_folder(model, folder)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_a_missing_fused_tensor_is_named(folder: Path) -> None:
    _edit(folder, lambda tensors: (_fuse(tensors), tensors.pop("model.layers.1.mlp.experts.down_proj")))
    with pytest.raises(ValueError, match=r"missing from model\.safetensors: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"):
        _load(folder)


def test_a_misshapen_tensor_is_named_with_its_file_and_both_shapes(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({GATE_PROJ: tensors[GATE_PROJ].t().contiguous()}))
    with pytest.raises(ValueError, match=rf"1 misshapen: {GATE_PROJ} in {WEIGHTS}: shape \[32, 16\], the model's is \[16, 32\]"):
        _load(folder)


def test_an_unexpected_tensor_is_named_with_its_file(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.shared_expert.up_proj.weight": torch.zeros(2, 2)}))
    with pytest.raises(ValueError, match=rf"1 unexpected: model\.layers\.0\.mlp\.shared_expert\.up_proj\.weight in {WEIGHTS}"):
        _load(folder)


def test_all_problems_come_at_once_and_long_lists_are_cut(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if ".experts.3." in key]:
            tensors["x." + key] = tensors.pop(key)

    _edit(folder, change)
    with pytest.raises(ValueError, match=r"9 missing from model\.safetensors: .* and 1 more\n  9 unexpected: .* and 1 more"):
        _load(folder)


def test_both_layouts_at_once_are_refused(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 32, 16)}))
    with pytest.raises(ValueError, match=r"1 unexpected: model\.layers\.0\.mlp\.experts\.down_proj"):
        _load(folder)


def test_an_embedding_larger_than_the_tokenizer_stays_as_it_is(tmp_path: Path) -> None:
    """case B57: and a vocab_size of the tokenizer's length, written over it, is refused rather than cut."""
    hf_model(vocab_size=160).save_pretrained(tmp_path)
    assert _load(tmp_path).model.embed_tokens.weight.shape[0] == 160
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight in .*: shape \[160, 32\], the model's is \[151, 32\]"):
        _load(tmp_path, vocab_size=151)


def test_fewer_layers_leave_the_other_layers_tensors_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """case B65: a changed layer count gives the same class with 2 layers, from the same folder."""
    model = _load(folder, num_hidden_layers=2)
    assert (type(model).__name__, len(model.decoder_layers())) == ("Qwen3MoeForCausalLM", 2)
    assert "tensors of layers 2 to 2 are left out" in caplog.text
    whole = _load(folder)
    torch.testing.assert_close(model.model.layers[1].mlp.experts.down_proj, whole.model.layers[1].mlp.experts.down_proj, rtol=0, atol=0)


def test_more_layers_than_the_folder_has_are_missing(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"missing from model\.safetensors: model\.layers\.3\.self_attn"):
        _load(folder, num_hidden_layers=4)


def test_a_tied_model_takes_a_folder_that_stores_the_head_too(tmp_path: Path) -> None:
    """case B40: an equal copy is no surprise, a different one is."""
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    expected = _load(tmp_path)(ids()).logits
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    torch.testing.assert_close(_load(tmp_path)(ids()).logits, expected, rtol=0, atol=0)
    _edit(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight in .* differs from model\.embed_tokens\.weight"):
        _load(tmp_path)


def test_an_untied_model_needs_a_head(tmp_path: Path) -> None:
    """case B40"""
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"1 missing from model\.safetensors: lm_head\.weight"):
        _load(tmp_path, tie_word_embeddings=False)


def test_bf16_files_fill_fp32_parameters(tmp_path: Path) -> None:
    theirs = hf_model().bfloat16()
    theirs.save_pretrained(tmp_path)
    model = _load(tmp_path)
    assert model.config.dtype == "bfloat16"
    assert model.lm_head is not None
    assert model.lm_head.weight.dtype is torch.float32
    assert torch.equal(model.lm_head.weight, theirs.lm_head.weight.float())


def test_whole_numbers_for_weights_are_refused(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({GATE_PROJ: tensors[GATE_PROJ].to(torch.int8)}))
    with pytest.raises(
        ValueError, match=rf"1 of a type that no weight has \(legal: F64, F32, BF16, F16\): {GATE_PROJ} in {WEIGHTS}: type I8"
    ):
        _load(folder)


def test_a_folder_of_another_transformers_generation_loads(folder: Path) -> None:
    """The config of a 2025 file beside the same weights."""
    new = json.loads((folder / "config.json").read_text())
    old = {key: value for key, value in new.items() if key not in ("num_local_experts", "dtype", "rope_parameters")}
    old |= {"num_experts": new["num_local_experts"], "torch_dtype": new["dtype"], "rope_theta": new["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(old))
    assert (_load(folder)(ids()).logits - hf_model()(ids()).logits).abs().max().item() < 1e-5


def test_damaged_folders_name_the_file(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path, max_shard_size="20KB")
    model = _model(tmp_path)
    second = sorted(tmp_path.glob("model-*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{second.name} is not a readable safetensors file"):
        load_hf_folder(model, tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=f"{second.name} is missing, though model.safetensors.index.json names it"):
        load_hf_folder(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    save_file({"another": torch.zeros(1)}, second)
    with pytest.raises(ValueError, match=f"{second.name} does not hold .*, though model.safetensors.index.json says so"):
        load_hf_folder(model, tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        load_hf_folder(model, tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_hf_folder(model, tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        load_hf_folder(model, tmp_path / "nowhere")


def test_configs_that_are_no_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, found list"):
        read_hf_config(tmp_path)


def test_a_model_on_meta_is_refused(folder: Path) -> None:
    with torch.device("meta"):
        model = _model(folder)
    with pytest.raises(ValueError, match=r"call model\.to_empty"):
        load_hf_folder(model, folder)


def test_a_tied_model_takes_a_folder_that_stores_the_matrix_as_its_head_only(tmp_path: Path) -> None:
    """case B40"""
    hf_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    expected = _load(tmp_path)(ids()).logits
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(_load(tmp_path)(ids()).logits, expected)
