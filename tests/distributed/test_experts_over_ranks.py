"""The gmm and te experts over emulated libraries behind a dispatcher, on gloo ranks: the conformance suite, FSDP2, recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from emulated_experts import EMULATED_EXPERTS, emulated_experts
from nemo_moe.config import BackendConfig
from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher
from nemo_moe.moe.experts.base import build_experts
from nemo_moe.testing.conformance import CASES, check_case
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.testing.tolerances import assert_close_relative

BF16 = 2.5e-2


def _check(experts: str, recompute: bool) -> None:
    with emulated_experts():
        for case in CASES:
            backend = BackendConfig(experts=experts)
            options = {"steps": 2, "poison": True, "recompute": recompute}
            check_case(case, backend, dist.group.WORLD, dtype=torch.bfloat16, tolerance=BF16, **options)


@pytest.mark.parametrize("experts", EMULATED_EXPERTS)
def test_the_conformance_suite_passes_behind_all_to_all(experts: str) -> None:
    """cases B01, B03, B06, B07, B09, B10, in bf16."""
    run_distributed(_check, 2, experts, False)


@pytest.mark.parametrize("experts", EMULATED_EXPERTS)
def test_recomputation_gives_the_same(experts: str) -> None:
    run_distributed(_check, 2, experts, True)


def _sharded(name: str) -> None:
    """FSDP2 gathers and reduces the two stored parameters; one optimizer step equals that of the loop."""
    results = []
    with emulated_experts():
        for experts_name in ("loop", name):
            torch.manual_seed(0)
            experts = build_experts(experts_name, 4, 16, 8).to(torch.bfloat16)
            fully_shard(experts, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            assert [key for key, _ in experts.named_parameters()] == ["gate_up_proj", "down_proj"]
            optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
            dispatcher = MoEFlexTokenDispatcher(BackendConfig(experts=experts_name), 4, None)
            torch.manual_seed(1 + dist.get_rank())
            for _ in range(2):
                tokens = torch.randn(9, 16).to(torch.bfloat16)
                ids = torch.randint(0, 3, (9, 2))  # nobody goes to expert 3
                experts(tokens, ids, torch.rand(9, 2), dispatcher).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([parameter.full_tensor().detach().float() for parameter in experts.parameters()])
    for expected, got in zip(*results, strict=True):
        assert_close_relative(got, expected, BF16, name)
        assert torch.equal(got[3], expected[3]), "an expert without tokens moved"


@pytest.mark.parametrize("experts", EMULATED_EXPERTS)
def test_fsdp2_shards_the_stored_parameters(experts: str) -> None:
    run_distributed(_sharded, 2, experts)
