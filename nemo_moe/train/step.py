"""One optimizer step: gradients of all micro-batches, the global norm, the update. One host synchronisation in all.

Scales. The main loss is the sum of token losses over the step (all ranks, all micro-batches) divided by the number of
its label tokens, which is agreed on before the first backward; gradients are then only ever added. Auxiliary losses
are taken over all ranks of one micro-batch and averaged over the step's micro-batches. So neither the number of ranks
nor a partial last step (fewer micro-batches) changes the weight of anything.

Limits: losses and counts must be finite and a step must hold a label. A step without any label token changes nothing
(no weight decay or momentum either) and is counted by the caller; a loss or norm that is not finite ends the run before
the weights are touched.

B batch, S sequence, N MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from nemo_moe.data.loader import MicroBatch
from nemo_moe.distributed.grad_norm import clip_grad_norm_
from nemo_moe.distributed.mesh import Meshes
from nemo_moe.distributed.parallelize import set_last_micro_batch
from nemo_moe.moe.load_balance import load_balance_loss, router_z_loss, sum_over_ranks
from nemo_moe.train.loss import count_label_tokens, token_loss_sum


class TrainingStopped(RuntimeError):
    """Training cannot go on; raised alike on all ranks, so one message is enough."""


@dataclass(frozen=True)
class LossCoefficients:
    """Weights of the auxiliary losses; 0 leaves one out."""

    load_balance: float
    router_z: float


@dataclass(frozen=True)
class StepResult:
    """A finished step, in host values that are equal on all ranks.

    Attributes:
        loss: mean over the step's label tokens; 0 where there are none.
        load_balance_loss, router_z_loss: without their coefficients; None where switched off.
        grad_norm: before clipping, over all parameters.
        label_tokens, tokens: of the whole step; tokens excludes padding.
        tokens_per_expert: [N, E] fp32 on the CPU, over all ranks and micro-batches; [0, 0] for a dense model.
        stop: whether some rank asked for a stop before this step.
    """

    loss: float
    load_balance_loss: float | None
    router_z_loss: float | None
    grad_norm: float
    label_tokens: int
    tokens: int
    tokens_per_expert: Tensor
    stop: bool


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[MicroBatch],
    meshes: Meshes,
    coefficients: LossCoefficients,
    max_grad_norm: float | None,
    step: int,
    *,
    stop: bool = False,
) -> StepResult:
    """Train on one optimizer step's micro-batches; collective.

    Args:
        model: parallelized; its parameters and gradients are changed.
        micro_batches: this rank's, on any device; as many on every rank.
        max_grad_norm: None does not clip.
        step: the global step, for messages.
        stop: this rank asks all to stop after this step; it travels with the counts.

    Raises:
        TrainingStopped: the loss or the gradient norm is not finite; the weights are those from before the step.
    """
    optimizer.zero_grad()
    sums = _accumulate_gradients(model, micro_batches, meshes, coefficients, stop)
    # Both sums over ranks are under way before either is awaited.
    pending = dist.all_reduce(sums.losses, group=meshes.dp_group, async_op=True)
    grad_norm = clip_grad_norm_(model, meshes, max_grad_norm)
    pending.wait()
    result = _to_host(sums, grad_norm, coefficients)
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        raise TrainingStopped(
            f"step {step}: the loss is {result.loss:g} and the gradient norm {result.grad_norm:g}; training stopped before its update."
            " Usual causes: a learning rate that is too high (optimizer.lr, schedule.warmup_steps), no clipping (train.max_grad_norm);"
            " in the first step also weights of the model's folder (model.path) that are not finite"
        )
    if result.label_tokens > 0:
        optimizer.step()
    return result


@dataclass
class _Sums:
    """Device values of one step.

    Attributes:
        counts: [3] int64 over all ranks: label tokens, real tokens, ranks that ask for a stop.
        losses: [3] fp32 main, load-balance and z-loss: this rank's parts.
        tokens_per_expert: [N, E] over all ranks.
    """

    counts: Tensor
    losses: Tensor
    tokens_per_expert: Tensor


def _accumulate_gradients(
    model: nn.Module, micro_batches: Sequence[MicroBatch], meshes: Meshes, coefficients: LossCoefficients, stop: bool
) -> _Sums:
    device = meshes.device
    counts = torch.stack([_counts(batch) for batch in micro_batches]).sum(dim=0)
    counts = torch.cat([counts, torch.tensor([int(stop)])]).to(device)
    # Awaited when the first loss needs it, so that it travels during the first forward.
    pending = dist.all_reduce(counts, group=meshes.dp_group, async_op=True)
    losses = torch.zeros(3, dtype=torch.float32, device=device)
    tokens_per_expert = torch.zeros(0, 0, device=device)
    for index, batch in enumerate(micro_batches):
        set_last_micro_batch(model, index == len(micro_batches) - 1)
        token_mask = batch.token_mask.to(device, non_blocking=True)
        output = model(batch.input_ids.to(device, non_blocking=True), token_mask=token_mask)
        token_loss = token_loss_sum(output.logits, batch.labels.to(device, non_blocking=True))
        if pending is not None:
            pending.wait()
            pending = None
        loss = token_loss / counts[0].clamp(min=1)
        parts = [loss.detach(), loss.new_zeros(()), loss.new_zeros(())]
        if output.router_stats is not None:
            totals = sum_over_ranks(output.router_stats, meshes.dp_group)
            tokens_per_expert = totals.tokens_per_expert if index == 0 else tokens_per_expert + totals.tokens_per_expert
            auxiliary = ((coefficients.load_balance, load_balance_loss), (coefficients.router_z, router_z_loss))
            for place, (coefficient, function) in enumerate(auxiliary, start=1):
                if coefficient > 0:
                    value = function(output.router_stats, totals) / len(micro_batches)
                    parts[place] = value.detach()
                    loss = loss + coefficient * value
        loss.backward()
        losses += torch.stack(parts)
    return _Sums(counts, losses, tokens_per_expert)


def _counts(batch: MicroBatch) -> Tensor:
    return torch.stack([count_label_tokens(batch.labels), batch.token_mask.sum()])


def _to_host(sums: _Sums, grad_norm: Tensor, coefficients: LossCoefficients) -> StepResult:
    """The step's one host synchronisation. float64 holds every count exactly."""
    parts = [sums.counts.double(), sums.losses.double(), grad_norm.double().reshape(1), sums.tokens_per_expert.double().flatten()]
    values = torch.cat(parts).cpu()
    label_tokens, tokens, stop, loss, balance, router_z, norm = values[:7].tolist()
    return StepResult(
        loss=loss,
        load_balance_loss=balance if coefficients.load_balance > 0 else None,
        router_z_loss=router_z if coefficients.router_z > 0 else None,
        grad_norm=norm,
        label_tokens=int(label_tokens),
        tokens=int(tokens),
        tokens_per_expert=values[7:].float().view(sums.tokens_per_expert.shape),
        stop=stop > 0,
    )
