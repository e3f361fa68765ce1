"""The problem source: determinism, a split without leaks, and messages for what a user mistypes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from nemo_moe.config import DataConfig, TaskConfig
from nemo_moe.data.reasoning_gym import boilerplate, canonical_question, describe_task, generate_problems, task_names

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SORT = {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 9}
WORD = {"min_word_len": 3, "max_word_len": 4}


def mixture(held_out: int = 20, **sizes: int) -> DataConfig:
    params = {"chain_sum": SUM, "number_sorting": SORT, "spell_backward": WORD}
    return DataConfig(
        tasks=[TaskConfig(name=name, train_size=size, params=params[name]) for name, size in sizes.items()], held_out_per_task=held_out
    )


def test_problems_are_the_same_for_the_same_seed_and_differ_for_another() -> None:
    config = mixture(chain_sum=50, number_sorting=50, spell_backward=50)
    assert generate_problems(config, 3) == generate_problems(config, 3)
    assert generate_problems(config, 3).train != generate_problems(config, 4).train
    assert generate_problems(config, 3).held_out != generate_problems(config, 4).held_out


def test_answers_are_right() -> None:
    split = generate_problems(mixture(chain_sum=100, number_sorting=100, spell_backward=100), 0)
    for problem in [*split.train, *split.held_out]:
        if problem.task == "chain_sum":
            left, operator, right = re.search(r"(\d+) ([+-]) (\d+) =", problem.question).groups()  # type: ignore[union-attr]
            assert int(problem.answer) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
        elif problem.task == "spell_backward":
            assert problem.question.endswith(problem.answer[::-1])
        else:
            numbers = [float(text) for text in problem.question.split("order: ")[1].split("\n")[0].split(", ")]
            descending = "descending" in problem.question
            assert problem.answer == str([str(number) for number in sorted(numbers, reverse=descending)])


def test_neighbouring_seeds_share_no_run_of_items() -> None:
    # item i of the package is a function of seed + i: with start seeds 0 and 1 all items but one would be shared
    first = {problem.question for problem in generate_problems(mixture(number_sorting=300), 0).train}
    second = {problem.question for problem in generate_problems(mixture(number_sorting=300), 1).train}
    assert len(first & second) < 0.3 * len(first)


def test_no_training_item_equals_a_held_out_one_up_to_order_and_case() -> None:
    split = generate_problems(mixture(held_out=30, chain_sum=800, number_sorting=800, spell_backward=800), 1)

    def key(question: str) -> tuple[object, ...]:  # written apart from the code under test, one rule a task
        if "backward" in question:
            return ("word", question.split()[-1].lower())
        if "Sort" in question:
            return ("list", "descending" in question, tuple(sorted(question.split("order: ")[1].split("\n")[0].split(", "))))
        left, operator, right = re.search(r"(\d+) ([+-]) (\d+)", question).groups()  # type: ignore[union-attr]
        return (operator, tuple(sorted((left, right))))

    held_out = [key(problem.question) for problem in split.held_out]
    assert len(held_out) == len(set(held_out)) == 90
    assert not set(held_out) & {key(problem.question) for problem in split.train}
    assert split.dropped == 2400 - len(split.train)
    assert 0 < split.dropped_exact < split.dropped, "a space this small must have collided, in both ways"


def test_dropping_removes_nothing_else() -> None:
    config = mixture(held_out=30, chain_sum=800)
    split = generate_problems(config, 1)
    held_out = {canonical_question(problem.question) for problem in split.held_out}
    assert not held_out & {canonical_question(problem.question) for problem in split.train}
    # one-digit sums with two operators: 10 + 45 pairs each in any order, the held-out 30 of them gone, all others there
    assert len({canonical_question(problem.question) for problem in split.train}) == 2 * 55 - 30


def test_canonical_question_ignores_operand_order_list_order_and_case_but_not_the_operator() -> None:
    assert canonical_question("What is 12 + 34 =") == canonical_question("What is 34 + 12 =")
    assert canonical_question("12 - 34") == canonical_question("34 - 12")
    assert canonical_question("12 - 34") != canonical_question("12 + 34")
    assert canonical_question("Sort: [1.0, 3.0, 2.0]") == canonical_question("sort: [3.0, 2.0, 1.0]")
    assert canonical_question("Sort: 1.0, 3.0") != canonical_question("Sort: 1.0, 3.0, 3.0")
    assert canonical_question("backward: Cat") == canonical_question("backward: cat")
    assert canonical_question("backward: cat") != canonical_question("backward: act")


def test_boilerplate_never_divides_a_word_or_number() -> None:
    assert boilerplate(["add 12 and 5.0\nnow", "add 13 and 7.0\nnow"]) == ("add ", "\nnow")
    assert boilerplate(["same text", "same text"]) == ("same text", "")
    assert boilerplate(["a b", "c d"]) == ("", "")
    assert boilerplate(["what is it", "what is it not"]) == ("what is it", "")


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("chain_sums", {}, ["'chain_sums'", "did you mean 'chain_sum'", "python -m nemo_moe.data.reasoning_gym"]),
        ("chain_sum", {"min_term": 2}, ["'chain_sum'", "'min_term'", "did you mean 'min_terms'", "max_digits"]),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, ["'chain_sum'", "max_terms must be >= min_terms"]),
        ("chain_sum", {"min_terms": "two"}, ["'chain_sum'", "'two'"]),
        ("chain_sum", {"seed": 3}, ["'seed'", "train_size"]),
        ("rush_hour", {}, ["'rush_hour'", "no reference answer"]),
    ],
)
def test_bad_tasks_are_one_clear_error(name: str, params: dict[str, object], expected: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        generate_problems(DataConfig(tasks=[TaskConfig(name=name, train_size=5, params=params)], held_out_per_task=2), 0)
    for text in expected:
        assert text in str(error.value)


def test_a_question_space_too_small_for_the_held_out_set_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        generate_problems(mixture(held_out=200, chain_sum=100), 0)
    assert "'chain_sum' gave only" in str(error.value)
    assert "held_out_per_task is 200" in str(error.value)


def test_a_held_out_set_that_leaves_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        generate_problems(mixture(held_out=110, chain_sum=100), 0)
    assert "every training item of 'chain_sum' equals a held-out one" in str(error.value)


def test_a_task_is_described_with_its_parameters_and_an_item() -> None:
    described = describe_task("chain_sum")
    assert "min_terms: 2" in described
    assert "seed:" not in described
    assert "answer: " in described
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        describe_task("chain_summ")


def test_the_module_lists_the_tasks() -> None:
    listed = subprocess.run([sys.executable, "-m", "nemo_moe.data.reasoning_gym"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == task_names()
    assert listed.stderr == ""
