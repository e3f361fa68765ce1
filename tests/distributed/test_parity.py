"""Training on a mesh equals training in one process: losses, gradients, norms and weights, in fp32, within 1e-5."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from nemo_moe.testing.pairwise import pairwise
from nemo_moe.testing.parity import Setting, check_outcome, run_ranks_of_several
from nemo_moe.testing.run_distributed import run_distributed

# (dp_replicate, fsdp, ep)
MESHES = [(1, 2, 2), (1, 2, 1), (1, 4, 4), (1, 4, 2), (2, 2, 2)]
FACTORS = [
    MESHES,
    ["loop", "grouped_mm"],
    ["unequal", "empty_rank", "no_labels_rank"],
    ["learnt", "hot"],
    [2, 1],
    [1, 4],
    ["none", "full", "selective"],
]
FIELDS = ["mesh", "experts", "batch", "routing", "top_k", "accumulation", "checkpointing"]


def _setting(combination: tuple[object, ...]) -> Setting:
    return Setting(**dict(zip(FIELDS, combination, strict=True)))  # type: ignore[arg-type]


PAIRS = [_setting(combination) for combination in pairwise(FACTORS)]
PRODUCT = [_setting(combination) for combination in itertools.product(*FACTORS)]
# What the factors leave out.
EXTRA = [
    *(Setting(mesh=mesh, experts=experts, batch="equal") for mesh in MESHES for experts in ("loop", "grouped_mm")),
    *(Setting(mesh=mesh, evaluate=True, checkpointing="full") for mesh in ((1, 2, 2), (2, 2, 2))),
    Setting(tied=True, mesh=(1, 4, 2)),
    Setting(routing="two", top_k=1, batch="equal"),  # case B01: no row for any expert of rank 1
    Setting(num_experts=2, top_k=1, mesh=(1, 4, 2), experts="grouped_mm"),  # L = 1 < efsdp = 2: experts sharded on dim 1
    Setting(num_experts=2, top_k=1, mesh=(1, 4, 1), experts="grouped_mm", checkpointing="full"),  # L = 2 < efsdp = 4
    Setting(num_experts=6, mesh=(1, 4, 2)),  # L = 3, efsdp = 2
    Setting(aux_coef=0.0, z_coef=0.0),  # case B16: the router learns from the main loss alone
]


def _id(setting: Setting) -> str:
    changed = {f.name: getattr(setting, f.name) for f in dataclasses.fields(Setting) if getattr(setting, f.name) != f.default}
    return "-".join(f"{name}={value}".replace(" ", "") for name, value in changed.items()) or "default"


@pytest.mark.parametrize("setting", PAIRS + EXTRA, ids=_id)
def test_a_mesh_trains_like_one_process(setting: Setting) -> None:
    """Cases B01, B09, B10, B14, B16, B26, B27 are among the settings."""
    check_outcome(setting, run_distributed(run_ranks_of_several, setting.world_size, [setting])[0][0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("experts", FACTORS[1])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_whole_product_trains_like_one_process(mesh: tuple[int, int, int], experts: str) -> None:
    settings = [setting for setting in PRODUCT if setting.mesh == mesh and setting.experts == experts]
    outcomes = run_distributed(run_ranks_of_several, settings[0].world_size, settings, timeout=1000.0)[0]
    for setting, outcome in zip(settings, outcomes, strict=True):
        try:
            check_outcome(setting, outcome)
        except AssertionError as error:
            raise AssertionError(f"{_id(setting)}: {error}") from error
