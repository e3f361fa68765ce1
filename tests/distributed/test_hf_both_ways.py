"""Every family here, from transformers to us and back, through many small files, over expert-parallel ranks."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_mixtral
import tiny_qwen3_moe
from nemo_moe.checkpoint.hf import load_hf_folder, save_hf_folder
from nemo_moe.checkpoint.together import SaveError
from nemo_moe.config import BackendConfig
from nemo_moe.distributed.mesh import MeshSizes, build_meshes
from nemo_moe.distributed.parallelize import init_weights, parallelize
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.models.decoder import DecoderForCausalLM
from nemo_moe.registry import MODELS, load_target
from nemo_moe.testing.run_distributed import run_distributed
from tiny_qwen3_moe import ids

TINY: dict[str, Any] = {"qwen3_moe": tiny_qwen3_moe, "mixtral": tiny_mixtral}


def _model(hf: dict[str, Any], family: str, ep: int, world_size: int) -> DecoderForCausalLM:
    """Of random weights; on the way to them no rank has the whole model."""
    config = load_target(MODELS.get(family).config).from_hf(hf)
    with torch.device("meta"):
        model: DecoderForCausalLM = MODELS.load(family)(config, BackendConfig(experts="loop"))
    meshes = build_meshes(MeshSizes(dp_replicate=1, fsdp=world_size, ep=ep), "cpu")
    parallelize(model, meshes, SimpleNamespace(precision="fp32", train=SimpleNamespace(activation_checkpointing="none")))
    model.to_empty(device="cpu")
    model.reset_buffers()
    init_weights(model, seed=3, initializer_range=0.2)
    return model


def _there_and_back(source: Path, out: Path, family: str, ep: int, world_size: int) -> tuple[Tensor, list[tuple[int, int]]]:
    model = _model(read_hf_config(source), family, ep, world_size)
    load_hf_folder(model, source)
    told: list[tuple[int, int]] = []
    save_hf_folder(model, out, source=source, max_shard_bytes=100_000, progress=lambda done, total: told.append((done, total)))
    with torch.no_grad():
        return model(ids()).logits, told


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("family", TINY)
def test_transformers_and_we_read_each_other(tmp_path: Path, family: str, ep: int) -> None:
    """cases B36 and B38: many small files; logits equal at every EP; no key too few or too many on the way back."""
    source, out = tmp_path / "source", tmp_path / "out"
    theirs = TINY[family].hf_model(vocab_size=640)
    theirs.save_pretrained(source, max_shard_size="100KB")
    (source / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    (source / "tokenizer.json").write_text("{}")
    assert len(list(source.glob("model-*.safetensors"))) > 3
    expected = theirs(ids()).logits
    world_size = max(ep, 2)
    results = run_distributed(_there_and_back, world_size, source, out, family, ep, world_size)
    total = sum(parameter.nbytes for parameter in theirs.parameters())
    for rank, (logits, told) in enumerate(results):
        assert (logits - expected).abs().max().item() < 1e-5
        assert told == sorted(told) and (told[0], told[-1]) == ((0, total), (total, total)) if rank == 0 else told == []
    import transformers

    again, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(again) is type(theirs)
    assert (again.eval()(ids()).logits - expected).abs().max().item() < 1e-5
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {key: (path.name, tensor) for path in out.glob("*.safetensors") for key, tensor in load_file(path).items()}
    assert {key: name for key, (name, _) in stored.items()} == index["weight_map"]
    original = {key: tensor for path in source.glob("*.safetensors") for key, tensor in load_file(path).items()}
    assert stored.keys() == original.keys() and all(torch.equal(stored[key][1], original[key]) for key in original)
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.25, "do_sample": true}'
    assert (out / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("prefix", ["mlp", "block_sparse_moe"])
def test_mixtral_with_stacked_experts_loads_under_either_prefix(tmp_path: Path, prefix: str) -> None:
    """case B38"""
    theirs = tiny_mixtral.hf_model()
    theirs.save_pretrained(tmp_path / "source")
    weights = {name.replace(".mlp.", f".{prefix}."): parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    save_file(weights, tmp_path / "source" / "model.safetensors")
    for logits, _ in run_distributed(_there_and_back, 2, tmp_path / "source", tmp_path / "out", "mixtral", 2, 2):
        assert (logits - theirs(ids()).logits).abs().max().item() < 1e-5


def _saves(folder: Path, obstacle: Callable[[], Any], family: str) -> str | None:
    """The message of a save with an obstacle in the way, which is there for rank 0 alone; None where it succeeds."""
    model = _model(TINY[family].SIZES, family, 2, 2)
    with obstacle() if int(os.environ["RANK"]) == 0 else _nothing():
        try:
            save_hf_folder(model, folder, max_shard_bytes=40_000)
        except SaveError as error:
            return str(error)
    return None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def small_files_only() -> Iterator[None]:
    """The system refuses to make a file longer than 30 KB: where the disk of a 40 KB file would be full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_privileges() -> Iterator[None]:
    """Root may write anywhere; nobody may not."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("obstacle", "mode", "cause"),
    [(small_files_only, 0o755, "SafetensorError: .*File too large"), (no_privileges, 0o555, "PermissionError: .*Permission denied")],
    ids=["no room", "read-only"],
)
@pytest.mark.parametrize("older", [True, False])
def test_a_save_that_cannot_be_written_stops_all_ranks_with_one_cause(
    obstacle: Callable[[], Any], mode: int, cause: str, older: bool
) -> None:
    """case B50, its part here: an older folder is as it was, nothing half-written stays."""
    base = Path(tempfile.mkdtemp())  # tmp_path is of one user alone
    try:
        base.chmod(0o755)
        folder = base / "out"
        if older:
            assert run_distributed(_saves, 2, folder, _nothing, "mixtral") == [None, None]
        before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
        (folder if older else base).chmod(mode)
        messages = run_distributed(_saves, 2, folder, obstacle, "qwen3_moe", timeout=60)
        (folder if older else base).chmod(0o755)
        assert messages[0] is not None and messages[0] == messages[1]
        assert re.match(f"saving to .*out failed: {cause}", messages[0]), messages[0]
        assert {path: path.read_bytes() for path in base.rglob("*") if path.is_file()} == before
        assert list(base.iterdir()) == ([folder] if older else [])
    finally:
        shutil.rmtree(base)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files that the saving user may not move")
def test_files_that_cannot_be_moved_to_their_place_leave_the_older_folder_as_it_was() -> None:
    """case B50: in a folder with the sticky bit only a file's owner may move it; the weights can be moved, the config not."""
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        folder = base / "out"
        model = tiny_qwen3_moe.ours_like(tiny_qwen3_moe.hf_model())
        save_hf_folder(model, folder)
        folder.chmod(0o1777)
        os.chown(folder / "model.safetensors", 65534, -1)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with no_privileges(), pytest.raises(SaveError, match="failed: PermissionError"):
            save_hf_folder(model, folder, max_shard_bytes=20_000)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    finally:
        shutil.rmtree(base)
