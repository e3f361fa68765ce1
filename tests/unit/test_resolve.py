"""What a config comes to on so many ranks, and why it cannot run on others. No process group exists in any of these."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_moe.config import (
    BackendConfig,
    DataConfig,
    Device,
    DistributedConfig,
    ModelConfig,
    Precision,
    RouterConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from nemo_moe.registry import DISPATCHERS, EXPERTS, DispatcherSpec, ExpertsSpec
from nemo_moe.resolve import Resolved, model_config, resolve

HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def run_config(hf: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A small fp32 run; `hf` changes the model's config."""
    return RunConfig(
        **{
            "model": ModelConfig(config=HF_CONFIG | (hf or {})),
            "data": DataConfig(tasks=[TaskConfig(name="chain_sum", train_size=10)]),
            "precision": Precision.fp32,
            **sections,
        }
    )


def resolved(config: RunConfig, world_size: int, **machine: Any) -> Resolved:
    return resolve(config, world_size, **{"device_count": 0, **machine})


def refusal(config: RunConfig, world_size: int, **machine: Any) -> str:
    with pytest.raises(ValueError) as caught:
        resolved(config, world_size, **machine)
    return str(caught.value)


def line(result: Resolved, subject: str) -> str:
    return next(text for text in result.lines if text.startswith(f"{subject}: "))


def test_sizes_device_and_backends_come_with_their_reasons() -> None:
    config = run_config(distributed=DistributedConfig(ep_size=2), train=TrainConfig(global_batch_size=32, micro_batch_size=4))
    result = resolved(config, 4)
    assert (result.sizes.fsdp, result.sizes.ep, result.sizes.efsdp, result.sizes.dp_size) == (4, 2, 2, 4)
    assert (result.device, result.dist_backend) == ("cpu", "gloo")
    assert "auto: no CUDA device here" in line(result, "device") and "gloo" in line(result, "device")
    assert "4 = dp_replicate 1 x fsdp 4 x tp 1; 8 experts over ep 2, 4 a rank" in line(result, "ranks")
    assert "all_to_all (as configured)" in line(result, "dispatcher")
    assert "grouped_mm (as configured)" in line(result, "experts")
    assert "32 sequences an optimizer step = 4 ranks x 2 micro-batches x 4 sequences" in line(result, "batch")


# Sizes


@pytest.mark.parametrize(
    ("experts", "ep_size", "world_size", "numbers"),
    [(6, 4, 4, ("(4)", "(6)")), (8, 3, 3, ("(3)", "(8)")), (8, 8, 4, ("8", "4"))],
)
def test_an_impossible_ep_size_names_both_numbers_b34(experts: int, ep_size: int, world_size: int, numbers: tuple[str, str]) -> None:
    """case B34: E=6 with EP=4, E=8 with EP=3, EP=8 on 4 ranks."""
    text = refusal(run_config({"num_experts": experts}, distributed=DistributedConfig(ep_size=ep_size)), world_size)
    assert all(number in text for number in numbers), text


def test_ep_must_divide_fsdp_times_tp_b34() -> None:
    """case B34, for ranks that replicas take away."""
    text = refusal(run_config(distributed=DistributedConfig(ep_size=4, dp_replicate_size=2)), 4)
    assert "distributed.ep_size (4) must divide fsdp_size * tp_size (2 * 1 = 2)" in text


def test_sizes_for_more_ranks_than_there_are_say_how_many_to_start() -> None:
    text = refusal(run_config(distributed=DistributedConfig(ep_size=2)), 1)
    assert "need 2 ranks" in text and "there is 1" in text and "--nproc-per-node 2" in text
    assert "need 8 ranks" in refusal(run_config(distributed=DistributedConfig(fsdp_size=8)), 4)
    replicas = refusal(run_config(distributed=DistributedConfig(dp_replicate_size=2)), 1)
    assert "need 2 ranks" in replicas and "or lower distributed.dp_replicate_size (now 2)" in replicas and "fsdp_size" not in replicas
    assert "but there are 4 ranks" in refusal(run_config(distributed=DistributedConfig(fsdp_size=2)), 4)


def test_tensor_parallel_ranks_are_refused_with_the_reason() -> None:
    text = refusal(run_config(distributed=DistributedConfig(tp_size=2)), 2)
    assert "distributed.tp_size is 2" in text and "set it to 1" in text


@pytest.mark.parametrize("tp_size", [1, 2])
def test_all_reduce_is_refused_in_a_run_with_the_ways_out(tp_size: int) -> None:
    """Following what a message says ends in a run, not in the other message."""
    spread = DistributedConfig(ep_size=2, tp_size=tp_size)
    config = run_config(backend=BackendConfig(dispatcher="all_reduce"), distributed=spread)
    text = refusal(config, 2)
    if tp_size == 2:
        assert "distributed.tp_size is 2" in text and "set it to 1" in text
        text = refusal(dataclasses.replace(config, distributed=DistributedConfig(ep_size=2)), 2)
    assert "MoE layers that are built by hand" in text and "choose 'all_to_all'" in text and "tp_size" not in text
    changed = dataclasses.replace(config, backend=BackendConfig(), distributed=DistributedConfig(ep_size=2))
    assert "all_to_all" in line(resolved(changed, 2), "dispatcher")


def test_the_global_batch_must_be_a_multiple_of_micro_batch_times_ranks() -> None:
    text = refusal(run_config(train=TrainConfig(global_batch_size=12, micro_batch_size=4)), 2)
    assert "train.global_batch_size (12)" in text and "(4 * 2 = 8)" in text


# Device


def test_auto_takes_cuda_where_there_is_a_device_for_each_rank() -> None:
    result = resolved(run_config(), 2, device_count=2)
    assert (result.device, result.dist_backend) == ("cuda", "nccl")
    assert "auto: 2 CUDA devices here" in line(result, "device")
    assert resolved(run_config(device=Device.cpu), 4, device_count=2).device == "cpu"
    assert resolved(run_config(), 8, device_count=4, local_world_size=4).device == "cuda"


def test_more_ranks_than_devices_are_refused_with_both_numbers() -> None:
    text = refusal(run_config(), 4, device_count=1)
    assert "4 ranks on this node, but 1 CUDA device" in text and "--nproc-per-node 1" in text and "device to cpu" in text


def test_cuda_is_not_replaced_by_the_cpu() -> None:
    assert "torch sees no CUDA device" in refusal(run_config(device=Device.cuda), 1)


# Backends


@pytest.mark.parametrize("dispatcher", ["all_reduce", "with_a_library"])
def test_with_ep_size_1_any_dispatcher_is_legal_and_the_lines_say_what_runs(dispatcher: str) -> None:
    DISPATCHERS.register("with_a_library", DispatcherSpec(target="a:B", summary="", requires=("no_such_library_here",), extra="x"))
    try:
        config = run_config(backend=BackendConfig(dispatcher=dispatcher))
        text = line(resolved(config, 2), "dispatcher")
        assert "local permutation" in text and f"{dispatcher} as configured is not used" in text
        if dispatcher == "with_a_library":
            with pytest.raises(ImportError) as caught:
                resolved(dataclasses.replace(config, distributed=DistributedConfig(ep_size=2)), 2)
            assert "pip install 'nemo_moe[x]'" in str(caught.value)
    finally:
        DISPATCHERS.unregister("with_a_library")


def test_an_experts_library_must_be_there_at_any_ep_size() -> None:
    EXPERTS.register("with_a_library", ExpertsSpec(target="a:B", summary="", requires=("no_such_library_here",), extra="x"))
    try:
        with pytest.raises(ImportError) as caught:
            resolved(run_config(backend=BackendConfig(experts="with_a_library")), 1)
        assert "pip install 'nemo_moe[x]'" in str(caught.value)
    finally:
        EXPERTS.unregister("with_a_library")


def test_a_hidden_size_that_the_dispatcher_cannot_send_is_refused_before_any_kernel_b21() -> None:
    """case B21: the value and what is allowed, at start."""
    DISPATCHERS.register("of_256", DispatcherSpec(target="a:B", summary="", hidden_size_multiple_of=256))
    try:
        spread = DistributedConfig(ep_size=2)
        config = run_config({"hidden_size": 2050, "head_dim": 16}, backend=BackendConfig(dispatcher="of_256"), distributed=spread)
        assert "multiple of 256, and the model's is 2050" in refusal(config, 2)
    finally:
        DISPATCHERS.unregister("of_256")


def test_sizes_that_grouped_mm_cannot_stride_are_refused_with_the_step_in_elements() -> None:
    odd = {"moe_intermediate_size": 42}
    assert "needs moe_intermediate_size to be a multiple of 4, and the model's is 42" in refusal(run_config(odd), 1)
    assert "multiple of 8" in refusal(run_config({"moe_intermediate_size": 44}, precision=Precision.bf16), 1)
    assert resolved(run_config(odd, backend=BackendConfig(experts="loop")), 1).sizes.world_size == 1


def test_a_model_without_experts_uses_no_backend() -> None:
    dense = {"mlp_only_layers": [0, 1]}
    assert line(resolved(run_config(dense), 2), "dispatcher, experts").endswith("the model has no experts")
    assert "the model has no experts" in refusal(run_config(dense, distributed=DistributedConfig(ep_size=2)), 2)


@pytest.mark.parametrize(
    ("key", "value"), [("aux_loss_coef", 0.01), ("z_loss_coef", 0.001), ("bias_update_rate", 0.001), ("fake_balanced", True)]
)
def test_router_keys_are_refused_where_there_is_no_router(key: str, value: Any) -> None:
    router = RouterConfig(**{key: value})
    text = refusal(run_config({"mlp_only_layers": [0, 1]}, router=router), 1)
    assert f"router.{key} is {value}" in text and "the model has no experts" in text and "leave it out" in text
    assert resolved(run_config({"mlp_only_layers": [0]}, router=router), 1).sizes.ep == 1
    assert resolved(run_config({"mlp_only_layers": [0, 1]}, router=RouterConfig(aux_loss_coef=0.0)), 1).sizes.ep == 1


# The model's own config


def test_a_misspelt_key_of_the_model_config_names_the_nearest_one() -> None:
    with pytest.raises(ValueError) as caught:
        model_config(ModelConfig(config={"num_expert": 4}))
    assert "'num_expert'" in str(caught.value) and "did you mean 'num_experts'?" in str(caught.value)


def test_unknown_keys_of_the_model_config_are_refused_not_ignored() -> None:
    """case B65: this would have built the default model of 24 layers."""
    with pytest.raises(ValueError) as caught:
        model_config(ModelConfig(config={"num_layers": 2, "hidden": 64, "top_k": 4}))
    for key in ("num_hidden_layers", "hidden_size", "num_experts_per_tok"):
        assert f"did you mean {key!r}?" in str(caught.value)


def test_a_folder_gives_the_model_config_and_the_recipe_changes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8")
    model = model_config(ModelConfig(path=str(tmp_path), config={"num_hidden_layers": 1}))
    assert (model.num_hidden_layers, model.num_experts) == (1, 8)


@pytest.mark.parametrize(("model_type", "fix"), [("mixtral", "set model.family to mixtral"), ("llama", "no family here reads that one")])
def test_a_folder_of_another_family_is_refused_naming_the_family_to_write(tmp_path: Path, model_type: str, fix: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HF_CONFIG, "model_type": model_type}), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        model_config(ModelConfig(path=str(tmp_path)))
    assert f"model.family is 'qwen3_moe', but the config.json of {tmp_path} says model_type {model_type!r}; {fix}" in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"a":' * 50_000 + "1" + "}" * 50_000])
def test_a_folder_without_a_readable_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        model_config(ModelConfig(path=str(tmp_path)))
    assert "model.path" in str(caught.value) and "config.json" in str(caught.value)


def test_a_model_path_that_names_no_folder_is_refused_when_the_config_is_built() -> None:
    with pytest.raises(ValueError, match="model.path is empty: write null"):
        ModelConfig(path="", config=HF_CONFIG)
    with pytest.raises(ValueError, match="model.path: '~nobody_of_that_name/x' starts with a home folder that is not known"):
        ModelConfig(path="~nobody_of_that_name/x")


def test_fixed_choices_may_be_given_by_their_text_and_others_are_refused() -> None:
    """From Python no schema stands in between, and a text compared with a member would be another choice without a word."""
    config = run_config(precision="bf16", device="cpu")
    assert (config.precision, config.device) == (Precision.bf16, Device.cpu)
    assert config.precision is Precision.bf16 and config.device is Device.cpu
    with pytest.raises(ValueError, match=r"device: unknown value 'gpu' \(legal: auto, cpu, cuda\)"):
        run_config(device="gpu")
