"""Activation checkpointing: same numbers, and the routing of a step is decided once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_moe.testing.parity import Setting, count_routing, make_rows, parallel_model, whole
from nemo_moe.testing.run_distributed import run_distributed


class _OpCounter(TorchDispatchMode):
    """Counts the matmuls, attentions and top-k selections that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _one_backward(setting: Setting, random_router: bool) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, int], dict[str, int]]:
    model, meshes = parallel_model(setting)
    if random_router:
        # A router that would choose differently if it were asked again, as ties and changed kernels make real ones do.
        generator = torch.Generator().manual_seed(11)
        for moe in model.moe_layers():
            moe.gate._select = lambda scores, k=setting.top_k: torch.rand(scores.shape, generator=generator).topk(k).indices
    counters = count_routing(model)
    input_ids, _, token_mask = make_rows(setting)[0][meshes.dp_rank]
    logits, stats = model(input_ids, token_mask=token_mask)
    loss = logits.square().mean() + stats.probs_sum.square().mean()
    with _OpCounter() as backward:
        loss.backward()
    gradients = whole(model, meshes, {name: parameter.grad for name, parameter in model.named_parameters()})
    return logits.detach(), stats.tokens_per_expert, gradients, counters, backward.counts


@pytest.mark.parametrize("random_router", [False, True])
@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 2, 1)], ids=str)
def test_all_modes_give_the_same_numbers_and_route_once(mesh: tuple[int, int, int], experts: str, random_router: bool) -> None:
    """Cases B26 and B27."""
    settings = {mode: Setting(mesh=mesh, experts=experts, checkpointing=mode) for mode in ("none", "full", "selective")}
    results = {mode: run_distributed(_one_backward, 2, setting, random_router) for mode, setting in settings.items()}
    for rank in range(2):
        logits, counts, gradients, _, _ = results["none"][rank]
        for mode in settings:
            other_logits, other_counts, other_gradients, counters, _ = results[mode][rank]
            assert torch.equal(logits, other_logits) and torch.equal(counts, other_counts)
            assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients), mode
            assert counters == {"selections": 2, "dispatches": 2}


def test_full_computes_the_layers_again_and_selective_all_but_matmuls_and_attention() -> None:
    def backward_ops(mode: str) -> dict[str, int]:
        return run_distributed(_one_backward, 2, Setting(checkpointing=mode, experts="grouped_mm"), False)[0][4]

    none, full, selective = (backward_ops(mode) for mode in ("none", "full", "selective"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert full["mm"] > none["mm"] and full["_grouped_mm"] > none["_grouped_mm"] and full[attention] == 3
    # A kept result is handed out below this counter, which therefore sees no call.
    for op in ("mm", "_grouped_mm", attention):
        assert selective.get(op, 0) == none.get(op, 0), op
    assert selective["silu"] > none.get("silu", 0)
    assert not any("topk" in ops for ops in (none, full, selective))
