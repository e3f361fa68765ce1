"""Chats -> token ids and labels: only what the assistant writes, its end token included, is learnt.

The mask comes from the {% generation %} marks of the tokenizer's chat template, by position: neither the value of a
token nor a comparison of two renderings decides, so an end token keeps its label also where it doubles as padding.

Labels stand at the positions of their tokens; the loss shifts them.

Left out on purpose: templates without the marks (refused: half a mask is worse than none), tool calls, packing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_moe.data import IGNORE_INDEX
from nemo_moe.data.reasoning_gym import Problem
from nemo_moe.data.tokenizer import ANSWER, CHAT_TEMPLATE

_NO_LIMIT = 2**31
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")

Chat = list[dict[str, str]]


class Sample(NamedTuple):
    """Ids of a sequence, and per position the id to learn or -100."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Encoded:
    """Samples in the order of the chats, and what happened to them.

    Attributes:
        samples: none is left out, also not one without labels.
        truncated: samples cut to max_length.
        without_labels: samples that have nothing to learn (any more).
        unknown: tokens that the vocabulary does not know, over all samples.
    """

    samples: list[Sample]
    truncated: int
    without_labels: int
    unknown: int

    def warnings(self, max_length: int) -> list[str]:
        """One line for each thing that a user would want to know."""
        total, lines = len(self.samples), []
        if self.truncated:
            lines.append(f"{self.truncated} of {total} samples are longer than data.max_length ({max_length}) and were cut")
        if self.without_labels:
            lines.append(
                f"{self.without_labels} of {total} samples have no answer token left to learn: they do not change the loss;"
                " raise data.max_length or remove them"
            )
        if self.unknown:
            lines.append(f"{self.unknown} characters are not in the tokenizer's vocabulary and were read as unknown")
        return lines


def problem_chat(problem: Problem) -> list[dict[str, str]]:
    """The question as the user's turn, the answer as the assistant's."""
    return [{"role": "user", "content": problem.question}, {"role": "assistant", "content": problem.answer}]


def encode_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], max_length: int) -> Encoded:
    """Render, tokenize and mask chats of any number of turns with the tokenizer's chat template.

    Raises:
        ValueError: the tokenizer has no chat template, one without {% generation %} marks, or one that cannot render the chats.

    Cost: about 0.1 ms a chat; `encode_problems` is for many short ones.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ValueError("the tokenizer has no chat template; set tokenizer.chat_template to one with {% generation %} marks")
    if not _GENERATION_MARK.search(template):
        raise ValueError(
            "the tokenizer's chat template has no {% generation %} marks, so it does not tell which tokens are the assistant's;"
            " put {% generation %} and {% endgeneration %} around the assistant's text and end token in tokenizer.chat_template"
        )
    pieces = _apply_template(tokenizer, chats, return_assistant_tokens_mask=True)
    samples = [
        Sample(ids, [token if learnt else IGNORE_INDEX for token, learnt in zip(ids, mask, strict=True)])
        for ids, mask in zip(pieces["input_ids"], pieces["assistant_masks"], strict=True)
    ]
    return _finish(samples, max_length, tokenizer.unk_token_id)


def encode_problems(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], max_length: int) -> Encoded:
    """`encode_chats` of `problem_chat(problem)`; fast where the template is that of `data.tokenizer`.

    For that one, its only form is rendered by hand and each different text tokenized once; a sample of each task is
    compared with what the template itself gives.

    Raises:
        ValueError: as `encode_chats`; the answer marker's own text in a question or answer.
    """
    if tokenizer.chat_template != CHAT_TEMPLATE:
        return encode_chats(tokenizer, [problem_chat(problem) for problem in problems], max_length)
    eos, answer_id = str(tokenizer.eos_token), tokenizer.get_vocab()[ANSWER]
    texts = [problem.question + ANSWER + problem.answer + eos for problem in problems]
    unique = list(dict.fromkeys(texts))
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(unique, add_special_tokens=False)
    samples: dict[str, Sample] = {}
    for text, encoding in zip(unique, encodings, strict=True):
        ids = encoding.ids
        if ids.count(answer_id) != 1:
            raise ValueError(f"a question or answer contains the text {ANSWER!r}, which marks where answers begin: {text!r}")
        start = ids.index(answer_id) + 1
        samples[text] = Sample(ids, [IGNORE_INDEX] * start + ids[start:])
    encoded = [samples[text] for text in texts]

    one_of_each_task = {problem.task: index for index, problem in enumerate(problems)}.values()
    checked = encode_chats(tokenizer, [problem_chat(problems[index]) for index in one_of_each_task], max_length=_NO_LIMIT)
    assert checked.samples == [encoded[index] for index in one_of_each_task], "the chat template gives other ids than the data"
    return _finish(encoded, max_length, tokenizer.unk_token_id)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> list[list[int]]:
    """Ids of the chat template up to the point where the assistant writes, one list for each question.

    Raises ValueError where the template cannot render them.
    """
    if not questions:
        return []  # the template call wants at least one chat
    chats = [[{"role": "user", "content": question}] for question in questions]
    return list(_apply_template(tokenizer, chats, add_generation_prompt=True)["input_ids"])


def _apply_template(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], **options: Any) -> Any:
    """What the chat template gives, as ids. A template is a program of the user's: whatever it raises becomes ValueError."""
    try:
        return tokenizer.apply_chat_template(list(chats), tokenize=True, return_dict=True, **options)
    except Exception as error:
        roles = ", ".join(dict.fromkeys(message["role"] for chat in chats for message in chat))
        raise ValueError(
            f"the tokenizer's chat template cannot render chats of the roles {roles} ({type(error).__name__}: {error});"
            " repair tokenizer.chat_template"
        ) from error


def _finish(samples: list[Sample], max_length: int, unknown_id: int | None) -> Encoded:
    truncated = sum(len(sample.input_ids) > max_length for sample in samples)
    if truncated:
        samples = [Sample(sample.input_ids[:max_length], sample.labels[:max_length]) for sample in samples]
    without_labels = sum(sample.labels.count(IGNORE_INDEX) == len(sample.labels) for sample in samples)
    unknown = sum(sample.input_ids.count(unknown_id) for sample in samples) if unknown_id is not None else 0
    return Encoded(samples, truncated, without_labels, unknown)
