"""Folders that we write: transformers loads them whole, and we get back what we saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from nemo_moe.checkpoint.folder_writer import plan_files
from nemo_moe.checkpoint.hf import load_hf_folder, save_hf_folder, write_hf_folder
from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, hf_layouts
from tiny_qwen3_moe import hf_model, ids, ours_like

INDEX = "model.safetensors.index.json"
EXTRA_FILE = "extra_tensors.safetensors"


def _load(folder: Path, router: RouterConfig | None = None) -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(read_hf_config(folder)), BackendConfig(experts="loop"), router)
    load_hf_folder(model, folder)
    return model.eval()


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "one": 3}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<unk>")), eos_token="<eos>", pad_token="<pad>", chat_template="x"
    )


def _assert_transformers_loads(folder: Path, expected_logits: torch.Tensor, atol: float = 1e-5) -> transformers.Qwen3MoeForCausalLM:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is transformers.Qwen3MoeForCausalLM
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert (model.eval()(ids()).logits.float() - expected_logits).abs().max().item() < atol
    return model


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"mlp_only_layers": [1], "attention_bias": True}], ids=str)
def test_transformers_and_we_load_what_we_save(tmp_path: Path, changes: dict[str, Any], max_shard_bytes: int) -> None:
    """case B40: tied, one matrix; untied, both, and they differ."""
    model = ours_like(hf_model(**changes))
    save_hf_folder(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    logits = model(ids()).logits
    theirs = _assert_transformers_loads(tmp_path / "out", logits)
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == bool(changes.get("tie_word_embeddings"))
    again = _load(tmp_path / "out")
    for (name, saved), loaded in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(saved, loaded), name
    assert torch.equal(again(ids()).logits, logits)
    stored = [key for path in (tmp_path / "out").glob("*.safetensors") for key in load_file(path)]
    assert ("lm_head.weight" in stored) != bool(changes.get("tie_word_embeddings"))
    assert len(stored) == len(set(stored))


def test_files_equal_those_of_transformers_tensor_by_tensor(tmp_path: Path) -> None:
    theirs = hf_model()
    theirs.save_pretrained(tmp_path / "theirs")
    save_hf_folder(ours_like(theirs), tmp_path / "ours")
    expected, actual = load_file(tmp_path / "theirs" / "model.safetensors"), load_file(tmp_path / "ours" / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    modes = {path.stat().st_mode for path in (tmp_path / "ours").iterdir()}
    assert len(modes) == 1, "who may read config.json may read the weights"


def test_shards_have_a_right_index_and_stay_below_the_limit(tmp_path: Path) -> None:
    """case B36: every key once, every shard opens."""
    model = ours_like(hf_model())
    save_hf_folder(model, tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 3
    held = {key: path.name for path in shards for key in load_file(path)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(parameter.numel() * 4 for parameter in model.parameters())
    for path in shards:
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 20_000


def test_a_tensor_above_the_limit_gets_a_file_of_its_own() -> None:
    plan = plan_files([("a", 5), ("b", 50), ("c", 5), ("d", 5)], 10)
    assert plan == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00003-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }
    assert plan_files([("a", 5), ("b", 5)], 10) == {"a": "model.safetensors", "b": "model.safetensors"}


@pytest.mark.parametrize(
    ("says", "asked", "stored"), [(None, None, "float32"), ("bfloat16", None, "bfloat16"), ("bfloat16", "float32", "float32")]
)
def test_dtype_on_disk_is_what_was_asked_for_else_what_the_config_says(
    tmp_path: Path, says: str | None, asked: str | None, stored: str
) -> None:
    """case B39: a bf16 source with fp32 master weights goes out as bf16, and the config agrees."""
    theirs = hf_model()
    theirs.config.dtype = says
    model = ours_like(theirs)
    assert model.config.dtype == says
    save_hf_folder(model, tmp_path / "out", dtype=None if asked is None else getattr(torch, asked))
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert dtypes == {getattr(torch, stored)}
    assert read_hf_config(tmp_path / "out")["torch_dtype"] == stored
    loaded = _assert_transformers_loads(tmp_path / "out", model(ids()).logits, atol=1e-5 if stored == "float32" else 1.0)
    assert loaded.dtype is getattr(torch, stored)


def test_a_dtype_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be saved as torch\.int8"):
        save_hf_folder(ours_like(hf_model()), tmp_path / "out", dtype=torch.int8)
    assert not (tmp_path / "out").exists()


def test_tokenizer_and_its_ids_go_with_the_model(tmp_path: Path) -> None:
    save_hf_folder(ours_like(hf_model()), tmp_path / "out", tokenizer=_tokenizer())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer("one").input_ids, tokenizer.chat_template) == ([3], "x")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (theirs.config.eos_token_id, theirs.config.pad_token_id) == (1, 0)
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (1, 0)
    theirs.lm_head.weight.data[1] = 100 * theirs.lm_head.weight.data[1]
    assert theirs.generate(ids()[:1], max_new_tokens=3, do_sample=False).shape[1] <= 17 + 3


def test_ids_of_the_config_win_over_the_tokenizers(tmp_path: Path) -> None:
    save_hf_folder(ours_like(hf_model(eos_token_id=[4, 5])), tmp_path / "out", tokenizer=_tokenizer())
    assert read_hf_config(tmp_path / "out")["eos_token_id"] == [4, 5]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [4, 5], "pad_token_id": 0}


def test_files_of_the_source_folder_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_hf_folder(ours_like(hf_model()), source, tokenizer=_tokenizer())
    (source / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    save_hf_folder(_load(source), tmp_path / "out", source=source)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.6, "do_sample": true}'
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("one").input_ids == [3]


def test_saving_over_a_folder_leaves_none_of_its_weights_and_all_else(tmp_path: Path) -> None:
    """One file after shards and shards after one file: an index or a model.safetensors left behind would be believed."""
    folder = tmp_path / "out"
    first, second = ours_like(hf_model()), ours_like(hf_model())
    with torch.no_grad():
        second.model.norm.weight.mul_(2)
    for limit, model in ((20_000, first), (10**9, second), (20_000, first)):
        save_hf_folder(model, folder, max_shard_bytes=limit)
        (folder / "notes.txt").touch()
        assert (folder / INDEX).exists() == (limit == 20_000)
        assert (folder / "model.safetensors").exists() == (limit != 20_000)
        _assert_transformers_loads(folder, model(ids()).logits)
        assert torch.equal(_load(folder)(ids()).logits, model(ids()).logits)
    assert (folder / "notes.txt").exists()
    assert [path.name for path in (*tmp_path.iterdir(), *folder.glob(".*"))] == ["out"]


def test_a_failed_save_leaves_the_older_folder_as_it_was(tmp_path: Path) -> None:
    class Unwritable:
        eos_token_id = bos_token_id = pad_token_id = None

        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, os.strerror(28))

    model = ours_like(hf_model())
    save_hf_folder(model, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(RuntimeError, match=r"saving to .*out failed: OSError: .*No space left on device"):
        save_hf_folder(model, tmp_path / "out", tokenizer=Unwritable(), max_shard_bytes=20_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_expert_biases_are_stored_beside_the_weights_and_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers has no place for them: it still loads the folder, and we say that it routes without them."""
    router = RouterConfig(bias_update_rate=0.1)
    model = Qwen3MoeForCausalLM(ours_like(hf_model()).config, BackendConfig(), router).eval()
    for index, moe in enumerate(model.moe_layers()):
        assert moe.gate.expert_bias is not None
        moe.gate.expert_bias.copy_(torch.arange(8.0) + index)
    save_hf_folder(model, tmp_path, dtype=torch.float32)
    assert "transformers does not know the router's expert biases" in caplog.text
    again = _load(tmp_path, router)
    for old, new in zip(model.moe_layers(), again.moe_layers(), strict=True):
        assert old.gate.expert_bias is not None
        assert new.gate.expert_bias is not None
        assert torch.equal(old.gate.expert_bias, new.gate.expert_bias)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())


def test_expert_biases_of_a_folder_are_used_by_a_model_that_does_not_update_them(tmp_path: Path) -> None:
    model = Qwen3MoeForCausalLM(ours_like(hf_model()).config, BackendConfig(experts="loop"), RouterConfig(bias_update_rate=0.1)).eval()
    for index, moe in enumerate(model.moe_layers()):
        assert moe.gate.expert_bias is not None
        moe.gate.expert_bias.copy_(torch.arange(8.0) + index)
    expected = model(ids()).logits
    save_hf_folder(model, tmp_path / "one")
    loaded = _load(tmp_path / "one")
    assert torch.equal(loaded(ids()).logits, expected)
    save_hf_folder(loaded, tmp_path / "two")
    assert load_file(tmp_path / "two" / EXTRA_FILE).keys() == {f"model.layers.{layer}.mlp.gate.expert_bias" for layer in range(3)}
    biases = load_file(tmp_path / "one" / EXTRA_FILE)
    (tmp_path / "one" / EXTRA_FILE).unlink()
    assert not torch.equal(_load(tmp_path / "one")(ids()).logits, expected), "the biases chose the experts"
    save_file({key: bias[:1] for key, bias in biases.items()}, tmp_path / "one" / EXTRA_FILE)
    with pytest.raises(ValueError, match=r"3 misshapen: model\.layers\.0\.mlp\.gate\.expert_bias"):
        _load(tmp_path / "one")


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_the_key_table_tiles_a_stacked_parameter_exactly_once(name: str) -> None:
    shape = (3, 8, 5)
    layouts = hf_layouts(f"model.layers.4.mlp.experts.{name}", shape)
    assert layouts[1] == [(f"model.layers.4.mlp.experts.{name}", shape, (0, 0, 0))]
    count = torch.zeros(shape)
    for piece in layouts[0]:
        expert, row, column = piece.offsets
        count[expert, row : row + piece.shape[0], column : column + piece.shape[1]] += 1
        assert f".experts.{expert}." in piece.key
        assert (".up_proj." in piece.key) == (row > 0)
    assert torch.equal(count, torch.ones(shape))


def test_a_folder_is_written_from_values_that_are_fetched_one_by_one(tmp_path: Path) -> None:
    """The model is on the meta device: no more than one file is ever in memory."""
    model = ours_like(hf_model())
    weights = dict(model.named_parameters())
    with torch.device("meta"):
        empty = Qwen3MoeForCausalLM(model.config, BackendConfig())
    asked: list[str] = []

    def fetch(name: str, dtype: torch.dtype) -> torch.Tensor:
        asked.append(name)
        return weights[name].to(dtype)

    write_hf_folder(empty, fetch, tmp_path / "out", max_shard_bytes=20_000)
    assert asked == list(weights)
    _assert_transformers_loads(tmp_path / "out", model(ids()).logits)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is \[1\] torch\.float32, where \[61, 32\] torch\.float32 is to"):
        write_hf_folder(empty, lambda _, dtype: torch.zeros(1, dtype=dtype), tmp_path / "out")
    assert [path.name for path in (*tmp_path.iterdir(), *(tmp_path / "out").glob(".*"))] == ["out"]
