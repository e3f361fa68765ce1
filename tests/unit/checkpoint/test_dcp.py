"""The tensors of a checkpoint in one process: what comes back, and what a folder cannot make us do."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_moe.checkpoint.dcp import read_tensors, write_tensors
from nemo_moe.checkpoint.dcp_index import INDEX_FILE, CheckpointReadError, StoredTensor, read_index, stored_tensors
from nemo_moe.checkpoint.shards import LocalShard


def boxes() -> list[LocalShard]:
    torch.manual_seed(0)
    whole = torch.randn(6, 3)
    return [
        LocalShard("matrix", whole, (6, 3), (0, 0)),
        LocalShard("view", torch.randn(8, 4)[2:4], (2, 4), (0, 0)),
        LocalShard("half", torch.randn(5).bfloat16(), (5,), (0,)),
        LocalShard("number", torch.tensor(3.0), (), ()),
        LocalShard("bytes", torch.arange(7, dtype=torch.uint8), (7,), (0,)),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tensors(boxes(), tmp_path, None)
    return tmp_path


def test_tensors_come_back_bit_for_bit(folder: Path) -> None:
    index = read_index(folder)
    assert stored_tensors(index) == {box.name: StoredTensor(box.global_shape, box.tensor.dtype) for box in boxes()}
    read = [dataclasses.replace(box, tensor=torch.zeros_like(box.tensor)) for box in boxes()]
    read_tensors(read, index, folder, None)
    for mine, original in zip(read, boxes(), strict=True):
        assert torch.equal(mine.tensor, original.tensor), mine.name


def test_a_view_does_not_drag_its_whole_storage_along(tmp_path: Path) -> None:
    write_tensors([LocalShard("rows", torch.zeros(100_000, 4)[:2], (2, 4), (0, 0))], tmp_path, None)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10_000


def test_any_part_can_be_read(folder: Path) -> None:
    part = LocalShard("matrix", torch.zeros(3, 2), (6, 3), (2, 1))
    read_tensors([part], read_index(folder), folder, None)
    assert torch.equal(part.tensor, boxes()[0].tensor[2:5, 1:3])


class _Trap:
    """Pickled as a call that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_an_index_cannot_run_code(folder: Path) -> None:
    trace = folder / "was here"
    (folder / INDEX_FILE).write_bytes(pickle.dumps(_Trap(trace)))
    with pytest.raises(CheckpointReadError, match=r"names (posix|nt)\.mkdir, which no index does"):
        read_index(folder)
    assert not trace.exists()
    pickle.loads((folder / INDEX_FILE).read_bytes())  # the trap works where nothing stops it
    assert trace.exists()


@pytest.mark.parametrize("module", ["torch", "torch.distributed.checkpoint.metadata", "builtins", "torch.serialization"])
def test_an_index_gets_no_function_of_the_modules_it_uses(folder: Path, module: str) -> None:
    function = {"torch": "load", "builtins": "eval", "torch.serialization": "load"}.get(module, "os")
    (folder / INDEX_FILE).write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(CheckpointReadError, match=rf"names {module}\.{function}"):
        read_index(folder)


def _rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((folder / INDEX_FILE).read_bytes())
    change(index)
    (folder / INDEX_FILE).write_bytes(pickle.dumps(index))


def _outside(index: Any) -> None:
    for place in index.storage_data.values():
        place.relative_path = "../secret.distcp"


def _pickled(index: Any) -> None:
    index.state_dict_metadata["matrix"] = BytesStorageMetadata()  # torch would read it by a bare pickle


def _no_entry(index: Any) -> None:
    index.state_dict_metadata["matrix"] = "text"


def _negative(index: Any) -> None:
    next(iter(index.storage_data.values())).offset = -5


def _lost(index: Any) -> None:
    index.storage_data.pop(next(key for key in index.storage_data if key.fqn == "half"))


def _emptied(index: Any) -> None:
    index.storage_data = None


def _hollow(index: Any) -> None:
    index.state_dict_metadata["matrix"].chunks = []  # its memory would stay uninitialised


def _no_properties(index: Any) -> None:
    index.state_dict_metadata["matrix"].properties = None


def _grown(index: Any) -> None:
    index.state_dict_metadata["matrix"].size = torch.Size([60, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, r"'\.\./secret\.distcp', which is none of a checkpoint's"),
        (_pickled, "names .*BytesStorageMetadata, which no index does"),
        (_no_entry, "matrix is no tensor"),
        (_negative, "-5 is no number of elements or bytes"),
        (_lost, "a part of half is in no file"),
        (_emptied, "is not the index of a checkpoint"),
        (_hollow, "the parts of matrix do not make up the whole of it"),
        (_no_properties, "is not the index of a checkpoint"),
        (_grown, "the parts of matrix do not make up the whole of it"),
    ],
)
def test_an_index_that_lies_is_refused(folder: Path, change: Callable[[Any], None], message: str) -> None:
    _rewrite(folder, change)
    with pytest.raises(CheckpointReadError, match=message):
        read_index(folder)


def test_damaged_folders_are_named(folder: Path) -> None:
    data = next(folder.glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[:-100])
    with pytest.raises(CheckpointReadError, match=rf"{data.name} is cut off: {len(content) - 100} bytes of"):
        read_index(folder)
    data.unlink()
    with pytest.raises(CheckpointReadError, match=rf"{data.name} is missing"):
        read_index(folder)
    (folder / INDEX_FILE).write_bytes(b"\x80garbage")
    with pytest.raises(CheckpointReadError, match="is not the index of a checkpoint"):
        read_index(folder)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(CheckpointReadError, match="not a complete checkpoint"):
        read_index(folder)


def test_a_damaged_tensor_is_an_error_that_names_the_folder(folder: Path) -> None:
    data = next(folder.glob("*.distcp"))
    data.write_bytes(b"\0" * data.stat().st_size)
    index = read_index(folder)
    read = [dataclasses.replace(box, tensor=torch.zeros_like(box.tensor)) for box in boxes()]
    with pytest.raises(CheckpointReadError, match=str(folder)):
        read_tensors(read, index, folder, None)


def test_an_index_cannot_change_a_class_of_the_process(folder: Path) -> None:
    (folder / INDEX_FILE).write_bytes(b"cpathlib\nPosixPath\n(N}S'is_file'\nctorch\nSize\nstb.")
    with pytest.raises(CheckpointReadError):
        read_index(folder)
    assert folder.is_dir() and not (folder / "nothing").is_file()
