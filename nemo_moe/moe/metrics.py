"""Numbers that show how evenly experts are loaded. Pure functions of counts that were summed over ranks already."""

from __future__ import annotations

from torch import Tensor


def expert_load_metrics(tokens_per_expert: Tensor) -> dict[str, float | list[float]]:
    """What a run logs about its routing.

    Args:
        tokens_per_expert: [N, E] counts of N MoE layers over all ranks, on any device.

    Returns:
        moe/imbalance: mean over layers of (busiest expert's load / mean load); 1 is even, E is everything to one.
        moe/layer_{n}/imbalance, moe/layer_{n}/busiest_share (of all slots), moe/layer_{n}/dead_experts (how many got
        nothing), moe/layer_{n}/load (list of E shares). A layer without any token reports imbalance 1 and shares 0.
    """
    counts = tokens_per_expert.double().cpu()
    totals = counts.sum(dim=1, keepdim=True)
    shares = counts / totals.clamp(min=1.0)
    num_experts = counts.shape[1]
    metrics: dict[str, float | list[float]] = {}
    imbalances = []
    for layer, (layer_shares, total) in enumerate(zip(shares, totals, strict=True)):
        busiest = float(layer_shares.max())
        imbalance = busiest * num_experts if total > 0 else 1.0
        imbalances.append(imbalance)
        metrics[f"moe/layer_{layer}/imbalance"] = imbalance
        metrics[f"moe/layer_{layer}/busiest_share"] = busiest
        metrics[f"moe/layer_{layer}/dead_experts"] = float((layer_shares == 0).sum())
        metrics[f"moe/layer_{layer}/load"] = layer_shares.tolist()
    metrics["moe/imbalance"] = sum(imbalances) / max(1, len(imbalances))
    return metrics
