"""What a run reports: JSONL and W&B on one step axis, plain lines without a terminal, and trackers that may fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_moe.config import LoggingConfig, WandbConfig, WandbMode
from nemo_moe.train.logging import RunLogger
from nemo_moe.train.tracking import WandbRun, resolve_mode
from wandb_file import read_wandb

STEP = {"loss": 1.5, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 1234.0}


def config(mode: WandbMode = WandbMode.disabled, every_steps: int = 2) -> LoggingConfig:
    return LoggingConfig(every_steps=every_steps, wandb=WandbConfig(mode=mode))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_five_steps(log: RunLogger) -> None:
    log.start(5)
    for step in range(1, 6):
        log.step(step, STEP, lambda: {"moe/imbalance": 2.0, "moe/layer_0/load": [0.75, 0.25]})
        if step == 4:
            log.validation(step, {"loss": 0.5})


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_train_and_validation_records_share_the_global_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """case B49: one step axis; every second step and the last one are written."""
    with RunLogger(config(), rank=0) as log:
        log.begin(tmp_path, {})
        log_five_steps(log)
    assert [record["step"] for record in records(tmp_path / "train.jsonl")] == [2, 4, 5]
    assert records(tmp_path / "train.jsonl")[0] == {"step": 2, **STEP, "moe/imbalance": 2.0, "moe/layer_0/load": [0.75, 0.25]}
    assert records(tmp_path / "validation.jsonl") == [{"step": 4, "loss": 0.5}]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["2/5", "4/5", "5/5"]
    assert all(text in lines[0] for text in ("loss 1.5000", "lr 1.00e-03", "1,234 tokens/s", "imbalance 2.00", "left"))
    assert "\x1b" not in "".join(lines), "no terminal, no control codes"


def test_only_rank_0_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogger(config(WandbMode.offline), rank=1) as log:
        log.begin(tmp_path, {})
        log.warn("something")
        log_five_steps(log)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_wandb_offline_holds_the_same_steps_and_the_config(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    """case B49, for W&B; without a key `auto` is offline."""
    with RunLogger(config(WandbMode.auto), rank=0) as log:
        log.begin(tmp_path, {"optimizer": {"lr": 0.25}})
        log_five_steps(log)
    run = _only(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    history, settings = read_wandb(run)
    assert [row["_step"] for row in history] == [2, 4, 5]
    assert history[1]["train/loss"] == 1.5 and history[1]["validation/loss"] == 0.5
    assert history[0]["train/moe/layer_0/load"] == [0.75, 0.25]
    assert settings["optimizer"] == {"lr": 0.25}


def test_a_tracker_that_cannot_start_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what a missing package looks like to an import
    with RunLogger(config(WandbMode.offline), rank=0) as log:
        log.begin(tmp_path, {})
        log_five_steps(log)
    out = capsys.readouterr().out
    assert out.count("warning: W&B could not start and is off for the rest of this run") == 1
    assert len(records(tmp_path / "train.jsonl")) == 3


def test_a_tracker_that_breaks_in_the_middle_is_one_warning(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> None:
    import wandb

    warnings: list[str] = []
    run = WandbRun(WandbConfig(mode=WandbMode.offline), tmp_path, {}, warnings.append, lambda text: None)
    run.log({"loss": 1.0}, step=1)
    assert wandb.run is not None
    wandb.run.finish()  # behind the logger's back: wandb refuses the next value
    for step in (2, 3):
        run.log({"loss": 1.0}, step=step)
    run.finish()
    assert len(warnings) == 1 and warnings[0].startswith("W&B stopped working")


def test_auto_is_online_only_with_a_key(clean_environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_mode(WandbMode.auto) == "offline"
    clean_environment.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_mode(WandbMode.auto) == "online"
    assert resolve_mode(WandbMode.offline) == "offline"
    clean_environment.setenv("WANDB_MODE", "disabled")
    assert resolve_mode(WandbMode.auto) == "disabled"
    clean_environment.delenv("WANDB_MODE")
    clean_environment.delenv("WANDB_API_KEY")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password 0000\n")
    assert resolve_mode(WandbMode.auto) == "online"
    clean_environment.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert resolve_mode(WandbMode.auto) == "offline", "a key for another host is no key"


def _only(paths: Any) -> Path:
    found = list(paths)
    assert len(found) == 1, found
    return found[0]
