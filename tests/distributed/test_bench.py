"""The benchmarks on two ranks: what they print, and that a pair which computes something else is refused, not timed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_moe.bench.main import main
from nemo_moe.bench.memory import peak_increase
from nemo_moe.bench.timing import Protocol, time_contenders
from nemo_moe.compose import load_recipe
from nemo_moe.moe.dispatch.all_to_all import _AllToAllManager
from nemo_moe.moe.types import Dispatched, DispatchHandle
from nemo_moe.registry import DISPATCHERS, DispatcherSpec
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.assemble import data_and_model_config

CPU = torch.device("cpu")
QUICK = ["--windows", "2", "--window-seconds", "0.01", "--device", "cpu"]
LAYER = ["layer", "--tokens", "12", "--layers", "2", *QUICK]
RECIPE = """\
model:
  config: {hidden_size: 32, moe_intermediate_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
           num_key_value_heads: 1, num_experts: 4, num_experts_per_tok: 2, initializer_range: 0.2}
data: {tasks: [{name: spell_backward, train_size: 60, params: {min_word_len: 3, max_word_len: 5}}], held_out_per_task: 6}
distributed: {ep_size: 2}
train: {global_batch_size: 8, micro_batch_size: 2}
precision: fp32
"""


class _Shifted(_AllToAllManager):
    """Sends every token to the experts after its own."""

    def dispatch(self, hidden_states: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        return super().dispatch(hidden_states, (topk_idx + 1) % self.num_experts, topk_weights)


class _WrongBackward(_AllToAllManager):
    """Forgets in backward that tokens have more than half a gradient; its forward is right."""

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden_states, weights = super().combine(rows, handle, row_weights)
        return hidden_states if weights is None else hidden_states / 2, weights


class _WrongWeightGradient(_AllToAllManager):
    """Brings the gradients of the routing weights home with the wrong sign."""

    def combine(self, rows: Tensor, handle: DispatchHandle, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden_states, weights = super().combine(rows, handle, row_weights)
        return hidden_states, None if weights is None else -weights


TOYS = {"shifted": _Shifted, "wrong_backward": _WrongBackward, "wrong_weight_gradient": _WrongWeightGradient}


@contextlib.contextmanager
def _toys() -> Iterator[None]:
    for name, manager in TOYS.items():
        DISPATCHERS.register(name, DispatcherSpec(target=f"{__name__}:{manager.__name__}", summary="a wrong toy"))
    try:
        yield
    finally:
        for name in TOYS:
            DISPATCHERS.unregister(name)


def _run(argv: list[str], toys: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _toys() if toys else contextlib.nullcontext():
        return main(argv), out.getvalue(), err.getvalue()


def _rows(text: str) -> dict[str, list[float]]:
    """name -> median, min, max, ratio, of the table's rows."""
    found = re.findall(r"^(\w[\w ]* \+ \w+(?: \*)?) {2,}([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) ", text, re.MULTILINE)
    return {name: [float(figure) for figure in figures] for name, *figures in found}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


def test_the_layer_benchmark_times_every_pair_that_runs_here() -> None:
    (code, out, err), (other, silence, _) = run_distributed(_run, 2, LAYER)
    assert (code, other, err, silence) == (0, 0, "", "")
    rows = _rows(out)
    assert set(rows) == {"all_to_all + loop", "all_to_all + grouped_mm", "all_reduce + loop *", "all_reduce + grouped_mm *"}
    for median, smallest, largest, ratio in rows.values():
        assert 0 < smallest <= median <= largest
        assert ratio == pytest.approx(median / rows["all_to_all + loop"][0], abs=0.02, rel=0.02)
    differences = [float(figure) for figure in re.findall(r" (\d\.\de[-+]\d+) ", out)]
    assert len(differences) == 4 and differences[0] == 0.0 and max(differences) < 1e-5
    assert "2 ranks, gloo" in out and "* every rank holds the tokens of all ranks" in out and "median of 2 windows of about 0.01 s" in out
    assert re.search(r"^all_to_all \+ loop .*dispatch [1-9]\d?%, combine [1-9]\d?%.*wire [1-9]\d?%", out, re.MULTILINE)


def test_inference_runs_forward_alone() -> None:
    code, out, _ = run_distributed(_run, 2, [*LAYER, "--inference", "--experts", "loop", "--dispatchers", "all_to_all"])[0]
    assert code == 0 and list(_rows(out)) == ["all_to_all + loop"] and "tokens a rank, forward;" in out


def test_on_one_rank_the_local_permutation_is_timed_once_for_each_experts_backend() -> None:
    code, out, _ = run_distributed(_run, 1, [*LAYER, "--dispatchers", "all_to_all,all_reduce"])[0]
    assert code == 0 and set(_rows(out)) == {"local permutation + loop", "local permutation + grouped_mm"}
    assert "no token leaves it, a local permutation runs whatever the dispatcher" in out


@pytest.mark.parametrize(
    ("toy", "wrong"),
    [
        ("shifted", "output by"),
        ("wrong_backward", "gradient of hidden_states by"),
        ("wrong_weight_gradient", "gradient of topk_weights by"),
    ],
)
def test_a_pair_that_computes_something_else_is_not_timed(toy: str, wrong: str) -> None:
    (code, out, err), (other, silence, nothing) = run_distributed(_run, 2, [*LAYER, "--dispatchers", toy, "--experts", "loop"], True)
    assert (code, other, silence, nothing) == (1, 1, "", "")
    assert f"{toy} + loop differs from all_to_all + loop" in err and wrong in err
    assert _rows(out) == {}


def test_the_step_benchmark_takes_the_vocabulary_and_the_batch_of_finetune(recipe: str) -> None:
    config = load_recipe(recipe)
    vocabulary = data_and_model_config(config)[1].vocab_size
    assert vocabulary < 1000, "the family's default is not what a recipe without a vocabulary gets"
    (code, out, err), (_, silence, _) = run_distributed(_run, 2, ["step", recipe, "--sequence-length", "6", *QUICK])
    assert (code, err, silence) == (0, "", "")
    assert set(_rows(out)) == {"all_to_all + loop", "all_to_all + grouped_mm"}
    assert f"8 sequences of 6 tokens, vocabulary {vocabulary}," in out
    for line in ("device: cpu", "4 experts over ep 2, 2 a rank", "dispatcher: all_to_all", "2 ranks x 2 micro-batches x 2 sequences"):
        assert line in out, out
    assert "not timed: all_reduce + loop, all_reduce + grouped_mm: " in out
    tokens = re.search(r"all_to_all \+ loop: ([\d,]+) tokens/s", out)
    assert tokens is not None
    assert float(tokens[1].replace(",", "")) == pytest.approx(8 * 6 * 1000 / _rows(out)["all_to_all + loop"][0], rel=0.02)


def test_a_step_without_expert_parallelism_says_that_a_local_permutation_runs(recipe: str) -> None:
    argv = ["step", recipe, "--sequence-length", "6", *QUICK, "--experts", "loop", "distributed.ep_size=1"]
    code, out, _ = run_distributed(_run, 2, argv)[0]
    assert code == 0 and list(_rows(out)) == ["local permutation + loop"]


@pytest.mark.parametrize("toy", ["shifted", "wrong_backward"])
def test_a_step_with_a_wrong_pair_is_not_timed(recipe: str, toy: str) -> None:
    argv = ["step", recipe, "--sequence-length", "6", *QUICK, "--experts", "loop", "--dispatchers", toy]
    (code, out, err), (other, _, nothing) = run_distributed(_run, 2, argv, True)
    assert (code, other, nothing) == (1, 1, "") and _rows(out) == {}
    assert f"{toy} + loop: {'loss' if toy == 'shifted' else 'grad_norm'} is " in err


def test_a_wrong_name_is_one_message_of_the_first_rank() -> None:
    (code, out, err), (other, _, silence) = run_distributed(_run, 2, [*LAYER, "--dispatchers", "all_to_al"])
    assert (code, other, out, silence) == (2, 2, "", "")
    assert err.count("error:") == 1 and "did you mean 'all_to_all'?" in err


def _times() -> dict[str, Any]:
    order: list[str] = []

    def work(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    late = 0.02 if dist.get_rank() == 1 else 0.0
    contenders = {"even": lambda: work("even", 0.004), "late": lambda: work("late", late)}
    timings = time_contenders(contenders, CPU, Protocol(windows=3, window_seconds=1e-4))
    return {"order": order, **{name: dataclasses.asdict(timing) for name, timing in timings.items()}}


def test_contenders_take_turns_and_the_slowest_rank_counts() -> None:
    for found in run_distributed(_times, 2):
        assert found["order"][-6:] == ["even", "late"] * 3
        assert found["late"]["smallest"] >= 20 > found["even"]["smallest"] >= 4


def _peaks() -> list[float | None]:
    """Of 64 MiB on rank 1 alone, and of nearly nothing afterwards."""
    size = 2**24 if dist.get_rank() == 1 else 1
    return [peak_increase(lambda: torch.ones(size).sum().item(), CPU)[1], peak_increase(lambda: torch.ones(8).sum().item(), CPU)[1]]


def test_the_peak_is_what_one_contender_adds_on_the_rank_with_most() -> None:
    results = run_distributed(_peaks, 2)
    assert results[0] == results[1]
    large, small = results[0]
    if large is None:
        pytest.skip("this machine does not let a process reset its peak of resident memory")
    assert 60 < large < 100 and small is not None and small < 16


LOADING = ["loading", "--size-gb", "0.02", "--shard-gb", "0.005", "--repeats", "1", "--device", "cpu"]


def test_the_loading_benchmark_tells_memory_and_time_of_every_rank(tmp_path: Path) -> None:
    (code, out, err), (other, silence, _) = run_distributed(_run, 2, [*LOADING, "--folder", str(tmp_path)])
    assert (code, other, err, silence) == (0, 0, "", "")
    ranks = [[float(figure) for figure in line.split()[2:]] for line in re.findall(r"^rank \d .*$", out, re.MULTILINE)]
    assert len(ranks) == 2
    for held, read, anon, ratio, pages, *_ in ranks:
        assert held == pytest.approx(2 * read, rel=0.01), "fp32 from bf16"
        assert anon < held + 4, "its own share alone"
        assert ratio == pytest.approx(anon / held, abs=0.01) and pages < 8, "of one mapped file at a time"
    assert re.search(r"^warm: load [\d.]+ s .*plain read [\d.]+ s .*new memory", out, re.MULTILINE)
    assert re.search(r"loading: 0\.0[12]\d? GB of bf16 in \d+ files", out)
    assert list(tmp_path.iterdir()) == []


def test_the_loading_benchmark_without_room_is_one_message(tmp_path: Path) -> None:
    (code, _, err), (other, _, silence) = run_distributed(_run, 2, [*LOADING, "--folder", str(tmp_path / "nowhere")])
    assert (code, other, silence) == (2, 2, "") and err.count("error:") == 1 and "nowhere" in err
