"""From the `data` section of a recipe to samples, a held-out set and a tokenizer. Every rank builds them, without communication.

All ranks must come to the same data, and `digest` lets them compare: a task of reasoning-gym that iterates over sets
makes other items where PYTHONHASHSEED differs (`data.reasoning_gym`).
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from nemo_moe.config import DataConfig
from nemo_moe.data.chat import Encoded, Sample, encode_chats, encode_problems, encode_prompts, problem_chat
from nemo_moe.data.reasoning_gym import Problem, generate_problems
from nemo_moe.data.tokenizer import CHAT_TEMPLATE, train_tokenizer


@dataclass(frozen=True)
class DataBundle:
    """The data of a run.

    Attributes:
        train: samples to train on.
        held_out: problems for the exact-match evaluation; none is in `train` (see `data.reasoning_gym`).
        held_out_samples: the same as samples, for the validation loss.
        tokenizer: trained from `train`, or the given one; goes into the saved model's folder.
        train_answers: how often each answer occurs in `train`, most frequent first.
        summary: lines that say what the data is, for the start of a run.
        warnings: lines a user should see: cut samples, samples with nothing to learn, unknown characters.
    """

    train: list[Sample]
    held_out: list[Problem]
    held_out_samples: list[Sample]
    tokenizer: PreTrainedTokenizerFast
    train_answers: Counter[str]
    summary: list[str]
    warnings: list[str]


def build_data(config: DataConfig, seed: int, tokenizer: PreTrainedTokenizerFast | None = None) -> DataBundle:
    """Generate the problems, train the tokenizer from the training part, encode both parts.

    Args:
        tokenizer: the one of the model that is trained further; None trains one.

    Raises:
        ValueError: as `generate_problems` does, and as `encode_chats` does for a tokenizer that was given.
    """
    split = generate_problems(config, seed)
    if tokenizer is None:
        tokenizer = train_tokenizer(split.train)
    encode_prompts(tokenizer, [split.held_out[0].question])  # a template that cannot ask is better known now than after training
    train = _encode(tokenizer, split.train, config.max_length)
    held_out = _encode(tokenizer, split.held_out, config.max_length)
    answers = Counter(problem.answer for problem in split.train)
    tokens = sum(len(sample.input_ids) for sample in train.samples)
    summary = [
        f"data: {len(split.train)} training items of {', '.join(dict.fromkeys(task.name for task in config.tasks))};"
        f" {tokens} tokens, vocabulary {len(tokenizer)}, {len(answers)} distinct answers",
        f"held out: {len(split.held_out)} items with {len({problem.answer for problem in split.held_out})} distinct answers;"
        f" {split.dropped} training items that equal one were dropped ({split.dropped_exact} of them letter by letter)",
    ]
    warnings = [f"training data: {line}" for line in train.warnings(config.max_length)]
    warnings += [f"held-out data: {line}" for line in held_out.warnings(config.max_length)]
    return DataBundle(train.samples, split.held_out, held_out.samples, tokenizer, answers, summary, warnings)


def digest(data: DataBundle) -> str:
    """A hash of all that ranks must have alike: samples, held-out problems, and token ids. About 2 s for 10^6 samples."""
    result = hashlib.sha256()
    for sample in (*data.train, *data.held_out_samples):
        result.update(array("q", [len(sample.input_ids), *sample.input_ids, *sample.labels]).tobytes())
    result.update(json.dumps([data.held_out, sorted(data.tokenizer.get_vocab().items())]).encode())
    return result.hexdigest()


def _encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem], max_length: int) -> Encoded:
    if tokenizer.chat_template == CHAT_TEMPLATE:
        return encode_problems(tokenizer, problems, max_length)
    return encode_chats(tokenizer, [problem_chat(problem) for problem in problems], max_length)
