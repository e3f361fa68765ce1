"""The loss of a step: sums over label tokens, in fp32, chunk by chunk."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from nemo_moe.testing.tolerances import assert_close_relative
from nemo_moe.train.loss import count_label_tokens, next_token_targets, token_loss_sum

VOCAB = 13


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """[3, 7] with labels on some positions, one row without any."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, VOCAB, generator=generator).to(dtype)
    labels = torch.randint(VOCAB, (3, 7), generator=generator)
    labels[0, :4] = -100
    labels[1] = -100
    return logits, labels


def plain_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("rows_per_chunk", [1, 4, 21, 1000])
def test_sum_and_gradient_equal_plain_cross_entropy_for_every_chunk_size(rows_per_chunk: int) -> None:
    logits, labels = batch()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = token_loss_sum(ours, labels, chunk_elements=rows_per_chunk * VOCAB), plain_sum(theirs, labels)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    assert_close_relative(loss, expected, 1e-6)
    assert ours.grad is not None and theirs.grad is not None
    assert_close_relative(ours.grad, theirs.grad, 1e-6)


def test_bf16_logits_are_summed_in_fp32_and_get_a_bf16_gradient() -> None:
    logits, labels = batch(torch.bfloat16)
    logits.requires_grad_()
    loss = token_loss_sum(logits, labels)
    loss.backward()
    wide = logits.detach().float().requires_grad_()
    plain_sum(wide, labels).backward()
    assert loss.dtype is torch.float32 and logits.grad is not None and logits.grad.dtype is torch.bfloat16
    assert_close_relative(loss, plain_sum(wide, labels), 1e-6)
    assert wide.grad is not None
    assert_close_relative(logits.grad, wide.grad, 2**-8)


def test_a_batch_without_labels_gives_zero_and_zero_gradients() -> None:
    """case B53: no NaN from a mean over nothing."""
    logits, labels = batch()
    logits.requires_grad_()
    loss = token_loss_sum(logits, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and torch.count_nonzero(logits.grad) == 0


def test_ignored_rows_may_hold_nan() -> None:
    logits, labels = batch()
    expected = token_loss_sum(logits, labels)
    spoilt = torch.where((next_token_targets(labels) == -100)[..., None], float("nan"), logits).requires_grad_()
    loss = token_loss_sum(spoilt, labels)
    loss.backward()
    assert loss.item() == expected.item() and spoilt.grad is not None and spoilt.grad.isfinite().all()


def test_labels_are_shifted_once() -> None:
    """The label of a token is predicted at the position before it; a label in the first column has none."""
    labels = torch.tensor([[4, -100, 7, 9], [-100, 2, -100, -100]])
    assert next_token_targets(labels).tolist() == [[-100, 7, 9, -100], [2, -100, -100, -100]]
    assert count_label_tokens(labels).item() == 3
