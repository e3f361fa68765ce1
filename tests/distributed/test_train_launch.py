"""recipes/finetune.py under torchrun: what cannot run is one message and a non-zero exit, and what can runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_moe.compose import to_yaml
from tiny_run import records, tiny_config

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks; their output and torchrun's, apart."""
    options = ["--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(ROOT / "recipes" / "finetune.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)


def before_closing_block(stderr: str) -> str:
    """What the ranks wrote: torchrun follows with how they ended, and a traceback of its own."""
    head, found, _ = stderr.partition("failed (exitcode")
    assert found, stderr
    return head


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(to_yaml(tiny_config(tmp_path / "run", ep_size=2, max_steps=3)))
    return str(path)


def test_two_ranks_train_and_save(recipe: str, tmp_path: Path) -> None:
    done = torchrun(recipe, "train.max_steps=2", "backend.experts=grouped_mm")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
    assert done.stdout.count("run folder:") == 1 and done.stdout.count("experts: grouped_mm (as configured)") == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lrr=1"], "did you mean"),
        (["distributed.ep_size=4"], "need 4 ranks or more, but there are 2"),  # case B34: found before any group exists
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_config_that_cannot_run_is_one_message(recipe: str, tmp_path: Path, overrides: list[str], message: str) -> None:
    done = torchrun(recipe, *overrides)
    assert done.returncode != 0
    everything = done.stdout + done.stderr
    assert everything.count(message) == 1 and everything.count("error: ") == 1, everything
    assert "Traceback" not in before_closing_block(done.stderr) and not (tmp_path / "run").exists()


def test_a_run_that_diverges_is_one_message_that_names_the_step(recipe: str, tmp_path: Path) -> None:
    done = torchrun(recipe, "optimizer.lr=1e30", "train.max_grad_norm=null", "train.max_steps=20")
    assert done.returncode != 0
    assert done.stderr.count("error: step ") == 1 and "training stopped before its update" in done.stderr
    assert "Traceback" not in before_closing_block(done.stderr)
    assert not (tmp_path / "run" / "model").exists()
