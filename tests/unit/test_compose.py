"""YAML and overrides -> RunConfig: what is accepted, how it is read, and what the message says where it is not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from nemo_moe.compose import ConfigError, list_recipes, load_recipe, recipe_folder, to_plain, to_yaml
from nemo_moe.config import ActivationCheckpointing, Precision, RunConfig
from nemo_moe.schema import FOREIGN_KEYS, key_paths

MINIMAL = """\
model:
  config: {num_experts: 8, hidden_size: 32}
data:
  tasks:
    - {name: chain_sum, train_size: 100, params: {min_terms: 2}}
"""


def write(folder: Path, text: str = "", name: str = "run.yaml", start: str = MINIMAL) -> str:
    """Path of a recipe that holds `start` and `text`."""
    path = folder / name
    path.write_text(start + text, encoding="utf-8")
    return str(path)


def message(recipe: str, *overrides: str) -> str:
    """What loading a recipe that is wrong says."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value)


# What is read, and as what


def test_a_recipe_fills_the_dataclasses_and_leaves_defaults_alone(tmp_path: Path) -> None:
    config = load_recipe(write(tmp_path, "precision: fp32\ntrain: {activation_checkpointing: full, max_steps: 7}\n"))
    assert isinstance(config, RunConfig)
    assert config.precision is Precision.fp32
    assert config.train.activation_checkpointing is ActivationCheckpointing.full
    assert (config.train.max_steps, config.train.micro_batch_size) == (7, 1)
    assert config.data.tasks[0].params == {"min_terms": 2}
    assert config.backend.dispatcher == "all_to_all"


def test_numbers_are_numbers_in_yaml_and_on_the_command_line_b66(tmp_path: Path) -> None:
    """case B66: YAML 1.1 reads 5e-4 as text."""
    config = load_recipe(write(tmp_path, "optimizer: {lr: 5e-4, eps: '1e-7', weight_decay: 1}\n"), ["schedule.min_lr_ratio=1e-1"])
    assert config.optimizer.lr == 5e-4
    assert config.optimizer.eps == 1e-7
    assert config.optimizer.weight_decay == 1.0 and isinstance(config.optimizer.weight_decay, float)
    assert config.schedule.min_lr_ratio == 0.1
    assert load_recipe(write(tmp_path), ["optimizer.lr=1e-5"]).optimizer.lr == 1e-5


@pytest.mark.parametrize("spelling", ["20", '"20"', "'20'"])
def test_a_quoted_number_that_parses_exactly_is_that_number(tmp_path: Path, spelling: str) -> None:
    """The config part of case B31."""
    config = load_recipe(write(tmp_path, f"train: {{global_batch_size: {spelling}}}\n"))
    assert config.train.global_batch_size == 20


def test_a_quoted_true_is_true_where_true_or_false_is_due(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "validation: {exact_match: 'true'}\n")).validation.exact_match is True


@pytest.mark.parametrize(
    ("yaml", "key"),
    [
        ("train: {max_steps: 'true'}", "train.max_steps"),
        ("train: {max_steps: true}", "train.max_steps"),
        ("train: {max_steps: 1.5}", "train.max_steps"),
        ("train: {micro_batch_size: }", "train.micro_batch_size"),
        ("optimizer: {lr: fast}", "optimizer.lr"),
        ("optimizer: {lr: .inf}", "optimizer.lr"),
        ("optimizer: {betas: 0.9}", "optimizer.betas"),
        ("optimizer: {betas: [0.9, big]}", "optimizer.betas.1"),
        ("validation: {exact_match: 1}", "validation.exact_match"),
        ("output_dir: 2024", "output_dir"),
        ("output_dir: no", "output_dir"),
        ("precision: fp16", "precision"),
        ("precision: ", "precision"),
        ("train: ", "train"),
        ("train: 5", "train"),
        ("train: [5]", "train"),
        ("logging: {wandb: offline}", "logging.wandb"),
    ],
)
def test_a_value_of_the_wrong_type_names_key_and_place_b66(tmp_path: Path, yaml: str, key: str) -> None:
    """case B66: a wrong type, a quoted true or an empty value names the key at load."""
    text = message(write(tmp_path, yaml + "\n"))
    assert f"{key}: needs" in text
    assert "(run.yaml line 6)" in text


def test_an_optional_key_may_be_empty(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "train: {max_grad_norm: , max_steps: 3}\n")).train.max_grad_norm is None


def test_the_message_for_a_whole_number_written_as_a_float_says_how_to_write_it(tmp_path: Path) -> None:
    assert "write 1000" in message(write(tmp_path), "train.max_steps=1e3")


def test_a_nested_override_keeps_the_rest_of_its_section_b65(tmp_path: Path) -> None:
    """case B65: the layer count alone changes; the other keys of the model stay."""
    config = load_recipe(write(tmp_path), ["model.config.num_hidden_layers=2", "model.config.num_experts=4", "train.max_steps=3"])
    assert config.model.config == {"num_experts": 4, "hidden_size": 32, "num_hidden_layers": 2}
    assert config.train.max_steps == 3 and config.train.global_batch_size == 32
    assert load_recipe(write(tmp_path), ["model={config: {num_experts: 2}}"]).model.config == {"num_experts": 2, "hidden_size": 32}


def test_an_override_reaches_into_lists_and_free_sections(tmp_path: Path) -> None:
    config = load_recipe(write(tmp_path), ["data.tasks.0.train_size=7", "data.tasks.0.params.max_terms=3", "~model.config.hidden_size"])
    assert (config.data.tasks[0].name, config.data.tasks[0].train_size) == ("chain_sum", 7)
    assert config.data.tasks[0].params == {"min_terms": 2, "max_terms": 3}
    assert config.model.config == {"num_experts": 8}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_plus_signs_change_nothing_for_a_known_key(tmp_path: Path, prefix: str) -> None:
    assert load_recipe(write(tmp_path), [f"{prefix}seed=5"]).seed == 5


def test_interpolations_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_RUN_NAME", "blue")
    config = load_recipe(write(tmp_path, "seed: 4\noutput_dir: runs/${oc.env:A_RUN_NAME}-${seed}\n"))
    assert config.output_dir == "runs/blue-4"
    assert "output_dir" in message(write(tmp_path, "output_dir: ${nowhere}\n"))
    assert "A_RUN_NAMES" in message(write(tmp_path, "output_dir: ${oc.env:A_RUN_NAMES}\n"))


def test_a_printed_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_recipe(write(tmp_path, "output_dir: '007'\nlogging: {wandb: {name: 'null'}}\n"), ["optimizer.lr=3e-4", "precision=fp32"])
    again = load_recipe(write(tmp_path, to_yaml(config), name="again.yaml", start=""))
    assert again == config
    assert to_plain(again)["precision"] == "fp32"


# Inheritance


def test_a_recipe_inherits_and_overrides_what_it_inherits(tmp_path: Path) -> None:
    write(tmp_path, "seed: 1\ntrain: {max_steps: 3, micro_batch_size: 2}\n", name="base.yaml")
    child = write(tmp_path, "defaults: [base, _self_]\ntrain: {max_steps: 5}\n", name="child.yaml", start="")
    config = load_recipe(child)
    assert (config.seed, config.train.max_steps, config.train.micro_batch_size) == (1, 5, 2)
    without_self = write(tmp_path, "defaults: [base]\nseed: 2\n", name="other.yaml", start="")
    assert load_recipe(without_self).seed == 2


def test_a_mistake_in_an_inherited_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, "seed: x\n", name="base.yaml")
    child = write(tmp_path, "defaults: [base, _self_]\n", name="child.yaml", start="")
    assert "seed: needs a whole number, found the text 'x' (base.yaml line 6)" in message(child)


def test_a_missing_base_names_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path, name="base.yaml")
    text = message(write(tmp_path, "defaults: [bose, _self_]\n", name="child.yaml", start="# a comment\n"))
    assert "child.yaml line 2" in text and "did you mean 'base'?" in text


def test_files_that_inherit_from_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [b, _self_]\n", name="a.yaml", start="")
    assert "inherits" in message(write(tmp_path, "defaults: [a, _self_]\n", name="b.yaml", start=""))
    assert "inherits" in message(write(tmp_path, "defaults: [c]\n", name="c.yaml", start=""))
    assert "defaults needs a list" in message(write(tmp_path, "defaults: base\n", name="d.yaml", start=""))


# Keys that do not exist


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("+optimizer.lrr=1", "optimizer.lr"),
        ("++optimizer.lrr=1", "optimizer.lr"),
        ("optimiser.lr=1", "optimizer.lr"),
        ("trian.max_steps=1", "train.max_steps"),
        ("train.max_stesp=1", "train.max_steps"),
        ("lr=1", "optimizer.lr"),
        ("ep_size=2", "distributed.ep_size"),
        ("train.ep_size=2", "distributed.ep_size"),
        ("backend.dispatchr=all_to_all", "backend.dispatcher"),
        ("data.tasks.0.train_sise=3", "data.tasks.0.train_size"),
        ("logging.wandb.mod=offline", "logging.wandb.mode"),
    ],
)
def test_a_misspelt_key_names_the_nearest_one_in_full_b65(tmp_path: Path, override: str, nearest: str) -> None:
    """case B65, second half."""
    text = message(write(tmp_path), override)
    assert "unknown key" in text and f"did you mean {nearest}?" in text
    assert f"(command line: {override})" in text


def test_a_misspelt_key_in_yaml_names_its_line(tmp_path: Path) -> None:
    text = message(write(tmp_path, "optimizer:\n  lr: 1e-3\n  wieght_decay: 0.1\n"))
    assert "optimizer.wieght_decay: unknown key; did you mean optimizer.weight_decay? (run.yaml line 8)" in text


def test_a_key_like_no_other_lists_what_is_legal_there(tmp_path: Path) -> None:
    assert "(legal in backend: dispatcher, dispatcher_num_sms," in message(write(tmp_path), "backend.zzz=1")
    assert "(legal in the top level: model, data," in message(write(tmp_path), "+new=1")


def test_an_old_switch_is_refused_with_the_key_to_use_b29(tmp_path: Path) -> None:
    """case B29: nothing that was written is replaced; the old key is refused."""
    text = message(write(tmp_path, "backend: {enable_deepep: true, dispatcher: all_to_all, experts: loop}\n"))
    assert "backend.enable_deepep" in text and "use backend.dispatcher" in text


def test_a_dispatcher_or_experts_name_of_another_framework_is_refused_with_ours(tmp_path: Path) -> None:
    assert "'torch' is another framework's name; here it is 'all_to_all'" in message(write(tmp_path), "backend.dispatcher=torch")
    assert "here it is 'grouped_mm'" in message(write(tmp_path), "backend.experts=torch_mm")
    assert "did you mean 'all_to_all'? (legal: " in message(write(tmp_path), "backend.dispatcher=all_to_al")


def test_a_recipe_of_another_framework_lists_the_key_to_use_for_each_of_its_own(tmp_path: Path) -> None:
    foreign = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 512, local_batch_size: 32, ckpt_every_steps: 100}
dist_env: {backend: nccl, timeout_minutes: 5}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
  backend: {dispatcher: deepep, experts: torch_mm}
distributed: {strategy: fsdp2, ep_size: 8}
data: {tasks: [{name: chain_sum, train_size: 5}]}
"""
    text = message(write(tmp_path, foreign, start=""))
    for key, advice in [
        ("recipe", "remove it"),
        ("step_scheduler.global_batch_size", "use train.global_batch_size"),
        ("step_scheduler.local_batch_size", "use train.micro_batch_size"),
        ("step_scheduler.ckpt_every_steps", "its keys are in train"),
        ("dist_env.timeout_minutes", "use distributed.timeout_minutes"),
        ("model._target_", "use model.family"),
        ("model.pretrained_model_name_or_path", "use model.path"),
        ("model.backend", "backend.dispatcher"),
        ("distributed.strategy", "FSDP2"),
    ]:
        line = next(line for line in text.splitlines() if line.startswith(f"  - {key}: "))
        assert advice in line, line


def test_the_advice_for_foreign_keys_names_keys_that_exist() -> None:
    known = set(key_paths())
    for foreign, advice in FOREIGN_KEYS.items():
        assert foreign not in known
        words = advice.replace(",", " ").replace(":", " ").replace(";", " ").split()
        for word in (word for word in words if "." in word.strip(".") and not word.startswith("torch")):
            assert word in known, f"{foreign} points to {word}"


# Overrides that cannot be read


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optimizer.lr", "missing '='"),
        ("=3", "names no key"),
        ("seed@here=3", "names no key"),
        ("train.max_steps=1,2", "a list write train.max_steps=[1,2]"),
        ("output_dir=runs/new!", "'output_dir=\"runs/new!\"'"),
        ("optimizer.betas=[0.9", "needs quotes"),
        ("data.tasks.5.train_size=3", "out of range"),
        ("~seed", "only keys of model.config"),
        ("~model.config.nothing", "not there"),
    ],
)
def test_an_override_that_cannot_be_read_says_how_to_write_it(tmp_path: Path, override: str, hint: str) -> None:
    text = message(write(tmp_path), override)
    assert hint in text and override in text


def test_a_quoted_override_may_hold_any_text(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path), ['output_dir="runs/new!"']).output_dir == "runs/new!"


# Several problems, missing keys, bad combinations


def test_all_problems_are_listed_together(tmp_path: Path) -> None:
    text = message(write(tmp_path, "seed: x\n"), "optimizer.lrr=1", "backend.dispatcher=nope", "train.micro_batch_size=0")
    assert "has 4 problems" in text
    for part in ("seed: needs", "optimizer.lrr: unknown key", "backend.dispatcher: unknown value 'nope'", "train.micro_batch_size must be"):
        assert part in text


def test_missing_and_open_keys_are_named(tmp_path: Path) -> None:
    text = message(write(tmp_path, "model: {}\ndata: {tasks: [{train_size: 3}]}\nseed: ???\n", start=""))
    assert "model.path and model.config are both empty" in text
    assert "data.tasks.0.name: is missing" in text
    assert "seed: must be given" in text
    assert "data: is missing" in message(write(tmp_path, "model: {path: x}\n", start=""))


def test_combinations_across_sections_are_checked(tmp_path: Path) -> None:
    assert "dispatcher_num_sms" in message(write(tmp_path), "backend.dispatcher_num_sms=20")
    assert "no asynchronous mode" in message(write(tmp_path), "backend.dispatcher_async_dispatch=true")


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("optimizer: {momentum: 0.9}", ["optimizer.momentum is 0.9", "adamw has no momentum", "leave it at 0.0"]),
        ("optimizer: {name: sgd, betas: [0.9, 0.99]}", ["optimizer.betas is [0.9, 0.99]", "sgd has no betas", "[0.9, 0.95]"]),
        ("optimizer: {name: sgd, eps: 1e-6}", ["optimizer.eps is 1e-06", "sgd has no eps", "leave it at 1e-08"]),
        ("schedule: {name: constant, min_lr_ratio: 0.1}", ["schedule.min_lr_ratio is 0.1", "set it to 0", "linear or cosine"]),
        ("router: {fake_balanced: true, bias_update_rate: 0.1}", ["router.bias_update_rate is 0.1", "router.fake_balanced"]),
    ],
)
def test_an_option_that_the_named_choice_does_not_read_is_refused(tmp_path: Path, yaml: str, parts: list[str]) -> None:
    text = message(write(tmp_path, yaml + "\n"))
    for part in parts:
        assert part in text, text


def test_an_option_at_its_default_goes_with_every_choice(tmp_path: Path) -> None:
    yaml = "optimizer: {name: sgd, betas: [0.9, 0.95], eps: 1e-8, momentum: 0.9}\nschedule: {name: constant, min_lr_ratio: 0}\n"
    assert load_recipe(write(tmp_path, yaml)).optimizer.momentum == 0.9
    assert load_recipe(write(tmp_path, "optimizer: {momentum: 0, betas: [0.5, 0.6]}\n")).optimizer.betas == [0.5, 0.6]


# Files


def test_an_unknown_recipe_lists_the_recipes_and_the_nearest_one(tmp_path: Path) -> None:
    names = list_recipes()
    assert "demo" in names
    text = message("demmo")
    assert "did you mean 'demo'?" in text and all(name in text for name in names)
    assert "no such file" in message(str(tmp_path / "absent.yaml"))
    assert "did you mean 'demo'?" in message("demo.yaml")
    assert "rename it" in message(str(tmp_path / "run.yml"))
    assert "no recipe of that name" in message(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"model: {config: 1\ndata: 2\n", "line 2"),
        (b"model:\n\tpath: x\n", "line 2"),
        (b"seed: 1\nseed: 2\n", "duplicate"),
        (b"seed: !!python/object:os.system 1\n", "line 1"),
        (b"\xff\xfe\x00\x01", "not readable as YAML"),
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "not a mapping"),
        (b"just text\n", "not a mapping"),
    ],
)
def test_a_broken_file_is_named_with_the_line(tmp_path: Path, content: bytes, hint: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    text = message(str(path))
    assert "broken.yaml" in text and hint in text
    assert "Traceback" not in text


def test_a_path_with_spaces_and_a_relative_path_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    write(folder, "seed: 3\n", name="a run.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("my runs/a run.yaml").seed == 3


@pytest.mark.parametrize("name", sorted(list_recipes()))
def test_every_recipe_that_ships_loads_and_says_what_it_is(name: str) -> None:
    assert isinstance(load_recipe(name), RunConfig)
    assert list_recipes()[name], f"{recipe_folder() / name}.yaml starts with a comment that says what it is"


def test_any_text_is_printed_so_that_it_reads_back_b66(tmp_path: Path) -> None:
    """Text that looks like an interpolation is text again, whatever stands before it."""
    generator = random.Random(0)
    pieces = ["\\", "$", "{", "}", "${seed}", "seed", ".", ": ", "'", '"', "1", "e", "#"]
    for _ in range(300):
        config = load_recipe(write(tmp_path))
        config.output_dir = "".join(generator.choices(pieces, k=6))
        assert load_recipe(write(tmp_path, to_yaml(config), name="again.yaml", start="")).output_dir == config.output_dir
    assert load_recipe(write(tmp_path), ["output_dir='\\${a'"]).output_dir == "${a"


@pytest.mark.parametrize(
    ("yaml", "hint"),
    [
        ("hydra: {run: {dir: x}}\n", "hydra: Hydra itself is not configurable"),
        ("hydra:\n", "hydra: Hydra itself is not configurable"),
        ("optimizer.lr: 0.1\n", "optimizer.lr: is one key with dots in it; in YAML, write the keys below one another: optimizer:, lr:"),
        ("optimizer: {'': 3}\n", "optimizer: has an empty key with the number 3 below it"),
        ("'': 3\n", "has an empty key with the number 3 below it"),
        ("defaults: [../base]\n", "line 6: inherits from '../base', but a recipe inherits from files of its own folder only"),
        ("defaults:\n", "line 6: defaults needs a list"),
        ("output_dir: ''\n", "output_dir is empty"),
        ("output_dir: ~nobody_of_that_name/x\n", "output_dir: '~nobody_of_that_name/x' starts with a home folder that is not known here"),
        ("seed: 99999999999999999999999\n", "seed must be between 0 and 9223372036854775807, found 99999999999999999999999"),
        ("seed: -1\n", "seed must be between 0 and"),
        ("distributed: {timeout_minutes: 1e300}\n", "distributed.timeout_minutes must be between 0.01 and 525600, found 1e+300"),
        ("distributed: {timeout_minutes: 1e-9}\n", "distributed.timeout_minutes must be between 0.01 and 525600, found 1e-09"),
        ("distributed: {hang_report_minutes: 1e300}\n", "distributed.hang_report_minutes must be between"),
        ("checkpoint: {grace_seconds: 1e300}\n", "checkpoint.grace_seconds must be between"),
        ("logging: {every_steps: 99999999999999999999999999}\n", "logging.every_steps must be above 0 and below 2^63, found 9999"),
    ],
)
def test_what_would_be_ignored_or_fail_on_the_ranks_is_refused_here(tmp_path: Path, yaml: str, hint: str) -> None:
    assert hint in message(write(tmp_path, yaml))


@pytest.mark.parametrize("size", [0, 2**31 + 1])
def test_a_number_of_items_that_the_seeds_do_not_reach_is_refused(tmp_path: Path, size: int) -> None:
    assert "train_size of 'chain_sum' must be between 1 and 2147483648" in message(write(tmp_path), f"data.tasks.0.train_size={size}")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("~model.config.num_experts=7", "model.config.num_experts is 8, not 7"),
        ("~model.config.num_experts=null", "model.config.num_experts is 8, not None"),
        ("seed=range(1,3)", "a run has one; write that one"),
        ("data.tasks[0].train_size=6", "write data.tasks.0.train_size=6"),
        ("optimizer.betas.0=0.5", "there is no list yet whose places could be changed, so write it whole: optimizer.betas=[...]"),
    ],
)
def test_an_override_says_what_to_write_instead(tmp_path: Path, override: str, hint: str) -> None:
    text = message(write(tmp_path), override)
    assert hint in text and "[range" not in text


def test_a_key_is_taken_out_where_it_has_the_value_that_was_named(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path), ["~model.config.num_experts=8"]).model.config == {"hidden_size": 32}


@pytest.mark.parametrize("name", ["~nobody_of_that_name/x.yaml", "a" * 5000 + ".yaml", "a" * 5000])
def test_a_path_that_no_file_can_have_is_one_message(name: str) -> None:
    assert f"recipe {name[:60]!r}"[:-1] in message(name)


@pytest.mark.parametrize("aliases", [14, 1])
def test_aliases_that_come_to_billions_of_values_are_refused_at_once(tmp_path: Path, aliases: int) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, aliases))
    endless = "a: &a [x, *a]\n"
    begun = time.monotonic()
    assert "aliases (*name) written out" in message(write(tmp_path, bomb if aliases > 1 else endless))
    assert time.monotonic() - begun < 5
    assert load_recipe(write(tmp_path, "train: {max_steps: &n 3, num_epochs: *n}\n")).train.num_epochs == 3


@pytest.mark.parametrize(
    "override", ["checkpoint.format=torch_save", "checkpoint.save_consolidated=true", "checkpoint.model_save_format=safetensors"]
)
def test_a_save_option_that_does_not_exist_is_refused_at_the_start(override: str) -> None:
    """case B41: there is one format of checkpoints and one of models; nothing about it is accepted and ignored."""
    with pytest.raises(ConfigError, match="unknown key"):
        load_recipe("demo", [override])
