"""Next-token cross-entropy as a sum in fp32, without a second copy of the logits in fp32.

The loss of an optimizer step is the sum of all token losses divided by the number of label tokens of that step, over
ranks and accumulation: every label token weighs the same wherever it was computed. So this module returns sums, and
the loop divides once (`train.step`).

With a vocabulary of 150k the logits are the largest tensor of a run. Converting them to fp32 whole, as the plain
`cross_entropy(logits.float())` does, keeps two more copies of twice their size; here rows are converted a chunk at a
time and backward makes the softmax again from the saved logsumexp, so beside the logits there is only their gradient.

Left out on purpose: label smoothing, a fused projection + loss (the logits are the model's output), double backward.

B batch, S sequence, V vocabulary, N = B*S rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_moe.data import IGNORE_INDEX

# fp32 elements of one chunk: 128 MiB, at which the GPU is busy with each chunk and the copy does not matter.
CHUNK_ELEMENTS = 2**25


def next_token_targets(labels: Tensor) -> Tensor:
    """Shift labels so that row s holds what position s has to predict; the last position predicts nothing.

    Args:
        labels: [B, S] int64, aligned with the input (labels[b, s] is the token at s, or -100). Not modified.

    Returns:
        [B, S] int64. Shifting the labels spares a copy of the logits without their last position.
    """
    targets = torch.full_like(labels, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    return targets


def count_label_tokens(labels: Tensor) -> Tensor:
    """How many tokens of labels [B, S] are predicted: [] int64. A label in the first column has nothing before it."""
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def token_loss_sum(logits: Tensor, labels: Tensor, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """Sum of the next-token losses of all label tokens; 0 (with zero gradients) where there are none.

    Args:
        logits: [B, S, V] in any floating type. Not modified; the only large tensor kept for backward.
        labels: [B, S] int64, not shifted, -100 where nothing is to be learnt.
        chunk_elements: fp32 elements converted at a time.

    Returns:
        [] fp32, differentiable once in logits; the gradient has the type of the logits.
    """
    vocab_size = logits.shape[-1]
    rows_per_chunk = max(1, chunk_elements // vocab_size)
    loss: Tensor = _TokenLossSum.apply(logits.reshape(-1, vocab_size), next_token_targets(labels).reshape(-1), rows_per_chunk)
    return loss


class _TokenLossSum(torch.autograd.Function):
    """logits [N, V], targets [N] -> sum of losses; masked rows may hold anything, NaN included."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows_per_chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        log_sums = []
        for rows, wanted in zip(logits.split(rows_per_chunk), targets.split(rows_per_chunk), strict=True):
            scores = rows.float()
            log_sum = scores.logsumexp(dim=-1)
            chosen = scores.gather(1, wanted.clamp(min=0).unsqueeze(1)).squeeze(1)
            total += (log_sum - chosen).masked_fill(wanted == IGNORE_INDEX, 0.0).sum()
            log_sums.append(log_sum)
        ctx.save_for_backward(logits, targets, torch.cat(log_sums) if log_sums else total.new_empty(0))
        ctx.rows_per_chunk = rows_per_chunk
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_sums = ctx.saved_tensors
        grad = torch.empty_like(logits)
        chunks = (tensor.split(ctx.rows_per_chunk) for tensor in (logits, targets, log_sums, grad))
        for rows, wanted, log_sum, grad_rows in zip(*chunks, strict=True):
            ignored = (wanted == IGNORE_INDEX).unsqueeze(1)
            probs = (rows.float() - log_sum.unsqueeze(1)).exp_()
            index = wanted.clamp(min=0).unsqueeze(1)
            probs.scatter_add_(1, index, torch.full_like(index, -1, dtype=probs.dtype))
            grad_rows.copy_(probs.mul_(grad_total).masked_fill_(ignored, 0.0))
        return grad, None, None
