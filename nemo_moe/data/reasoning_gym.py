"""Question/answer problems with verifiable answers from the package reasoning-gym: a source that needs no download.

A task makes item i from the random seed `seed + i`. Two data sets of one task whose seeds differ by less than their
size therefore share items; so training items come from the lower half of the 32-bit seeds and held-out items from the
upper half, each at an offset that is a hash of the run's seed and the task. Small question spaces collide even so:
every training item is compared with the held-out ones and dropped when it equals one up to operand order, list order
or letter case (`canonical_question`). That is stricter than comparing strings, yet it cannot make a small space large:
what it leaves is held-out *items*, not held-out numbers or words.

Some tasks iterate over sets (such as ransom_note, isomorphic_strings, knight_swap, polynomial_multiplication), so their
items depend on PYTHONHASHSEED too, which Python draws anew for every process where it is not set. The ranks of a run compare
what they made (`data.build.digest`); to repeat such a run, set PYTHONHASHSEED to the same number.

Left out on purpose: the package's own partial scores (an answer is right when it equals the reference string) and
tasks that name no reference answer.

`python -m nemo_moe.data.reasoning_gym` lists the tasks; with a task's name, its parameters and one item.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_moe.config import HALF_OF_SEEDS, HELD_OUT_TRIES, DataConfig, TaskConfig

_SEPARATORS = re.compile(r"[\s,;:!?()\[\]{}'\"`]+")
_SENTENCE_END = re.compile(r"\.(?!\S)")
_RESERVED = ("seed", "size")
_CUT_WORD = re.compile(r"\S+$")
_LIST_COMMAND = "python -m nemo_moe.data.reasoning_gym"


class Problem(NamedTuple):
    """A question, its one reference answer, and the name of the task it comes from."""

    question: str
    answer: str
    task: str


@dataclass(frozen=True)
class Split:
    """Generated problems.

    Attributes:
        train: in the order of the tasks in the config; a question may occur more than once.
        held_out: distinct questions, `held_out_per_task` for each entry of the config, in the same order.
        dropped: training items removed because they equal a held-out one (`canonical_question`).
        dropped_exact: those among them whose question is the very same string.
    """

    train: list[Problem]
    held_out: list[Problem]
    dropped: int
    dropped_exact: int


def generate_problems(config: DataConfig, seed: int) -> Split:
    """Generate the mixture of `config.tasks`; the same problems for the same (config, seed) and, for some tasks, PYTHONHASHSEED.

    Raises:
        ValueError: an unknown task (with the nearest name), an unknown or bad parameter, a task without reference
            answers, or a question space too small for the held-out set or to leave anything to train on.

    Cost: 20 to 60 microseconds an item for the simple tasks.
    """
    check_tasks(config)
    held_out: dict[str, Problem] = {}
    for index, task in enumerate(config.tasks):
        _add_held_out(held_out, task, index, config.held_out_per_task, seed)

    train: list[Problem] = []
    dropped = dropped_exact = 0
    for index, task in enumerate(config.tasks):
        problems = _problems(task, _start_seed(seed, index, task.name, task.train_size), task.train_size)
        kept, exact = _without(problems, [problem for problem in held_out.values() if problem.task == task.name])
        dropped += len(problems) - len(kept)
        dropped_exact += exact
        if not kept:
            raise ValueError(
                f"data.tasks: every training item of {task.name!r} equals a held-out one; its parameters {dict(task.params)} allow too few"
                " questions: widen them or lower data.held_out_per_task"
            )
        train += kept
    return Split(train=train, held_out=list(held_out.values()), dropped=dropped, dropped_exact=dropped_exact)


def check_tasks(config: DataConfig) -> None:
    """Raise ValueError for a task that there is not, or a parameter that it has not, with the nearest name.

    Makes no items, so a launcher can ask before there are ranks, and a typo in the last task costs no time for the first.
    """
    for task in config.tasks:
        _check_task(task)


def canonical_question(question: str) -> str:
    """A question without letter case, order of words and numbers, and the punctuation between them.

    "12 + 34" and "34 + 12" agree, as do "12 - 34" and "34 - 12" (the same operator on the same two numbers), a list in
    another order, and "Cat" and "cat".
    """
    words = _SEPARATORS.split(_SENTENCE_END.sub(" ", question.lower()))
    return " ".join(sorted(filter(None, words)))


def boilerplate(questions: Sequence[str]) -> tuple[str, str]:
    """The longest beginning and the longest end (of what remains) that all `questions` share, cut back to white space,
    so that no word or number is divided."""
    prefix = _common_beginning(questions)
    suffix = _common_beginning([question[len(prefix) :][::-1] for question in questions])[::-1]
    return prefix, suffix


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # in alphabetical order: what these two share, all share
    prefix = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    if any(len(text) > len(prefix) and not text[len(prefix)].isspace() for text in texts):
        return _CUT_WORD.sub("", prefix)
    return prefix


def _without(problems: list[Problem], held_out: list[Problem]) -> tuple[list[Problem], int]:
    """The problems that equal no held-out one by `canonical_question`, and how many went by their very string.

    What all questions share decides nothing and is cut off first: it is most of the text, and this runs per item.
    """
    questions = dict.fromkeys(problem.question for problem in problems)
    forbidden = {problem.question for problem in held_out}
    prefix, suffix = boilerplate([*questions, *forbidden])
    keep = slice(len(prefix), -len(suffix) or None)
    canonical = {canonical_question(question[keep]) for question in forbidden}
    equal = {question for question in questions if canonical_question(question[keep]) in canonical}
    return [problem for problem in problems if problem.question not in equal], sum(problem.question in forbidden for problem in problems)


def task_names() -> list[str]:
    """The names of all tasks, sorted."""
    return sorted(_tasks())


def _tasks() -> dict[str, tuple[type, type]]:
    from reasoning_gym.factory import DATASETS  # imports a hundred task modules: about a second, so only when used

    return DATASETS


def _check_task(task: TaskConfig) -> None:
    tasks = _tasks()
    if task.name not in tasks:
        near = difflib.get_close_matches(task.name, list(tasks), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"data.tasks: unknown task {task.name!r}{hint} List all {len(tasks)} with: {_LIST_COMMAND}")
    legal = {field.name for field in dataclasses.fields(tasks[task.name][1])} - set(_RESERVED)
    for key in task.params:
        if key in _RESERVED:
            raise ValueError(
                f"data.tasks: {task.name!r} sets the parameter {key!r}, which comes from the recipe's keys seed and train_size; remove it"
            )
        if key not in legal:
            near = difflib.get_close_matches(str(key), sorted(legal), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"data.tasks: {task.name!r} has no parameter {key!r}{hint} (legal: {', '.join(sorted(legal))})")


def _problems(task: TaskConfig, start_seed: int, size: int) -> list[Problem]:
    """`size` problems of a task. The package checks values by assert and by whatever breaks on them: all become ValueError."""
    from reasoning_gym import create_dataset

    try:
        dataset = create_dataset(task.name, seed=start_seed, size=size, **task.params)
        items = [dataset[index] for index in range(size)]
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"data.tasks: {task.name!r} cannot be generated with the parameters {dict(task.params)}: {reason}") from error
    for item in items:
        if not isinstance(item["answer"], str) or not item["answer"]:
            raise ValueError(
                f"data.tasks: {task.name!r} gives no reference answer for an item (several may be right), so exact match cannot judge it;"
                " take another task"
            )
    return [Problem(item["question"], item["answer"], task.name) for item in items]


def _add_held_out(held_out: dict[str, Problem], task: TaskConfig, index: int, wanted: int, seed: int) -> None:
    """Add `wanted` problems that are distinct under `canonical_question`, keyed by task and it."""
    have, tried = 0, 0
    start_seed = HALF_OF_SEEDS + _start_seed(seed, index, task.name, wanted * HELD_OUT_TRIES)
    while have < wanted and tried < wanted * HELD_OUT_TRIES:
        for problem in _problems(task, start_seed + tried, wanted):
            key = f"{task.name}: {canonical_question(problem.question)}"
            if have < wanted and key not in held_out:
                held_out[key] = problem
                have += 1
        tried += wanted
    if have < wanted:
        raise ValueError(
            f"data.tasks: {task.name!r} gave only {have} distinct questions in {tried} tries with the parameters {dict(task.params)};"
            f" data.held_out_per_task is {wanted}: lower it or widen the parameters"
        )


def _start_seed(seed: int, index: int, name: str, size: int) -> int:
    """An offset in [0, 2^31 - size] that depends on the run's seed, the place in the mixture and the name."""
    digest = hashlib.sha256(f"{seed}/{index}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (HALF_OF_SEEDS - size + 1)


def describe_task(name: str) -> str:
    """Parameters with their defaults and one item of a task, as text. Raises ValueError for an unknown name."""
    _check_task(TaskConfig(name=name, train_size=1))
    fields = [field for field in dataclasses.fields(_tasks()[name][1]) if field.name not in _RESERVED]
    lines = [f"{name}: parameters and their defaults"]
    lines += [f"  {field.name}: {_default(field)!r}" for field in fields]
    problem = _problems(TaskConfig(name=name, train_size=1), 0, 1)[0]
    return "\n".join([*lines, f"question: {problem.question}", f"answer: {problem.answer}"])


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


if __name__ == "__main__":
    try:
        print(describe_task(sys.argv[1]) if len(sys.argv) > 1 else "\n".join(task_names()))
    except ValueError as error:
        sys.exit(f"error: {error}")
