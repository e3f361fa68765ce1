"""Which pairs are timed, and what the command says of names, overrides and devices before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_moe.bench.pairs import choose_pairs
from nemo_moe.bench.step import load_step_recipe
from nemo_moe.cli.main import main
from nemo_moe.config import BackendConfig, Device
from nemo_moe.registry import DISPATCHERS, EXPERTS, DispatcherSpec

RECIPE = """\
model:
  config: {hidden_size: 32, moe_intermediate_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, num_experts: 4, num_experts_per_tok: 2}
data: {tasks: [{name: spell_backward, train_size: 100, params: {min_word_len: 3, max_word_len: 5}}]}
distributed: {ep_size: 2}
train: {global_batch_size: 4, micro_batch_size: 2}
precision: fp32
device: cpu
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


@pytest.fixture
def with_sms() -> Iterator[None]:
    """A dispatcher with both knobs; no code of it is ever loaded here."""
    spec = DispatcherSpec(target="nowhere:Nothing", summary="a toy", num_sms_multiple_of=2, async_dispatch=True)
    DISPATCHERS.register("with_sms", spec)
    yield
    DISPATCHERS.unregister("with_sms")


def legal(backend: BackendConfig) -> None:
    """Every pair of what runs without a GPU."""
    if "cpu" not in EXPERTS.get(backend.experts).devices:
        raise ImportError("no CUDA device here")


def refuse_grouped_mm(backend: BackendConfig) -> None:
    legal(backend)
    if backend.experts == "grouped_mm":
        raise ImportError("no grouped_mm here")


def test_all_that_can_run_is_timed_and_the_rest_is_named_with_the_reason() -> None:
    pairs = choose_pairs(["all_to_all", "all_reduce"], None, 2, refuse_grouped_mm)
    assert list(pairs.backends) == ["all_to_all + loop", "all_reduce + loop"]
    assert pairs.left_out == [
        "not timed: all_to_all + grouped_mm, all_reduce + grouped_mm: no grouped_mm here",
        "not timed: all_to_all + gmm, all_to_all + te, all_reduce + gmm, all_reduce + te: no CUDA device here",
    ]


@pytest.mark.parametrize("dispatchers", [None, ["all_to_all"]])
def test_what_was_named_and_can_not_run_is_refused(dispatchers: list[str] | None) -> None:
    with pytest.raises((ValueError, ImportError), match="no grouped_mm here"):
        choose_pairs(dispatchers, ["loop", "grouped_mm"], 2, refuse_grouped_mm)


def test_on_one_rank_each_experts_backend_is_timed_once_under_the_name_of_what_runs() -> None:
    pairs = choose_pairs(["all_reduce", "all_to_all"], None, 1, legal)
    assert list(pairs.backends) == ["local permutation + loop", "local permutation + grouped_mm"]


@pytest.mark.usefixtures("with_sms")
def test_the_recipes_other_keys_stay_where_the_dispatcher_has_them() -> None:
    base = BackendConfig(dispatcher="with_sms", dispatcher_num_sms=20, dispatcher_async_dispatch=True)
    pairs = choose_pairs(["with_sms", "all_to_all"], ["loop"], 2, legal, base)
    kept, dropped = pairs.backends["with_sms + loop"], pairs.backends["all_to_all + loop"]
    assert (kept.dispatcher_num_sms, kept.dispatcher_async_dispatch) == (20, True)
    assert (dropped.dispatcher_num_sms, dropped.dispatcher_async_dispatch) == (None, False)
    assert len(pairs.left_out) == 2 and all("is not used for all_to_all" in line for line in pairs.left_out)


def test_the_device_option_goes_into_the_config(recipe: str) -> None:
    assert load_step_recipe(recipe, [], None).device is Device.cpu
    assert load_step_recipe(recipe, [], "cuda").device is Device.cuda
    assert load_step_recipe(recipe, ["device=auto"], None).device is Device.auto


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["layer", "--dispatchers", "all_to_al"], ["did you mean 'all_to_all'?"]),
        (["layer", "--dispatchers", "torch"], ["another framework's name", "'all_to_all'"]),
        (["layer", "--experts", "loop,lop"], ["backend.experts", "'lop'"]),
        (["layer", "--tokens", "8,0"], ["--tokens", "'0'"]),
        (["layer", "--device", "cuda"], ["no CUDA device"]),
        (["layer", "--nproc-per-node", "3"], ["16 experts"]),
        (["layr"], ["'layer', 'step'"]),
        (["step", "RECIPE", "--experts", "lop"], ["backend.experts", "'lop'"]),
        (["step", "RECIPE", "--dispatchers", "all_reduce"], ["share one batch"]),
        (["step", "RECIPE", "--sequence-length", "8", "backend.experts=loop"], ["--experts"]),
        (["step", "RECIPE", "++backend.dispatcher_num_sms=4"], ["backend.dispatcher_num_sms"]),
        (["step", "RECIPE", "backend={experts: loop}"], ["--experts"]),
        (["step", "RECIPE", "device=cpu", "--device", "cpu"], ["give one of the two"]),
        (["step", "RECIPE", "--device", "cuda"], ["no CUDA device"]),
        (["step", "RECIPE", "train.max_step=1"], ["did you mean train.max_steps?"]),
        (["step", "RECIPE", "--nnodes", "1:2", "--dispatchers", "nothing"], ["'nothing'"]),
        (["step", "RECIPE", "model.config.mlp_only_layers=[0]"], ["no experts"]),
    ],
)
def test_what_cannot_run_is_one_message_and_no_rank_starts(
    argv: list[str], parts: list[str], recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("torchrun was started"))
    launch = [] if "--nproc-per-node" in argv or "--nnodes" in argv else ["--nproc-per-node", "2"]
    with pytest.raises(SystemExit) as caught:
        main(["benchmark", *(recipe if part == "RECIPE" else part for part in argv), *launch])
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and err.count("error:") == 1
    for part in parts:
        assert part in err, err
