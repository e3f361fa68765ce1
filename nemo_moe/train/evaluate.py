"""Exact match of greedy answers on held-out problems, under any parallelism, and the baseline it must beat.

A forward is a collective under expert parallelism and FSDP, so all ranks run the same number of forwards: questions are
dealt to the data-parallel ranks, a rank without questions runs rows of padding, and a batch ends when every rank's rows
have ended. Rows are padded on the right; with causal attention padding changes nothing before it, and the next token
is read from the logits at a row's last position.

Limits: no KV cache, so each token costs a forward over the whole row: right for short answers. An answer counts only
when it equals the reference to the letter and the model ends it itself.

B rows of this rank, S their length so far, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from nemo_moe.data.chat import encode_prompts
from nemo_moe.data.reasoning_gym import Problem

_EVALUATION_BATCH = 128


def _no_check() -> None:
    """Nothing can interrupt."""


@dataclass(frozen=True)
class ExactMatch:
    """Held-out accuracy.

    Attributes:
        accuracy: the share of problems whose answer equals the reference.
        per_task: the same for each task.
        answers: what the model answered, in the order of the problems; None where it did not come to an end.
    """

    accuracy: float
    per_task: dict[str, float]
    answers: list[str | None]


def exact_match(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    device: torch.device | str = "cpu",
    dp_group: dist.ProcessGroup | None = None,
    batch_size: int = _EVALUATION_BATCH,
    check: Callable[[], None] = _no_check,
) -> ExactMatch:
    """Answer all problems greedily and compare. Collective over all ranks; every rank gets the whole result.

    Generation may run to the length of the longest reference answer and its end token, no further.

    Args:
        check: called before each forward on all ranks; what it raises (on all of them) ends the evaluation.

    Raises:
        ValueError: no problems.
    """
    if not problems:
        raise ValueError("exact match needs at least one held-out problem")
    longest = max(len(ids) for ids in tokenizer([problem.answer for problem in problems], add_special_tokens=False)["input_ids"])
    questions = [problem.question for problem in problems]
    answers = greedy_answers(
        model, tokenizer, questions, max_new_tokens=longest + 1, device=device, dp_group=dp_group, batch_size=batch_size, check=check
    )
    right: dict[str, list[bool]] = {}
    for problem, answer in zip(problems, answers, strict=True):
        right.setdefault(problem.task, []).append(answer == problem.answer)
    total = sum(sum(hits) for hits in right.values())
    return ExactMatch(total / len(problems), {task: sum(hits) / len(hits) for task, hits in right.items()}, answers)


@torch.no_grad()
def greedy_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[str],
    *,
    max_new_tokens: int,
    device: torch.device | str = "cpu",
    dp_group: dist.ProcessGroup | None = None,
    batch_size: int = _EVALUATION_BATCH,
    check: Callable[[], None] = _no_check,
) -> list[str | None]:
    """The most probable token at each position until the end token, for each question. Collective over all ranks.

    Args:
        model: called as model(input_ids [B, S] int64, token_mask [B, S] bool), its result has `.logits` [B, S, V]. Put
            into evaluation mode for the time being.
        questions: all of them, the same on every rank.
        max_new_tokens: generated tokens per answer, end token included.
        dp_group: the ranks that answer different questions; ranks outside it (tensor parallel) repeat their work. None
            is one process.
        batch_size: rows of one forward on one rank.
        check: see `exact_match`.

    Returns:
        The answers in the order of the questions, on every rank; None for one that has no end token in time. Special
        tokens inside an answer are spelt out, so they do not pass for a right answer.

    Cost: at most ceil(questions / ranks / batch_size) * max_new_tokens forwards, and a small all-reduce for each.
    """
    rank, ranks = (dist.get_rank(dp_group), dist.get_world_size(dp_group)) if dp_group is not None else (0, 1)
    prompts = encode_prompts(tokenizer, questions)
    mine = prompts[rank::ranks]
    each = math.ceil(len(prompts) / ranks)
    eos = int(tokenizer.eos_token_id)
    generated = torch.full((each, max_new_tokens), eos, dtype=torch.int64)
    ended = torch.zeros((each, 1), dtype=torch.int64)
    training = model.training
    model.eval()
    try:
        for start in range(0, each, batch_size):
            rows = slice(start, min(start + batch_size, each))
            tokens, done = _generate(model, mine[rows], rows.stop - start, max_new_tokens, eos, torch.device(device), dp_group, check)
            generated[rows], ended[rows] = tokens.cpu(), done.cpu()[:, None].to(torch.int64)
    finally:
        model.train(training)
    if dp_group is None:
        everyone = [torch.cat([generated, ended], dim=1)]
    else:
        packed = torch.cat([generated, ended], dim=1).to(device)
        everyone = [torch.empty_like(packed) for _ in range(ranks)]
        dist.all_gather(everyone, packed, group=dp_group)
    rows_of_rank = [part.tolist() for part in everyone]
    in_order = [rows_of_rank[index % ranks][index // ranks] for index in range(len(prompts))]
    return [str(tokenizer.decode(row[: row.index(eos)], skip_special_tokens=False)) if row[-1] else None for row in in_order]


def _generate(
    model: nn.Module,
    prompts: list[list[int]],
    num_rows: int,
    max_new_tokens: int,
    eos: int,
    device: torch.device,
    dp_group: dist.ProcessGroup | None,
    check: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """Generate for up to `num_rows` prompts; rows without a prompt are padding throughout.

    Returns:
        tokens [num_rows, max_new_tokens], filled with eos after the end; ended [num_rows] bool: whether a row's eos is
        its own.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts] + [0] * (num_rows - len(prompts)), device=device)
    width = max([1, *(len(prompt) for prompt in prompts)]) + max_new_tokens
    ids = torch.full((num_rows, width), eos, dtype=torch.int64)  # the mask, not the value, says what is a token
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    ids = ids.to(device)
    starts, rows = lengths.clone(), torch.arange(num_rows, device=device)
    active = lengths > 0
    ended = torch.zeros_like(active)
    columns = torch.arange(width, device=device)
    for _ in range(max_new_tokens):
        check()
        longest = max(1, int(lengths.max()))
        mask = columns[:longest] < lengths[:, None]
        logits = model(ids[:, :longest], mask).logits
        following = logits[rows, (lengths - 1).clamp(min=0)].argmax(dim=-1)
        ids[rows[active], lengths[active]] = following[active]
        lengths = lengths + active
        ended = ended | (active & (following == eos))
        active = active & ~ended
        if not _any_rank(active.any(), dp_group):
            break
    place = starts[:, None] + torch.arange(max_new_tokens, device=device)
    tokens = torch.where(place < lengths[:, None], ids.gather(1, place.clamp(max=width - 1)), eos)
    return tokens, ended


def _any_rank(flag: Tensor, dp_group: dist.ProcessGroup | None) -> bool:
    if dp_group is None:
        return bool(flag)
    count = flag.to(torch.int64)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
    return bool(count)


def most_frequent_answer_accuracy(train_answers: Mapping[str, int], held_out: Sequence[Problem]) -> tuple[str, float]:
    """The training set's most frequent answer, and the held-out accuracy of always giving it.

    Args:
        train_answers: answer -> how often it occurs in the training set; of several most frequent ones the first.
    """
    if not train_answers or not held_out:
        raise ValueError("the most frequent answer needs training answers and held-out problems")
    answer = Counter(train_answers).most_common(1)[0][0]
    return answer, sum(problem.answer == answer for problem in held_out) / len(held_out)
