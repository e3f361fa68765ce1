"""The loop in one process: partial steps, steps without labels, auxiliary losses, errors, and what a run leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_moe.cli.entry import run_finetune_rank
from nemo_moe.compose import load_recipe, to_plain, to_yaml
from nemo_moe.config import (
    OptimizerConfig,
    Precision,
    RouterConfig,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
    TaskConfig,
    ValidationConfig,
    WandbMode,
)
from nemo_moe.resolve import resolve
from nemo_moe.train.assemble import Run, assemble, warnings_of
from nemo_moe.train.finetune import finetune
from nemo_moe.train.run_folder import RunFolder
from nemo_moe.train.runtime import StartError, agreed, process_group
from nemo_moe.train.step import TrainingStopped, train_step
from tiny_run import records, tiny_config
from wandb_file import read_wandb

CPU = torch.device("cpu")


@pytest.fixture
def one_rank() -> Iterator[None]:
    with process_group("gloo", 1.0, CPU):
        yield


def assembled(config: RunConfig) -> Run:
    return assemble(config, resolve(config, 1))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor().clone() for name, parameter in run.model.named_parameters()}


def step_of(run: Run, micro_batches: Any = None, step: int = 1) -> Any:
    micro_batches = next(iter(run.loader)) if micro_batches is None else micro_batches
    return train_step(run.model, run.optimizer, micro_batches, run.meshes, run.coefficients, run.config.train.max_grad_norm, step)


def test_a_run_leaves_a_config_logs_and_a_model_that_transformers_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path / "run", validation=ValidationConfig(every_steps=2, exact_match=True, show_samples=2))
    result = finetune(config)
    assert not dist.is_initialized()
    assert load_recipe(str(tmp_path / "run" / "config.yaml")) == config
    train, validation = records(tmp_path / "run"), records(tmp_path / "run", "validation")
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5]
    assert [(record["step"], "loss" in record) for record in validation] == [(0, False), (2, True), (4, True), (5, True), (5, False)]
    assert {"grad_norm", "lr", "tokens_per_second", "tokens_per_second_per_gpu", "label_tokens", "peak_memory_gib"} <= train[0].keys()
    assert {"moe/imbalance", "moe/layer_0/load", "moe/layer_1/imbalance"} <= train[0].keys()
    assert result["steps"] == 5 and result["loss"] == train[-1]["loss"] and result["validation_loss"] == validation[3]["loss"]
    assert train[-1]["loss"] < train[0]["loss"]

    out = capsys.readouterr().out
    assert "before training" in out and "most frequent answer" in out and "spell_backward: " in out
    assert out.count("dispatcher: all_to_all") == 1 and "dispatcher: local permutation" in out, "the config once, and what it comes to"
    assert "tokenizer: trained from the training items, " in out and "warning:" not in out
    command = next(line for line in out.splitlines() if "from transformers import" in line)
    assert f'folder = "{tmp_path / "run" / "model"}"' in command and command.count("'") == 2
    assert shlex.split(command)[:2] == [sys.executable, "-c"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0 and model.config.vocab_size == len(tokenizer)


def test_a_saved_model_is_trained_further_with_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by a path below the home folder, whose generation settings go along."""
    monkeypatch.setenv("HOME", str(tmp_path))
    first = finetune(tiny_config(tmp_path / "one", items=60))
    (tmp_path / "one" / "model" / "generation_config.json").write_text('{"temperature": 0.5}')
    again = tiny_config(tmp_path / "two", model_path="~/one/model", items=40, max_steps=1)
    finetune(again)
    assert (tmp_path / "two" / "model" / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert "tokenizer: the one in ~/one/model, " in capsys.readouterr().out
    continued = records(tmp_path / "two")[0]["loss"]
    assert continued < records(tmp_path / "one")[0]["loss"] * 0.9 and continued < 1.3 * float(first["loss"])
    vocabularies = [AutoTokenizer.from_pretrained(tmp_path / name / "model").get_vocab() for name in ("one", "two")]
    assert vocabularies[0] == vocabularies[1]


def test_a_model_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """A tokenizer trained anew would number its tokens in another way than the embeddings do."""
    finetune(tiny_config(tmp_path / "one", max_steps=1))
    for file in (tmp_path / "one" / "model").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartError, match="model.path: .*model holds no tokenizer .*copy the tokenizer's files"):
        finetune(tiny_config(tmp_path / "two", model_path=str(tmp_path / "one" / "model"), max_steps=1))


def test_the_tracker_and_the_run_folder_get_the_same_resolved_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = tiny_config(tmp_path, max_steps=1, wandb_mode=WandbMode.offline)
    finetune(config)
    written = json.loads((tmp_path / "resolved.json").read_text())
    assert written == {**to_plain(config), "resolved": dataclasses.asdict(resolve(config, 1))}
    assert any(line.startswith("dispatcher: local permutation (ep_size is 1") for line in written["resolved"]["lines"])
    [run] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert {key: read_wandb(run)[1][key] for key in written} == written


def test_a_run_in_the_folder_of_another_says_what_it_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for runs in range(2):
        finetune(tiny_config(tmp_path / "run", max_steps=1))
        assert capsys.readouterr().out.count(f"warning: {tmp_path / 'run'} holds an earlier run") == runs


def test_a_model_that_cannot_be_saved_is_one_message_after_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path / "run", max_steps=1, validation=ValidationConfig(exact_match=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").write_text("in the way")
    (tmp_path / "tiny.yaml").write_text(to_yaml(config))
    assert run_finetune_rank([str(tmp_path / "tiny.yaml")]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"finetune: error: saving to {tmp_path / 'run' / 'model'} failed: ") and len(err.splitlines()) == 1
    assert "  after training  " in out and "run folder:" not in out


def test_ten_batches_at_accumulation_four_are_three_steps(tmp_path: Path) -> None:
    """case B52: the last step is scaled for the 2 batches it has, and the schedule ends with it."""
    schedule = ScheduleConfig(name=ScheduleName.linear, min_lr_ratio=0.5)
    config = tiny_config(tmp_path, items=10, schedule=schedule, max_steps=None, num_epochs=1, global_batch_size=4, micro_batch_size=1)
    assert finetune(config)["steps"] == 3
    train = records(tmp_path)
    assert [record["lr"] for record in train] == pytest.approx([0.5, 0.375, 0.25])
    assert train[2]["epoch"] == 1.0
    assert train[2]["label_tokens"] < train[0]["label_tokens"] * 0.75
    assert train[2]["loss"] == pytest.approx(train[1]["loss"], rel=0.35), "a sum over 2 of 4 batches would be half of it"


def test_a_partial_step_has_the_gradient_of_its_own_batches(tmp_path: Path, one_rank: None) -> None:
    """case B52: 2 micro-batches of 1 give the gradient of one of 2; so nothing is divided by the full accumulation."""
    config = tiny_config(tmp_path, items=10, global_batch_size=4, micro_batch_size=1, max_grad_norm=None)
    run = assembled(config)
    last = run.loader.micro_batches(0, 2)
    assert len(last) == 2
    norm = step_of(run, last).grad_norm
    config.train.micro_batch_size = 4
    whole = assembled(config)
    assert step_of(whole, whole.loader.micro_batches(0, 2)).grad_norm == pytest.approx(norm, rel=1e-5)
    for name, value in weights(run).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=0, atol=1e-6)


def test_a_step_without_any_label_moves_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """case B53: max_length cuts most answers; no NaN, a warning with the count, and the weights stay, decay included."""
    optimizer = OptimizerConfig(lr=0.1, weight_decay=0.5)
    router = RouterConfig(aux_loss_coef=0.1, bias_update_rate=0.1)
    # Words of three letters keep one token of their answer, longer ones none.
    config = tiny_config(tmp_path, max_length=6, optimizer=optimizer, router=router, global_batch_size=1, micro_batch_size=1, max_steps=12)
    result = finetune(config)
    losses = [record["loss"] for record in records(tmp_path)]
    assert 0 < result["steps_without_labels"] == losses.count(0.0) < 12 and all(map(math.isfinite, losses))
    out = capsys.readouterr().out
    assert " of 40 samples have no answer token left to learn" in out and out.count("has no label token on any rank") == 1
    with process_group("gloo", 1.0, CPU):
        run = assembled(config)
        before = weights(run)
        step_of(run, run.loader.micro_batches(0, losses.index(0.0)))
        assert all(torch.equal(before[name], value) for name, value in weights(run).items())


def test_a_run_that_could_learn_nothing_is_refused_with_the_count(tmp_path: Path) -> None:
    """case B53 for all samples: as a warning, this would be a run that ends well and has trained nothing."""
    with pytest.raises(
        StartError, match="none of the 40 training samples has an answer token left to learn.* data.max_length is 3: raise it"
    ):
        finetune(tiny_config(tmp_path, max_length=3))


def test_samples_longer_than_the_model_was_made_for_are_warned_about(tmp_path: Path, one_rank: None) -> None:
    lines = warnings_of(assembled(tiny_config(tmp_path, model={"max_position_embeddings": 4})))
    assert any("the longest sample has 13 tokens, but max_position_embeddings of the model's config is 4" in line for line in lines)
    assert warnings_of(assembled(tiny_config(tmp_path))) == []


@pytest.mark.parametrize(
    ("file", "content", "hint"),
    [
        ("tokenizer.json", "{}", "transformers cannot read the tokenizer in "),
        ("tokenizer_config.json", "[]", "transformers cannot read the tokenizer in "),
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}', "names no end token; set eos_token"),
        ("chat_template.jinja", "{% generation %}{% endgeneration %}{% if %}", "chat template cannot render chats of the roles user"),
    ],
)
def test_a_model_folder_with_a_broken_tokenizer_is_one_message(file: str, content: str, hint: str, tmp_path: Path) -> None:
    finetune(tiny_config(tmp_path / "one", max_steps=1))
    folder = tmp_path / "one" / "model"
    assert (folder / file).exists()
    (folder / file).write_text(content)
    with pytest.raises(StartError) as caught:
        finetune(tiny_config(tmp_path / "two", model_path=str(folder), max_steps=1))
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_named_as_a_cause(tmp_path: Path, one_rank: None) -> None:
    run = assembled(tiny_config(tmp_path))
    with torch.no_grad():
        next(run.model.parameters()).fill_(math.nan)
    with pytest.raises(TrainingStopped, match=r"in the first step also weights of the model's folder \(model.path\) that are not finite"):
        step_of(run)


def test_an_auxiliary_coefficient_alone_switches_the_loss_on(tmp_path: Path) -> None:
    """case B25: it is logged, and it changes what the router learns."""
    finetune(tiny_config(tmp_path / "off", max_steps=2))
    finetune(tiny_config(tmp_path / "recipe", max_steps=2, router=RouterConfig(aux_loss_coef=0.5, z_loss_coef=0.25)))
    finetune(tiny_config(tmp_path / "model", max_steps=2, model={"router_aux_loss_coef": 0.5}))
    off, recipe, model = (records(tmp_path / name) for name in ("off", "recipe", "model"))
    assert "load_balance_loss" not in off[0] and "router_z_loss" not in off[0]
    assert recipe[0]["load_balance_loss"] >= 1.9 and recipe[0]["router_z_loss"] > 0  # an even load gives K = 2
    assert model[0]["load_balance_loss"] == pytest.approx(recipe[0]["load_balance_loss"])
    assert off[0]["loss"] == recipe[0]["loss"], "the logged loss is the main one"
    assert len({run[1]["loss"] for run in (off, recipe, model)}) == 3


def test_the_expert_bias_moves_once_a_step_and_stays_where_its_rate_is_0(
    tmp_path: Path, one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, router=RouterConfig(bias_update_rate=0.125), max_steps=3, global_batch_size=8, micro_batch_size=2)
    finetune(config)
    from safetensors.torch import load_file

    biases = load_file(tmp_path / "model" / "extra_tensors.safetensors")
    assert len(biases) == 2
    for bias in biases.values():
        assert set((bias / 0.125).tolist()) <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0} and bias.abs().max() > 0
    capsys.readouterr()
    finetune(tiny_config(tmp_path / "on", model_path=str(tmp_path / "model"), max_steps=1))
    assert "expert biases: from the folder, used as they are" in capsys.readouterr().out
    kept = load_file(tmp_path / "on" / "model" / "extra_tensors.safetensors")
    assert all(torch.equal(kept[name], bias) for name, bias in biases.items())


@pytest.mark.parametrize(("norm_topk_prob", "aux", "expected"), [(True, 0.0, "nothing"), (True, 0.1, "auxiliary"), (False, 0.0, None)])
def test_a_router_without_a_gradient_is_warned_about(
    tmp_path: Path, one_rank: None, norm_topk_prob: bool, aux: float, expected: str | None
) -> None:
    """case B08: K = 1 with normalised weights."""
    model = {"num_experts_per_tok": 1, "norm_topk_prob": norm_topk_prob}
    run = assembled(tiny_config(tmp_path, model=model, router=RouterConfig(aux_loss_coef=aux)))
    found = [line for line in warnings_of(run) if "norm_topk_prob" in line]
    assert [expected in line for line in found] == ([True] if expected else [])
    step_of(run)
    gradient = sum(float(layer.gate.weight.grad.full_tensor().abs().sum()) for layer in run.model.moe_layers())
    assert (gradient > 1e-6) == (expected != "nothing")


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path, one_rank: None, poison: float) -> None:
    run = assembled(tiny_config(tmp_path))
    with torch.no_grad():
        run.model.model.norm.weight.to_local()[0] = poison
    before = weights(run)
    with pytest.raises(TrainingStopped, match=r"^step 7: the loss is"):
        step_of(run, step=7)
    for name, value in weights(run).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_bf16_computes_in_bf16_and_keeps_fp32_weights_and_states(tmp_path: Path, one_rank: None) -> None:
    """case B42, on the CPU."""
    config = tiny_config(tmp_path, optimizer=OptimizerConfig(lr=1e-3))
    config.precision = Precision.bf16
    run = assembled(config)
    batch = next(iter(run.loader))[0]
    assert run.model(batch.input_ids, batch.token_mask).logits.dtype is torch.bfloat16
    first = step_of(run, [batch]).loss
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert {state["exp_avg"].dtype for state in run.optimizer.state.values()} == {torch.float32}
    assert len(run.optimizer.state) == len(list(run.model.parameters()))
    last = [step_of(run, [batch]).loss for _ in range(10)][-1]
    assert math.isfinite(last) and last < first


def test_a_misspelt_task_is_found_before_there_is_a_process_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path / "run", task=TaskConfig(name="spell_backwards", train_size=10))
    (tmp_path / "tiny.yaml").write_text(to_yaml(config))
    assert run_finetune_rank([str(tmp_path / "tiny.yaml")]) == 2
    assert "unknown task 'spell_backwards'; did you mean 'spell_backward'?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_found_out_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="output_dir: cannot write in .*file/run"):
        finetune(tiny_config(tmp_path / "file" / "run"))
    assert not dist.is_initialized()


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="vocab_size is 8, but the tokenizer has"):
        finetune(tiny_config(tmp_path, model={"vocab_size": 8}))


def test_a_larger_vocabulary_is_kept(tmp_path: Path) -> None:
    """case B57: an embedding with more rows than the tokenizer has entries."""
    finetune(tiny_config(tmp_path, model={"vocab_size": 160}, max_steps=1))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").get_input_embeddings().weight.shape[0] == 160


def test_a_mistake_in_the_code_is_no_start_error(one_rank: None) -> None:
    def mistake() -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        agreed(mistake)


def test_a_start_that_fails_leaves_an_earlier_run_as_it_was(tmp_path: Path) -> None:
    finetune(tiny_config(tmp_path, max_steps=1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix}
    with pytest.raises(StartError, match="vocab_size"):
        finetune(tiny_config(tmp_path, model={"vocab_size": 8}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix} == before and "train.jsonl" in before


def test_a_recipe_in_output_dir_is_not_written_over(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yaml"
    recipe.write_text("# my own recipe\n" + to_yaml(tiny_config(tmp_path, max_steps=1)))
    with pytest.raises(StartError, match=r"config\.yaml was not written by a run"):
        finetune(load_recipe(str(recipe)))
    assert recipe.read_text().startswith("# my own recipe")


def test_a_run_can_be_started_again_from_its_own_config(tmp_path: Path) -> None:
    finetune(tiny_config(tmp_path, max_steps=1))
    assert finetune(load_recipe(str(tmp_path / "config.yaml")))["steps"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_records_that_cannot_be_written_do_not_cost_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").symlink_to("/dev/full")
    assert finetune(tiny_config(tmp_path, max_steps=2))["steps"] == 2
    assert capfd.readouterr().out.count("the run goes on without these records") == 1
    assert (tmp_path / "model" / "config.json").is_file() and records(tmp_path, "validation")


def test_two_runs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=1)
    running = RunFolder(config)
    running.check()
    with pytest.raises(StartError, match="another run is writing to"):
        finetune(config)
    running.release()
    assert finetune(config)["steps"] == 1


def test_a_config_that_changes_a_folder_s_sizes_is_named_where_the_weights_do_not_fit(tmp_path: Path) -> None:
    finetune(tiny_config(tmp_path / "one", max_steps=1))
    config = tiny_config(tmp_path / "two", model_path=str(tmp_path / "one" / "model"), max_steps=1)
    config.model.config = {"moe_intermediate_size": 32, "hidden_size": 32}
    with pytest.raises(StartError, match=r"model.config changes what the folder's config.json says \(moe_intermediate_size 16 -> 32\)"):
        finetune(config)
