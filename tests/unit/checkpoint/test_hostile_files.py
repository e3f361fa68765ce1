"""Weights files that are damaged, lie, or lead elsewhere: each is refused with its name, and nothing is loaded from it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_moe.checkpoint.hf import load_hf_folder
from nemo_moe.checkpoint.safetensors_header import make_header
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
        (b"", "its 0 bytes begin with a header length of 0"),
        (b"1234567", "its 7 bytes"),
        (struct.pack("<Q", 2**60) + bytes(100), "header length of 1152921504606846976"),
        (_file("nonsense"), "Expecting value"),
        (_file(b"\xff\xfe"), "can't decode"),
        (_file("[1, 2]"), "a JSON object is expected, found list"),
        (_file("[" * 50_000), "nested too deeply"),
        (_file('{"a": 1}'), "a has no dtype"),
        (_one(shape=[3, 2]), r"a of shape \[3, 2\] needs 24 bytes, and has 16"),
        (_one(shape=[-2, -2]), r"a has the shape \[-2, -2\]"),
        (_one(shape=[2.0, 2]), "a has the shape"),
        (_one(data_offsets=[16, 0]), "a of shape .* needs 16 bytes, and has -16"),
        (_one(data_offsets=[0]), "data_offsets"),
        (_one(data_offsets=[4, 20]), "a is at bytes 4 to 20, but the tensor before it ends at 0"),
        (_one()[:-3], "its tensors end at byte .*, and it has"),
        (_one() + b"more", "its tensors end at byte .*, and it has"),
        (_file(TWO % "2, 6", bytes(6)), "b is at bytes 2 to 6, but the tensor before it ends at 4"),
        (_file(TWO % "8, 12", bytes(12)), "b is at bytes 8 to 12"),
        (_file((TWO % "4, 8").replace('"b"', '"a"'), bytes(8)), "the key 'a' is there twice"),
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
        ("[]", "a JSON object is expected"),
        ('{"weight_map": 3}', "weight_map is 3"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "the key 'a' is there twice"),
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
    with pytest.raises(ValueError, match=r"model\.safetensors ends at byte \d+, before its tensors do"):
        files.read_into("b", (slice(0, 100),), torch.empty(100))


BOXES: list[tuple[slice, ...]] = [
    (slice(0, 4), slice(0, 6), slice(0, 5)),
    (slice(1, 3), slice(0, 6), slice(0, 5)),
    (slice(0, 4), slice(2, 5), slice(0, 5)),
    (slice(3, 4), slice(1, 2), slice(2, 5)),
    (slice(0, 4), slice(0, 6), slice(4, 5)),
]


def _contiguous(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _strided(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]


@pytest.mark.parametrize("target", [_contiguous, _strided])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [8, 24, 2**20])
def test_a_box_of_any_kind_equals_the_slice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    dtype: torch.dtype,
    target: Callable[[torch.Size, torch.dtype], torch.Tensor],
) -> None:
    """Reads cut in the middle of rows and rows gathered into one read, converted and not, give what slicing gives."""
    monkeypatch.setattr("nemo_moe.checkpoint.tensor_files._CHUNK", chunk)
    whole = torch.randn(4, 6, 5)
    save_file({"before": torch.ones(3), "whole": whole, "number": torch.tensor(5.0)}, tmp_path / WEIGHTS)
    files = TensorFiles(tmp_path)
    for box in BOXES:
        into = target(whole[box].shape, dtype)
        told: list[int] = []
        files.read_into("whole", box, into, told.append)
        assert torch.equal(into, whole[box].to(dtype))
        assert sum(told) == whole[box].nbytes and max(told) <= chunk
    number = torch.empty(())
    files.read_into("number", (), number)
    assert number.item() == 5.0
    files.close()


def test_what_we_write_is_what_the_format_asks_for(tmp_path: Path) -> None:
    tensors = {"ä": torch.randn(3, 2), "b": torch.zeros(0, 4), "c": torch.tensor(1.5)}
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    (tmp_path / WEIGHTS).write_bytes(make_header([(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]) + data)
    read = load_file(tmp_path / WEIGHTS)
    assert read.keys() == tensors.keys() and all(torch.equal(read[key], tensors[key]) for key in tensors)
    assert set(TensorFiles(tmp_path).tensors) == set(tensors)
