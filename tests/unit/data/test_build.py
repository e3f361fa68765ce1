"""The digest by which ranks compare their data: it changes with anything that ranks must have alike, and with nothing else."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from nemo_moe.config import DataConfig, TaskConfig
from nemo_moe.data.build import DataBundle, build_data, digest
from nemo_moe.data.chat import Sample
from nemo_moe.data.reasoning_gym import Problem
from nemo_moe.data.tokenizer import train_tokenizer

CONFIG = DataConfig(tasks=[TaskConfig(name="spell_backward", train_size=20)], held_out_per_task=3)


@pytest.fixture(scope="module")
def data() -> DataBundle:
    return build_data(CONFIG, 0)


def test_the_digest_is_that_of_the_data(data: DataBundle) -> None:
    assert digest(build_data(CONFIG, 0)) == digest(data) != digest(build_data(CONFIG, 1))


def test_the_digest_changes_with_each_thing_that_ranks_must_have_alike(data: DataBundle) -> None:
    first = data.train[0]
    moved = [Sample(first.input_ids[:-1], first.labels[:-1]), *data.train[1:]]
    relabelled = [Sample(first.input_ids, [-100, *first.labels[1:-1], -100]), *data.train[1:]]
    other_answer = [*data.held_out[:-1], data.held_out[-1]._replace(answer="x")]
    more_tokens = train_tokenizer([*(Problem(*problem) for problem in data.held_out), Problem("\u00e9", "x", "other")])
    changed = [
        dataclasses.replace(data, train=moved),
        dataclasses.replace(data, train=relabelled),
        dataclasses.replace(data, train=data.train[::-1]),
        dataclasses.replace(data, held_out=other_answer),
        dataclasses.replace(data, held_out_samples=data.held_out_samples[1:]),
        dataclasses.replace(data, tokenizer=more_tokens),
    ]
    assert len({digest(bundle) for bundle in [data, *changed]}) == 1 + len(changed)


PRINT_PROBLEMS = """
from nemo_moe.config import DataConfig, TaskConfig
from nemo_moe.data.reasoning_gym import generate_problems
print(generate_problems(DataConfig(tasks=[TaskConfig(name="ransom_note", train_size=20)], held_out_per_task=3), 0).train)
"""


def test_a_task_that_iterates_over_a_set_follows_the_hash_seed_of_the_process() -> None:
    """Why ranks compare digests, and what the launcher's PYTHONHASHSEED is for."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_PROBLEMS], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("0", "0", "1")
    ]
    first, second, third = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert first == second != third and "Problem(" in third
