"""The text at the end of a run: how good it got, what it answers, where it lies and how to load it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nemo_moe.data.reasoning_gym import Problem, boilerplate
from nemo_moe.train.evaluate import ExactMatch


class Accuracy(NamedTuple):
    """Held-out exact match before and after training, and what always giving the most frequent answer would score.

    `before` is None where nobody looked: the run goes on from a checkpoint of one that did not.
    """

    before: ExactMatch | None
    after: ExactMatch
    frequent_answer: str
    frequent_accuracy: float


def accuracy_lines(accuracy: Accuracy, problems: Sequence[Problem], show: int) -> list[str]:
    """The score against its baseline, by task, and `show` answers spread over the tasks."""
    lines = [
        f"held-out exact match ({len(problems)} items):",
        *([f"  before training        {accuracy.before.accuracy:7.1%}"] if accuracy.before is not None else []),
        f"  after training         {accuracy.after.accuracy:7.1%}   "
        + ", ".join(f"{task} {share:.1%}" for task, share in accuracy.after.per_task.items()),
        f"  most frequent answer   {accuracy.frequent_accuracy:7.1%}   (always answering {accuracy.frequent_answer!r})",
    ]
    if show > 0:
        lines.append("sample answers:")
    questions = _shown_questions(problems)
    for index in _spread(len(problems), show):
        problem, answer = problems[index], accuracy.after.answers[index]
        verdict = "right" if answer == problem.answer else f"wrong, expected {problem.answer!r}"
        lines.append(f"  {problem.task}: {questions[index]} -> {'(no end)' if answer is None else repr(answer)}  ({verdict})")
    return lines


def load_command(model_folder: Path, question: str) -> str:
    """A shell command that loads the saved folder with transformers, by the interpreter that runs now, and answers a question."""
    # Texts in double quotes, so that the shell's single quotes around the whole need no escapes.
    folder, text = json.dumps(str(model_folder)), json.dumps(question)
    code = "; ".join(
        (
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"folder = {folder}",
            "model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)",
            f'chat = [{{"role": "user", "content": {text}}}]',
            'inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]))",
        )
    )
    return shlex.join([sys.executable or "python", "-c", code])


def _spread(total: int, wanted: int) -> list[int]:
    """`wanted` indices spread evenly over range(total); problems are ordered by task."""
    wanted = min(total, wanted)
    return [(2 * number + 1) * total // (2 * wanted) for number in range(wanted)]


def _shown_questions(problems: Sequence[Problem]) -> list[str]:
    """Each question on one line, without the beginning and end that all questions of its task share."""
    by_task: dict[str, list[str]] = {}
    for problem in problems:
        by_task.setdefault(problem.task, []).append(problem.question)
    around = {task: boilerplate(questions) for task, questions in by_task.items()}
    shown = []
    for problem in problems:
        prefix, suffix = around[problem.task]
        shown.append(" ".join(problem.question[len(prefix) : len(problem.question) - len(suffix)].split()))
    return shown
