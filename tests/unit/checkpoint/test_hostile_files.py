"""Weights files that are damaged, lie, or lead elsewhere: each is refused with its name, and nothing is loaded from it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_moe.checkpoint.hf import load_hf_folder
from nemo_moe.checkpoint.tensor_files import TensorFiles
from nemo_moe.config import BackendConfig
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from tiny_qwen3_moe import hf_model, ids, ours_like

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def _file(header: str | bytes, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def _one(**changes: Any) -> bytes:
    """A good file of one tensor `a`, but for `changes`."""
    return _file(json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}), bytes(16))


TWO = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [%s]}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (b"1234567", "header too small"),
        (struct.pack("<Q", 2**60) + bytes(100), "header too large"),
        (struct.pack("<Q", 101) + bytes(100), "invalid header length"),
        (_file("nonsense"), "invalid JSON"),
        (_file(b"\xff\xfe"), "invalid UTF-8"),
        (_file("[1, 2]"), "invalid type: sequence"),
        (_file('{"a":' * 50_000), "recursion limit"),
        (_file('{"a": 1}'), "invalid type: integer"),
        (_one(dtype="F33"), "unknown variant `F33`"),
        (_one(shape=[3, 2]), "invalid shape, data type, or offset"),
        (_one(shape=[-2, -2]), "invalid value: integer `-2`"),
        (_one(shape=[2.0, 2]), "invalid type: floating point"),
        (_one(shape=[2**40, 2**40]), "overflow"),
        (_one(data_offsets=[16, 0]), "invalid offset for tensor `a`"),
        (_one(data_offsets=[0]), "invalid length 1"),
        (_one(data_offsets=[4, 20]), "invalid offset for tensor `a`"),
        (_one()[:-3], "file not fully covered"),
        (_one() + b"more", "file not fully covered"),
        (_file(TWO % "2, 6", bytes(6)), "invalid offset for tensor `b`"),
        (_file(TWO % "8, 12", bytes(12)), "invalid offset for tensor `b`"),
        (_file((TWO % "4, 8").replace('"b"', '"a"'), bytes(8)), "invalid offset for tensor `a`"),
    ],
)
def test_a_file_that_is_not_what_its_header_says_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"model\.safetensors is not a readable safetensors file \(.*{message}.*copy or download it again"
    ):
        TensorFiles(tmp_path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good folder of several files, beside which lies one that is none of its business."""
    folder = tmp_path / "folder"
    hf_model().save_pretrained(folder, max_shard_size="100KB")
    save_file({"model.norm.weight": torch.full((32,), 7.0)}, tmp_path / "outside.safetensors")
    return folder


def _load(folder: Path) -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(json.loads((folder / "config.json").read_text())), BackendConfig(experts="loop"))
    load_hf_folder(model, folder)
    return model.eval()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "", "a\0b", "sub/x.safetensors", 3, None, ["x"]])
def test_an_index_leads_nowhere_else(sharded: Path, name: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json: model\.norm\.weight is said to be in .*, which is no name of a file in the folder"):
        _load(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "a JSON object with a weight_map is expected"),
        ('{"weight_map": 3}', "a JSON object with a weight_map is expected"),
        ("[" * 50_000, "recursion"),
        ("\x00", "Expecting value"),
    ],
)
def test_an_index_that_is_none_is_refused(sharded: Path, text: str, message: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"is not an index of safetensors files: .*{message}"):
        _load(sharded)


def test_links_inside_the_folder_are_followed_as_in_the_hubs_cache(sharded: Path) -> None:
    for path in sharded.glob("*.safetensors"):
        path.rename(sharded.parent / path.name)
        path.symlink_to(sharded.parent / path.name)
    assert torch.equal(_load(sharded)(ids()).logits, ours_like(hf_model())(ids()).logits)


def test_two_files_of_one_tensor_are_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), key: tensor + 1}, second)
    with pytest.raises(ValueError, match=f"{first.name} and {second.name} both hold {key}; keep the file that is meant"):
        _load(sharded)


def test_two_models_in_one_folder_are_refused(sharded: Path) -> None:
    """transformers would load the one file, others the index."""
    save_file({key: tensor for path in sharded.glob("*.safetensors") for key, tensor in load_file(path).items()}, sharded / WEIGHTS)
    with pytest.raises(ValueError, match=r"has both model\.safetensors and model\.safetensors\.index\.json, which names other files"):
        _load(sharded)
    (sharded / INDEX).unlink()
    assert torch.equal(_load(sharded)(ids()).logits, ours_like(hf_model())(ids()).logits)


def test_a_tensor_that_the_index_forgot_is_read_all_the_same(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """case B36: an index in which each rank listed its own keys only; the files tell what they hold."""
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    assert torch.equal(_load(sharded)(ids()).logits, ours_like(hf_model())(ids()).logits)
    assert "leaves out 1 tensors of its files" in caplog.text


def test_a_file_that_shrinks_after_it_was_looked_at_is_an_error_with_its_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / WEIGHTS)
    files = TensorFiles(tmp_path)
    content = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        files.read("b", (slice(0, 100),))
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        files.read("b", (slice(0, 100),))
