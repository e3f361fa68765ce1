"""A run that goes on from a checkpoint is the run that was never interrupted: records bit for bit, samples once each."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from nemo_moe.checkpoint.dcp import write_tensors
from nemo_moe.checkpoint.dcp_index import CheckpointReadError
from nemo_moe.checkpoint.step_folders import StepFolders
from nemo_moe.config import CheckpointConfig, OptimizerConfig, RouterConfig, ScheduleConfig, ValidationConfig, WandbMode
from nemo_moe.data.chat import Sample
from nemo_moe.data.loader import StepLoader
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.finetune import finetune
from nemo_moe.train.runtime import StartError
from tiny_run import records, tiny_config
from wandb_file import read_wandb

STEPS = 10
SLOW = pytest.mark.slow  # run by `make test-all`
TIMES = ("tokens_per_second", "tokens_per_second_per_gpu", "peak_memory_gib")


def _finetune(folder: str, ep_size: int, checkpoint: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any] | str:
    """20 samples in batches of 8 make 3 steps an epoch, the last of them partial."""
    options: dict[str, Any] = {
        "items": 20,
        "max_steps": STEPS,
        "optimizer": OptimizerConfig(lr=2e-3, weight_decay=0.1),
        "schedule": ScheduleConfig(warmup_steps=2),
        "router": RouterConfig(aux_loss_coef=0.05, bias_update_rate=0.01),
        "model": {"attention_dropout": 0.1},  # so that random states matter
        "validation": ValidationConfig(every_steps=4, exact_match=True, show_samples=0),
        "micro_batch_size": 2,
        **settings,
    }
    log_every, fault = options.pop("log_every", 1), options.pop("fault", None)
    config = tiny_config(folder, ep_size=ep_size, checkpoint=CheckpointConfig(**checkpoint), **options)
    config.logging.every_steps = log_every
    try:
        with FAULTS[fault]() if fault else contextlib.nullcontext():
            return finetune(config)
    except StartError as error:
        return str(error)


def _slow_writes() -> Any:
    """Files are written half a second late: several steps of training later."""

    def late(*arguments: Any) -> None:
        time.sleep(0.5)
        write_tensors(*arguments)

    return mock.patch("nemo_moe.train.checkpoints.write_tensors", late)


def _stale_folder() -> Any:
    """Rank 1 still sees what was there before."""
    return mock.patch("nemo_moe.train.resume.read_state", return_value={}) if dist.get_rank() == 1 else contextlib.nullcontext()


def _unreadable_index() -> Any:
    """Rank 1 cannot read one of the files."""
    failing = mock.patch("nemo_moe.checkpoint.training_state.read_index", side_effect=CheckpointReadError("the disk is gone"))
    return failing if dist.get_rank() == 1 else contextlib.nullcontext()


FAULTS = {"slow writes": _slow_writes, "stale folder": _stale_folder, "unreadable index": _unreadable_index}


def run(folder: Path, ranks: int, ep_size: int = 1, settings: dict[str, Any] | None = None, **checkpoint: Any) -> Any:
    return run_distributed(_finetune, ranks, str(folder), ep_size, checkpoint, settings or {})[0]


def timeless(folder: Path, name: str = "train") -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records(folder, name)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, EP=2, never interrupted, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, 2, 2, every_steps=1, keep_last=STEPS)
    return folder


def checkpoint(folder: Path, step: int) -> str:
    return str(folder / "checkpoints" / f"step-{step:08d}")


@pytest.mark.parametrize("step", [pytest.param(2, marks=SLOW), 3, 4, 7])
def test_going_on_is_bit_for_bit_the_uninterrupted_run(whole: Path, tmp_path: Path, step: int) -> None:
    """cases B43, B47, B49: in the middle of an epoch (2, 7), at its end (3) and at a validation (4)."""
    result = run(tmp_path, 2, 2, resume=checkpoint(whole, step))
    assert timeless(tmp_path) == timeless(whole)[step:]
    validations = [record for record in timeless(whole, "validation") if record["step"] > step]
    assert timeless(tmp_path, "validation") == validations and validations[-1]["step"] == STEPS
    assert result["exact_match_before"] == timeless(whole, "validation")[0]["exact_match"]


def test_going_on_twice_is_bit_for_bit_too(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "one", 2, 2, resume=checkpoint(whole, 2), every_steps=3, keep_last=9)
    run(tmp_path / "two", 2, 2, resume=checkpoint(tmp_path / "one", 6))
    assert timeless(tmp_path / "two") == timeless(whole)[6:]


@pytest.mark.parametrize(("ranks", "ep_size"), [(1, 1), pytest.param(2, 1, marks=SLOW), pytest.param(4, 4, marks=SLOW), (4, 2)])
def test_other_ranks_go_on_with_the_same_losses(tmp_path: Path, ranks: int, ep_size: int) -> None:
    """Without dropout (its masks depend on the ranks), auxiliary losses (on the micro-batches) and updates by signs."""
    settings = {"model": {}, "router": RouterConfig()}
    run(tmp_path / "2", 2, 2, settings, every_steps=4, keep_last=9)
    run(tmp_path / "other", ranks, ep_size, settings, resume=checkpoint(tmp_path / "2", 4))
    expected = timeless(tmp_path / "2")[4:9]
    for mine, theirs in zip(timeless(tmp_path / "other")[:5], expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert {key: mine[key] for key in ("step", "lr", "tokens", "label_tokens", "epoch")} == {
            key: theirs[key] for key in ("step", "lr", "tokens", "label_tokens", "epoch")
        }


def test_a_save_in_the_background_is_what_a_plain_one_is(whole: Path, tmp_path: Path) -> None:
    """case B46: what is saved is the step's state, not a later one; the last one is awaited, and latest points at it."""
    run(tmp_path, 2, 2, {"fault": "slow writes"}, every_steps=3, keep_last=9, async_save=True)
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").read_text().strip() == f"step-{STEPS:08d}"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [f"step-{step:08d}" for step in (3, 6, 9, STEPS)]
    run(tmp_path / "on", 2, 2, resume=checkpoint(tmp_path, 6))
    assert timeless(tmp_path / "on") == timeless(whole)[6:]


def test_the_same_folder_goes_on_with_its_records(whole: Path, tmp_path: Path) -> None:
    """case B49: one step axis, no step twice, none missing; also in W&B, as one run."""
    settings = {"wandb_mode": WandbMode.offline}
    run(tmp_path, 2, 2, {**settings, "max_steps": 6}, every_steps=4)
    with (tmp_path / "train.jsonl").open("a") as file:  # what a run that was killed had logged after its last checkpoint
        file.write(json.dumps({"step": 7, "loss": 0.0}) + "\n")
    run(tmp_path, 2, 2, settings, resume="latest")
    assert [record["step"] for record in records(tmp_path)] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records(tmp_path, "validation")] == [0, 4, 6, 8, 10, 10]
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and len({path.name.rpartition("-")[2] for path in runs}) == 1
    steps = [[row["_step"] for row in read_wandb(next(path.glob("*.wandb")))[0]] for path in runs]
    assert steps[0] == list(range(7)) and steps[1] == list(range(7, 11))


def test_records_keep_their_spacing_and_validation_its_steps(tmp_path: Path) -> None:
    """case B49: a record every 3 steps, a checkpoint between two of them."""
    run(tmp_path / "whole", 1, 1, {"log_every": 3}, every_steps=4, keep_last=9)
    run(tmp_path / "on", 1, 1, {"log_every": 3}, resume=checkpoint(tmp_path / "whole", 4))
    steps = {name: [record["step"] for record in records(tmp_path / name)] for name in ("whole", "on")}
    assert steps == {"whole": [3, 6, 9, 10], "on": [6, 9, 10]}
    assert [record["step"] for record in records(tmp_path / "on", "validation")] == [8, 10, 10]


@pytest.mark.parametrize(("fault", "message"), [("stale folder", "is another checkpoint here"), ("unreadable index", "the disk is gone")])
def test_what_one_rank_alone_finds_wrong_ends_all_with_that_cause(whole: Path, tmp_path: Path, fault: str, message: str) -> None:
    assert f"{message}" in (found := run(tmp_path, 2, 2, {"fault": fault}, resume=checkpoint(whole, 4))) and "(rank 1)" in found


def test_checkpoints_that_were_asked_for_outlive_a_run_that_asks_for_none(tmp_path: Path) -> None:
    run(tmp_path, 1, 1, {"max_steps": 4}, every_steps=4)
    run(tmp_path, 1, 1, {"max_steps": 6}, resume="latest")
    assert list(StepFolders(tmp_path / "checkpoints").steps()) == [4]


def test_the_best_is_kept(tmp_path: Path) -> None:
    settings = {"optimizer": OptimizerConfig(lr=0.2), "schedule": ScheduleConfig(), "validation": ValidationConfig(every_steps=3)}
    run(tmp_path, 1, 1, settings, every_steps=2, keep_last=1, keep_best=True)
    losses = {record["step"]: record["loss"] for record in records(tmp_path, "validation")}
    assert sorted(losses) == [2, 3, 4, 6, 8, 9, 10]
    saved = {step: losses[step] for step in (2, 4, 6, 8, 10)}
    best = (tmp_path / "checkpoints" / "best").read_text().strip()
    assert best == f"step-{min(saved, key=lambda step: saved[step]):08d}"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert kept == sorted({best, "step-00000010"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_an_epoch(ranks: int) -> None:
    """case B47: stopped in the middle of the second epoch; with another number of ranks after it."""

    def loader(rank: int, of: int) -> StepLoader:
        samples = [Sample([number, number], [-100, number]) for number in range(20)]
        return StepLoader(samples, global_batch_size=6, micro_batch_size=1, dp_rank=rank, dp_size=of, seed=3)

    def ids(loader: StepLoader, steps: int) -> list[list[int]]:
        taken = []
        while len(taken) < steps:
            for micro_batches in loader:
                taken.append([int(batch.labels[0, 1]) for batch in micro_batches if int(batch.labels[0, -1]) >= 0])
                if len(taken) == steps:
                    break
        return taken

    whole = ids(loader(0, 1), 12)
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:8])) == list(range(20)) and whole[:4] != whole[4:8]
    first = loader(0, 1)
    ids(first, 6)
    state = json.loads(json.dumps(first.state_dict()))
    parts = []
    for rank in range(ranks):
        resumed = loader(rank, ranks)
        resumed.load_state_dict(state)
        parts.append(ids(resumed, 6))
    together = [sorted(chain(*(part[step] for part in parts))) for step in range(6)]
    assert together == [sorted(step) for step in whole[6:]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"items": 30}, "data.tasks: "),
        ({"optimizer": OptimizerConfig(name="sgd", lr=0.1)}, "optimizer.name: adamw in the checkpoint, sgd now"),
        ({"global_batch_size": 4}, "train.global_batch_size: 8 in the checkpoint, 4 now"),
        ({"model": {"num_experts": 2}}, "num_experts: 4 in the checkpoint, 2 now"),
    ],
)
def test_another_run_is_refused_naming_the_keys(whole: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    assert message in run(tmp_path, 2, 2, settings, resume=checkpoint(whole, 4))


def test_what_may_change_is_told(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(whole, 4)
    options = {"optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.1), "items": 20, "model": {"attention_dropout": 0.1}}
    config = tiny_config(tmp_path, checkpoint=CheckpointConfig(resume=folder), router=RouterConfig(bias_update_rate=0.01), **options)
    config.train.max_steps = 6
    finetune(config)
    told = capfd.readouterr().out
    assert "optimizer.lr: 0.002 in the checkpoint, 0.001 now" in told and "train.max_steps: 10 in the checkpoint, 6 now" in told
    assert "random states are new" in told and "model.path" not in told
    assert [record["step"] for record in records(tmp_path)] == [5, 6]


def test_checkpoints_are_not_written_over_unasked(whole: Path, tmp_path: Path) -> None:
    message = run(whole, 2, 2)
    assert "holds checkpoints of an earlier run, the latest of step 10" in message and "checkpoint.resume=latest" in message
    assert "holds later ones (10)" in run(whole, 2, 2, resume=checkpoint(whole, 4))
    assert "holds no complete checkpoint" in run(tmp_path, 2, 2, resume="latest")
    assert "is not a complete checkpoint" in run(tmp_path, 2, 2, resume=str(tmp_path / "nowhere"))
    assert run(tmp_path / "new", 1, 1, {"max_steps": 1}, resume="auto")["steps"] == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "progress": {"step": -1}}'])
def test_a_damaged_state_file_is_named(whole: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "state.json").write_text(text)
    message = run(tmp_path / "run", 1, 1, resume=str(folder))
    assert "state.json" in message and ("is damaged" in message or "has the format 99" in message)


def test_a_validation_loss_that_is_no_number_does_not_stop_a_run_from_going_on(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000004"
    shutil.copytree(checkpoint(whole, 4), folder)
    state = json.loads((folder / "state.json").read_text())
    state["progress"]["validation_loss"] = float("nan")
    (folder / "state.json").write_text(json.dumps(state))
    assert run(tmp_path / "on", 2, 2, resume=str(folder))["steps"] == STEPS
