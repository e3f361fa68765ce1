"""`nemo-moe export`: a checkpoint of EP=2 ranks becomes, in one process, the folder that the run itself would save."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_moe.checkpoint.tensor_files import EXTRA_FILE
from nemo_moe.cli.main import main
from nemo_moe.config import CheckpointConfig, OptimizerConfig, RouterConfig, ValidationConfig
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.finetune import finetune
from tiny_run import tiny_config


def _finetune(folder: str) -> None:
    config = tiny_config(
        folder,
        ep_size=2,
        max_steps=4,
        micro_batch_size=2,
        optimizer=OptimizerConfig(lr=1e-2),
        router=RouterConfig(bias_update_rate=0.01),
        checkpoint=CheckpointConfig(every_steps=2, keep_best=True),
        validation=ValidationConfig(every_steps=2),
    )
    finetune(config)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_distributed(_finetune, 2, str(folder))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- not a dict
    return found


def test_the_last_checkpoint_is_the_saved_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert "step-00000004" in capsys.readouterr().out
    names = sorted(path.name for path in (run / "model").iterdir())
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == names and EXTRA_FILE in names
    for name in names:
        assert (tmp_path / "model" / name).read_bytes() == (run / "model" / name).read_bytes(), name


@pytest.mark.parametrize("which", ["best", "2", "folder"])
def test_other_checkpoints_can_be_chosen(run: Path, tmp_path: Path, which: str) -> None:
    arguments = [str(run / "checkpoints" / "step-00000002")] if which == "folder" else [str(run), "--checkpoint", which]
    assert main(["export", *arguments, str(tmp_path / "model")]) == 0
    mine, last = tensors(tmp_path / "model"), tensors(run / "model")
    best = (run / "checkpoints" / "best").read_text().strip()
    assert mine.keys() == last.keys()
    differs = any(not torch.equal(mine[name], last[name]) for name in mine)
    assert differs == (which != "best" or best == "step-00000002")


def test_transformers_loads_small_shards_in_bf16(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path), "--dtype", "bfloat16", "--max-shard-gb", "2e-5"]) == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16 and len(AutoTokenizer.from_pretrained(tmp_path)) == model.config.vocab_size
    original = tensors(run / "model")
    for name, value in model.named_parameters():
        if name in original:
            assert torch.equal(value, original[name].bfloat16()), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "has no checkpoint: neither state.json nor"),
        (["RUN", "--checkpoint", "3"], "has no checkpoint '3' (there are: latest, best, 2, 4)"),
        (["RUN", "--checkpoint", "newest"], "has no checkpoint 'newest'"),
    ],
)
def test_what_cannot_be_exported_is_one_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [str(run) if argument == "RUN" else argument for argument in arguments]
    assert main(["export", *given, str(tmp_path / "model")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_a_folder_that_cannot_be_written_is_one_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert main(["export", str(run), str(tmp_path / "file" / "model")]) == 1
    assert "export: error: saving to" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-1", "inf", "nan", "big"])
def test_a_shard_size_that_is_none_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(run), str(tmp_path / "model"), "--max-shard-gb", size])
    assert "needs a size in GB above 0" in capsys.readouterr().err


def test_links_in_a_checkpoint_are_not_followed(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "step-00000004"
    shutil.copytree(run / "checkpoints" / "step-00000004", copy)
    (tmp_path / "secret").write_text("mine")
    (copy / "hf" / "tokenizer.json").unlink()
    (copy / "hf" / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert main(["export", str(copy), str(tmp_path / "model")]) == 2
    assert "is a link" in capsys.readouterr().err and not (tmp_path / "model").exists()
