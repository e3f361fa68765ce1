"""One MoE layer: alone, and with its experts spread over the ranks that torchrun starts. The results are equal.

    python examples/moe_layer.py
    torchrun --standalone --nproc-per-node 2 examples/moe_layer.py

Every rank has tokens of its own (not equally many) and owns a part of the experts; tokens travel to their experts and
back. Any number of ranks that divides the 8 experts will do.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist

from nemo_moe import BackendConfig, MoE, MoEConfig


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0

    torch.manual_seed(0)  # the same layer and the same 101 tokens on every rank
    layer = MoE(
        MoEConfig(num_experts=8, num_experts_per_tok=2, hidden_size=64, moe_intermediate_size=96),
        BackendConfig(dispatcher="all_to_all", experts="grouped_mm"),
    )
    tokens = torch.randn(101, 64)

    spread = copy.deepcopy(layer)
    spread.shard_experts(dist.group.WORLD if ranks > 1 else None)

    # The whole batch through the whole layer, and this rank's part of it through the layer whose experts are spread.
    whole, _ = layer(tokens)
    part, stats = spread(tokens.tensor_split(ranks)[rank])
    whole.square().sum().backward()
    part.square().sum().backward()

    expected = whole.tensor_split(ranks)[rank]
    experts = slice(spread.experts.expert_offset, spread.experts.expert_offset + spread.experts.num_local_experts)
    expected_grad = layer.experts.gate_up_proj.grad[experts]
    print(
        f"rank {rank} of {ranks}: {len(part)} tokens, experts {experts.start} to {experts.stop - 1};"
        f" its tokens chose the 8 experts {stats.tokens_per_expert.int().tolist()} times;"
        f" relative difference to one process: output {relative(part, expected):.1e},"
        f" gradient of its experts {relative(spread.experts.gate_up_proj.grad, expected_grad):.1e}",
        flush=True,
    )
    assert relative(part, expected) < 1e-5 and relative(spread.experts.gate_up_proj.grad, expected_grad) < 1e-5
    if ranks > 1:
        dist.destroy_process_group()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


if __name__ == "__main__":
    main()
