"""The command line: what it lists, prints and refuses, what it hands to torchrun, and that it becomes torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from nemo_moe import __version__
from nemo_moe.cli.entry import run_finetune_rank
from nemo_moe.cli.launch import (
    FLAG_OPTIONS,
    SHORT_OPTIONS,
    VALUE_OPTIONS,
    add_launch_options,
    is_launch,
    launch,
    torchrun_command,
    total_ranks,
    with_dashes,
)
from nemo_moe.cli.main import main
from nemo_moe.compose import list_recipes, load_recipe

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "nemo_moe.cli.main"]
TINY = """\
model:
  config:
    {hidden_size: 32, moe_intermediate_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
     num_key_value_heads: 1, num_experts: 4, num_experts_per_tok: 2}
data: {tasks: [{name: spell_backward, train_size: 200, params: {min_word_len: 3, max_word_len: 5}}]}
distributed: {ep_size: 2}
train: {max_steps: 1000000, num_epochs: null, global_batch_size: 4, micro_batch_size: 2}
logging: {every_steps: 1, wandb: {mode: disabled}}
precision: fp32
device: cpu
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"{TINY}output_dir: {tmp_path / 'run'}\n", encoding="utf-8")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """stderr of a command that must exit with 2 and print nothing else."""
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(main(argv))
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **changes}


# Lists and help


def test_recipes_lists_what_ships_with_a_line_about_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    for name, summary in list_recipes().items():
        assert any(line.split(maxsplit=1) == [name, summary] for line in out.splitlines())


@pytest.mark.parametrize("argv", [["--help"], ["finetune", "--help"], ["recipes", "--help"], ["benchmark", "--help"]])
def test_every_command_has_a_help_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert "usage: nemo-moe" in capsys.readouterr().out


def test_version_names_torch_and_python_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    out = capsys.readouterr().out
    assert __version__ in out and "torch 2." in out and "python 3." in out


# --print-config


def test_print_config_prints_a_recipe_that_reads_back_equal(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", tiny, "optimizer.lr=3e-4", "--print-config"]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_recipe(str(printed)) == load_recipe(tiny, ["optimizer.lr=3e-4"])


def test_print_config_with_a_number_of_ranks_tells_what_would_run(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--nproc-per-node", "2", "--print-config", tiny]) == 0
    out = capsys.readouterr().out
    assert "# dispatcher: all_to_all (as configured)" in out and "# ranks: 2 = " in out and "\noptimizer:\n" in out


# Refusals: one message, exit code 2, before any rank


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["optimizer.lrr=1"], ["did you mean optimizer.lr?"]),
        (["distributed.ep_size=3", "--nproc-per-node", "2"], ["need 3 ranks", "there are 2"]),
        (["distributed.ep_size=3", "--nproc-per-node", "3"], ["distributed.ep_size (3)", "experts (4)"]),
        (["--nproc-per-node=3"], ["distributed.ep_size (2)", "fsdp_size * tp_size (3 * 1 = 3)"]),
        (["--nproc-per-node", "4", "--nnodes", "2"], ["train.global_batch_size (4)", "(2 * 8 = 16)"]),
        (["device=cuda", "--nproc-per-node", "2"], ["torch sees no CUDA device"]),
        (["model.config.num_expert=4", "--nproc-per-node", "2"], ["did you mean 'num_experts'?"]),
        (["model.config.num_expert=4", "--print-config"], ["did you mean 'num_experts'?"]),
        (
            ["data.tasks.0.name=spell_backwards", "--nproc-per-node", "2"],
            ["unknown task 'spell_backwards'; did you mean 'spell_backward'? List all"],
        ),
        (["data.tasks.0.name=zzzzz", "--print-config"], ["unknown task 'zzzzz'. List all"]),
        (["data.tasks.0.params.min_word=3", "--nproc-per-node", "2"], ["no parameter 'min_word'", "did you mean 'min_word_len'?"]),
        (["data.tasks.0.name=spell_backwards", "--print-config"], ["did you mean 'spell_backward'?"]),
        (["--optimizer.lr=1"], ["without dashes: optimizer.lr=1"]),
        (["--nproc-per-nod", "2"], ["unknown option --nproc-per-nod"]),
        (["--nproc-per-node", "0"], ["1 or more"]),
        (["--nproc-per-node", "two"], ["found 'two'"]),
        (["--nnodes"], ["--nnodes"]),
    ],
)
def test_what_cannot_run_is_refused_with_one_message(
    argv: list[str], parts: list[str], tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    err = refused(capsys, "finetune", tiny, *argv)
    for part in parts:
        assert part in err, err
    assert err.count("error:") == 1


def test_without_arguments_only_the_recipe_is_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the following arguments are required: recipe\n" in refused(capsys, "finetune")


def test_unknown_commands_and_recipes_name_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "fintune", "demo")
    assert "finetune" in err and "recipes" in err
    assert "did you mean 'demo'?" in refused(capsys, "finetune", "dmeo", "--nproc-per-node", "2")


def test_impossible_sizes_are_one_line_from_the_real_command_and_no_rank_starts(tiny: str) -> None:
    argv = [*COMMAND, "finetune", tiny, "--nproc-per-node", "3", "distributed.ep_size=3"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "nemo-moe finetune: error: distributed.ep_size (3) must divide the number of experts (4); legal here: 1, 2, 4"
    ]


@pytest.mark.parametrize(
    ("experts", "ep_size", "ranks", "numbers"), [(6, 4, 4, ("(4)", "(6)")), (8, 3, 3, ("(3)", "(8)")), (8, 8, 4, ("need 8 ranks", "are 4"))]
)
def test_ranks_that_do_not_divide_the_experts_are_refused_before_any_starts_b34(
    experts: int,
    ep_size: int,
    ranks: int,
    numbers: tuple[str, str],
    tiny: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """case B34 from the command's arguments: both numbers, exit code 2, torchrun not even started."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("ranks were started"))
    changes = [f"model.config.num_experts={experts}", f"distributed.ep_size={ep_size}"]
    err = refused(capsys, "finetune", tiny, "--nproc-per-node", str(ranks), *changes)
    assert all(number in err for number in numbers), err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("rank", "local_rank", "start"), [("0", "0", "finetune: error: "), ("8", "0", "[node 1, "), ("9", "1", None), ("3", None, None)]
)
def test_one_rank_of_every_node_says_why_nothing_runs(
    rank: str, local_rank: str | None, start: str | None, tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node without rank 0 too; where nobody says which ranks share a node, rank 0 alone."""
    monkeypatch.setattr("nemo_moe.cli.entry._GRACE_SECONDS", 0.0)
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    for wrong in ("optimizer.lrr=1", "--frobnicate", "distributed.ep_size=32"):
        assert run_finetune_rank([tiny, wrong]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("finetune: error: ") == (start is not None), err
        assert err.startswith(start or "")


# torchrun


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_launch_options(parser)
    return parser.parse_args(with_dashes(argv))


def test_every_option_of_torchrun_is_passed_on_except_those_that_say_what_to_run() -> None:
    ours = {*VALUE_OPTIONS, *FLAG_OPTIONS, *SHORT_OPTIONS.values(), "--nproc-per-node"}
    ours |= {name[:2] + name[2:].replace("-", "_") for name in ours if name.startswith("--")}
    for action in get_args_parser()._actions:
        names = set(action.option_strings) - {"-h", "--help", "-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path"}
        assert names <= ours, f"torchrun has an option that is not passed on: {names - ours}"
        for name in names & {*VALUE_OPTIONS, *FLAG_OPTIONS}:
            assert (action.nargs == 0) == (name in FLAG_OPTIONS), f"{name} takes a value here or there only"


def test_torchrun_gets_its_options_as_written_and_understands_them() -> None:
    given = ["--nnodes", "2", "--node_rank=1", "--rdzv-endpoint", "head:29400", "-t", "3", "--nproc_per_node", "4"]
    command = torchrun_command(parsed(*given), ["finetune", "demo", "seed=1"])
    assert command[:3] == [sys.executable, "-m", "nemo_moe.cli.torchrun"]
    seen = get_args_parser().parse_args(command[3:])
    values = [seen.nnodes, seen.node_rank, seen.rdzv_endpoint, seen.tee, seen.nproc_per_node]
    assert [str(value) for value in values] == ["2", "1", "head:29400", "3", "4"]
    assert seen.module and not seen.standalone
    assert (seen.training_script, seen.training_script_args) == ("nemo_moe.cli.main", ["finetune", "demo", "seed=1"])


def test_ranks_order_sets_alike_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tasks of reasoning-gym iterate over sets of strings; Python would draw another order for every rank."""
    started: list[str | None] = []
    monkeypatch.setattr(os, "execv", lambda *_: started.append(os.environ.get("PYTHONHASHSEED")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    launch(parsed("--nproc-per-node", "2"), ["finetune", "demo"])
    monkeypatch.delenv("PYTHONHASHSEED")
    launch(parsed("--nproc-per-node", "2"), ["finetune", "demo"])
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # so that it is put back
    assert started == ["7", "0"]


def test_torchrun_waits_for_the_ranks_grace_time_and_some_more_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(os, "execv", lambda *_: seen.append(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")))
    for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "0")  # so that it is put back
    launch(parsed("--nproc-per-node", "2"), ["finetune", "demo"], 120.5)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    launch(parsed("--nproc-per-node", "2"), ["benchmark", "layer"])
    launch(parsed("--nproc-per-node", "2"), ["finetune", "demo"], 120.5)
    assert seen == ["0", None, "136"]


def test_one_node_finds_its_own_port_unless_one_is_named() -> None:
    assert "--standalone" in torchrun_command(parsed("--nproc-per-node", "2"), [])
    for named in (["--master-port", "29501"], ["--rdzv-endpoint", "a:1"], ["--nnodes", "2"], ["--nnodes", "1:4"]):
        assert "--standalone" not in torchrun_command(parsed("--nproc-per-node", "2", *named), [])
    assert torchrun_command(parsed("--standalone"), []).count("--standalone") == 1


def test_the_number_of_ranks_is_known_unless_the_nodes_are_a_range() -> None:
    assert total_ranks(parsed("--nproc-per-node", "4")) == 4
    assert total_ranks(parsed("--nproc-per-node", "4", "--nnodes", "2")) == 8
    assert total_ranks(parsed("--nproc-per-node", "4", "--nnodes=2:2")) == 8
    assert total_ranks(parsed("--nproc-per-node", "4", "--nnodes", "1:2")) is None
    assert is_launch(parsed("--nnodes", "2")) and is_launch(parsed("--standalone")) and not is_launch(parsed())


@pytest.fixture
def endless_run(tiny: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The real command on two ranks, training until it is stopped, past its first step."""
    argv = [*COMMAND, "finetune", tiny, "--nproc-per-node", "2"]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment())
        family = [process.pid]
        try:
            deadline = time.monotonic() + 200
            while "step 1/" not in log.read_text():
                assert process.poll() is None, f"it ended before it was stopped:\n{log.read_text()}"
                assert time.monotonic() < deadline, f"no first step:\n{log.read_text()}"
                time.sleep(0.2)
            family += descendants(process.pid)
            yield process
        finally:
            for pid in {*family, *descendants(process.pid)} & set(live_processes()):
                os.kill(pid, signal.SIGKILL)
            process.wait(timeout=60)


def live_processes() -> dict[int, int]:
    """pid -> parent's pid of all processes that are not dead."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    return parents


def descendants(pid: int) -> list[int]:
    parents = live_processes()
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [deeper for child in found for deeper in descendants(child)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc to see that no rank is left")
def test_a_signal_to_the_command_ends_all_ranks(endless_run: subprocess.Popen[str]) -> None:
    arguments = Path(f"/proc/{endless_run.pid}/cmdline").read_text().split("\0")
    assert "nemo_moe.cli.torchrun" in arguments, "the command becomes torchrun, with no process in between"
    ranks = descendants(endless_run.pid)
    assert len(ranks) >= 2
    endless_run.send_signal(signal.SIGTERM)
    assert endless_run.wait(timeout=90) == 0, "a stop with a checkpoint is no failure"
    deadline = time.monotonic() + 10
    while set(ranks) & set(live_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(ranks) & set(live_processes())
