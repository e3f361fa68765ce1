"""Hugging Face folders under expert parallelism and FSDP2: every mesh reads and writes the one model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_moe.checkpoint.hf import load_hf_folder, save_hf_folder
from nemo_moe.checkpoint.shards import local_shards
from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.distributed.mesh import MeshSizes, build_meshes
from nemo_moe.distributed.parallelize import init_weights, parallelize
from nemo_moe.hf_folder import read_hf_config
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from nemo_moe.testing.run_distributed import run_distributed
from tiny_qwen3_moe import SIZES, hf_model, ids

Mesh = tuple[int, int, int]  # dp_replicate, fsdp, ep
MESHES: list[Mesh] = [(1, 2, 1), (1, 2, 2), (2, 1, 1), (1, 4, 2), (1, 4, 4), (2, 2, 2)]


def _parallel_model(hf: dict[str, Any], mesh: Mesh, router: RouterConfig | None = None, precision: str = "fp32") -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(hf), BackendConfig(experts="loop"), router)
    meshes = build_meshes(MeshSizes(dp_replicate=mesh[0], fsdp=mesh[1], ep=mesh[2]), "cpu")
    parallelize(model, meshes, SimpleNamespace(precision=precision, train=SimpleNamespace(activation_checkpointing="full")))
    model.to_empty(device="cpu")
    model.reset_buffers()
    return model


def _load_on_ranks(folder: Path, mesh: Mesh) -> tuple[Tensor, int]:
    """Logits; bytes held, which in these files are as many."""
    model = _parallel_model(read_hf_config(folder), mesh)
    told: list[tuple[int, int]] = []
    load_hf_folder(model, folder, progress=lambda done, total: told.append((done, total)))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    held = sum(shard.tensor.nbytes for shard in local_shards(model))
    assert told[0] == (0, held) and told[-1] == (held, held) and told == sorted(told)
    with torch.no_grad():
        return model(ids()).logits, held


@pytest.mark.parametrize("layout", ["per expert", "fused"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_rank_loads_its_own_slices(tmp_path: Path, mesh: Mesh, layout: str) -> None:
    theirs = hf_model(mlp_only_layers=[1], tie_word_embeddings=mesh[0] == 2)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    if layout == "fused":
        for path in tmp_path.glob("model*"):
            path.unlink()
        save_file({name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}, tmp_path / "model.safetensors")
    world_size = mesh[0] * mesh[1]
    expected = theirs(ids()).logits
    results = run_distributed(_load_on_ranks, world_size, tmp_path, mesh)
    for logits, _ in results:
        assert (logits - expected).abs().max().item() < 1e-5
    assert sum(held for _, held in results) == mesh[0] * sum(parameter.nbytes for parameter in theirs.parameters())


def _pages_that_a_load_touches(hf: dict[str, Any], folder: Path, mesh: Mesh) -> tuple[int, int]:
    """Bytes of the file's pages that this process has looked at, as the kernel counts them; bytes held."""
    model = _parallel_model(hf, mesh)
    touched: list[int] = []

    def look(*_: int) -> None:
        kilobytes = re.findall(r"model\.safetensors\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
        touched.append(1024 * sum(map(int, kilobytes)))

    load_hf_folder(model, folder, progress=look)
    return max(touched), sum(shard.tensor.nbytes for shard in local_shards(model))


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 2, 2)], ids=str)
def test_no_rank_touches_more_of_a_file_than_its_own_slices(tmp_path: Path, mesh: Mesh) -> None:
    """Stacked experts, 100 MB: two ranks look at half of each tensor. The kernel maps with it up to some MB around it."""
    hf = {**SIZES, "num_hidden_layers": 1, "hidden_size": 1024, "moe_intermediate_size": 2048, "num_experts": 4}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_hf(hf), BackendConfig(experts="loop"))
    save_file({name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}, tmp_path / "model.safetensors")
    for touched, held in run_distributed(_pages_that_a_load_touches, 2, hf, tmp_path, mesh):
        assert held > 5e7 and held - 2**17 <= touched < 1.4 * held


def _save_on_ranks(hf: dict[str, Any], mesh: Mesh, folder: Path, max_shard_bytes: int) -> Tensor:
    """A model that no file was the source of (case B36): its logits before it is saved."""
    model = _parallel_model(hf, mesh)
    init_weights(model, seed=5, initializer_range=0.2)
    with torch.no_grad():
        logits = model(ids()).logits
    save_hf_folder(model, folder, max_shard_bytes=max_shard_bytes)
    assert (folder / "config.json").is_file()  # on every rank, as soon as it has returned
    return logits


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_transformers_loads_what_any_mesh_saves(tmp_path: Path, mesh: Mesh) -> None:
    """case B36: every key once in the index, all shards open, no missing or unexpected key."""
    hf = {**SIZES, "mlp_only_layers": [1], "tie_word_embeddings": mesh[0] == 2}
    expected = run_distributed(_save_on_ranks, mesh[0] * mesh[1], hf, mesh, tmp_path / "out", 30_000)
    import transformers  # not above: the ranks import this module

    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    for logits in expected:
        assert (model.eval()(ids()).logits - logits).abs().max().item() < 1e-5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = [(key, path.name) for path in (tmp_path / "out").glob("*.safetensors") for key in load_file(path)]
    assert sorted(held) == sorted(index["weight_map"].items())


def _masters(model: Qwen3MoeForCausalLM) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.clone() for shard in local_shards(model)}


def _after_a_bf16_forward(hf: dict[str, Any], folder: Path, gradient: bool) -> list[str]:
    """Save right after a forward, then load right after another: what differs from the fp32 masters."""
    model = _parallel_model(hf, (1, 2, 2), precision="bf16")
    init_weights(model, seed=5, initializer_range=0.2)
    masters = _masters(model)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    with torch.set_grad_enabled(gradient):
        assert model(ids()).logits.dtype is torch.bfloat16
        save_hf_folder(model, folder)
        for shard in local_shards(model):
            shard.tensor.zero_()
        model(ids())
        load_hf_folder(model, folder)
    loaded = _masters(model)
    return [name for name, master in masters.items() if not torch.equal(loaded[name], master)]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_bf16_run_saves_its_fp32_masters_bit_for_bit(tmp_path: Path, tied: bool, gradient: bool) -> None:
    """After an evaluation FSDP2 shows bf16 copies of embedding, norm and head to whoever walks the parameters."""
    hf = {**SIZES, "tie_word_embeddings": tied}
    assert run_distributed(_after_a_bf16_forward, 2, hf, tmp_path / "out", gradient) == [[], []]
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert read_hf_config(tmp_path / "out")["torch_dtype"] == "float32"


def _expert_constants(hf: dict[str, Any], mesh: Mesh, folder: Path, save: bool) -> list[float]:
    model = _parallel_model(hf, mesh, RouterConfig(bias_update_rate=0.1))
    if save:
        init_weights(model, seed=5, initializer_range=0.2)
        for moe in model.moe_layers():
            for parameter in moe.experts.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.detach().copy_((torch.arange(2.0) + 1 + moe.experts.expert_offset)[:, None, None])
            assert moe.gate.expert_bias is not None
            moe.gate.expert_bias.copy_(torch.arange(1.0, 5.0))
        save_hf_folder(model, folder)
    else:
        load_hf_folder(model, folder)
    moe = model.moe_layers()[-1]
    assert moe.gate.expert_bias is not None
    assert moe.gate.expert_bias.tolist() == [1.0, 2.0, 3.0, 4.0]
    values = []
    for parameter in moe.experts.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert all(expert.unique().numel() == 1 for expert in local)
        values.append([expert.flatten()[0].item() for expert in local])
    assert values[0] == values[1]
    return values[0]


def test_experts_keep_their_order_over_changes_of_ep(tmp_path: Path) -> None:
    """case B37: experts filled with 1, 2, 3, 4 at EP=2; read at EP 1, 2 and 4. Expert biases likewise."""
    hf = {**SIZES, "num_experts": 4, "intermediate_size": 40}
    assert run_distributed(_expert_constants, 2, hf, (1, 2, 2), tmp_path / "out", True) == [[1.0, 2.0], [3.0, 4.0]]
    assert run_distributed(_expert_constants, 2, hf, (1, 2, 2), tmp_path / "out", False) == [[1.0, 2.0], [3.0, 4.0]]
    assert run_distributed(_expert_constants, 2, hf, (2, 1, 1), tmp_path / "out", False) == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert run_distributed(_expert_constants, 4, hf, (1, 4, 4), tmp_path / "out", False) == [[1.0], [2.0], [3.0], [4.0]]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for expert in range(4):
        assert stored[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"].unique().tolist() == [expert + 1.0]


def _through(source: Path, out: Path, mesh: Mesh) -> None:
    model = _parallel_model(read_hf_config(source), mesh)
    load_hf_folder(model, source)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    save_hf_folder(model, out, source=source)


def test_a_bf16_folder_comes_out_of_fp32_master_weights_as_it_went_in(tmp_path: Path) -> None:
    """case B39: bf16 on disk, the config agrees, the size is the source's."""
    hf_model().bfloat16().save_pretrained(tmp_path / "source")
    run_distributed(_through, 2, tmp_path / "source", tmp_path / "out", (1, 2, 2))
    assert read_hf_config(tmp_path / "out")["torch_dtype"] == "bfloat16"
    source, out = load_file(tmp_path / "source" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == source.keys()
    assert all(torch.equal(out[key], source[key]) and out[key].dtype is torch.bfloat16 for key in source)


def _save_where_nothing_can_be_written(hf: dict[str, Any], folder: Path) -> str:
    model = _parallel_model(hf, (1, 2, 2))
    init_weights(model, seed=5, initializer_range=0.2)
    with pytest.raises(RuntimeError) as error:
        save_hf_folder(model, folder)
    return str(error.value)


def test_all_ranks_stop_with_the_cause_when_rank_0_cannot_write(tmp_path: Path) -> None:
    """case B50, its part here: no rank waits for a writer that failed."""
    (tmp_path / "file").touch()
    messages = run_distributed(_save_where_nothing_can_be_written, 2, SIZES, tmp_path / "file" / "out", timeout=60)
    assert messages[0] == messages[1]
    assert "failed: NotADirectoryError" in messages[0] or "failed: FileExistsError" in messages[0]


def _load_incomplete(folder: Path) -> str:
    model = _parallel_model(read_hf_config(folder), (1, 2, 2))
    with pytest.raises(ValueError) as error:
        load_hf_folder(model, folder)
    return str(error.value)


@pytest.mark.parametrize("expert", [1, 6])
def test_a_missing_expert_stops_every_rank_also_those_that_do_not_own_it(tmp_path: Path, expert: int) -> None:
    """case B38"""
    hf_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    messages = run_distributed(_load_incomplete, 2, tmp_path)
    assert messages[0] == messages[1]
    assert f"1 missing from model.safetensors: model.layers.0.mlp.experts.{expert}.down_proj.weight" in messages[0]
