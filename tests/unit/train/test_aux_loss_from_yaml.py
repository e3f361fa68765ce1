"""The auxiliary loss from the text of a recipe to the weights (case B25); `test_finetune` has its rules inside the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_moe.compose import load_recipe, to_yaml
from nemo_moe.train.finetune import finetune
from tiny_run import records, tiny_config


def gates_after(recipe: str, folder: Path) -> list[Tensor]:
    """Train a recipe for 2 steps into `folder`; the routers' weights."""
    finetune(load_recipe(recipe, [f"output_dir={folder}", "train.max_steps=2"]))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return [weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]


def test_a_coefficient_alone_in_the_yaml_is_in_the_loss_and_in_the_log_b25(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """case B25: no other key, and nothing in the model's config, asks for router logits."""
    text = to_yaml(tiny_config(tmp_path))
    without, _, rest = text.partition("router:\n")
    others = rest[rest.index("optimizer:") :]
    assert "router_aux_loss_coef: 0.0" in without
    for name, router in (("off", ""), ("on", "router: {aux_loss_coef: 0.001}\n")):
        (tmp_path / f"{name}.yaml").write_text(without + router + others, encoding="utf-8")
    off, on = (gates_after(str(tmp_path / f"{name}.yaml"), tmp_path / name) for name in ("off", "on"))
    assert len(on) == 2 and not any(torch.equal(one, other) for one, other in zip(on, off, strict=True))
    logged = records(tmp_path / "on")
    assert len(logged) == 2 and all(record["load_balance_loss"] >= 1.9 for record in logged)
    assert all("load_balance_loss" not in record for record in records(tmp_path / "off"))
    assert "auxiliary losses: 0.001 x load balance" in capsys.readouterr().out
