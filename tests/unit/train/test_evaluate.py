"""Greedy answers and exact match: against a plain loop, against transformers, and dealt over real ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_moe.data.chat import encode_prompts
from nemo_moe.data.reasoning_gym import Problem
from nemo_moe.data.tokenizer import train_tokenizer
from nemo_moe.testing.run_distributed import run_distributed
from nemo_moe.train.evaluate import exact_match, greedy_answers, most_frequent_answer_accuracy

PROBLEMS = [Problem(f"give {'x' * (1 + a % 5)} {a}", str(a), "even" if a % 2 == 0 else "odd") for a in range(23)]


class HashModel(nn.Module):
    """Next token = a hash of all tokens before it, end token about every fifth time; counts forwards.

    With a process group each forward is a collective, as under expert parallelism: ranks that disagree on the number
    of forwards hang or mix up their sums.
    """

    def __init__(self, vocab_size: int, eos: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.vocab_size, self.eos, self.group, self.forwards = vocab_size, eos, group, 0

    def following(self, tokens: list[int]) -> int:
        digest = hashlib.sha256(str(tokens).encode()).digest()
        return self.eos if digest[0] < 50 else 10 + digest[1] % (self.vocab_size - 10)

    def forward(self, input_ids: Tensor, token_mask: Tensor) -> SimpleNamespace:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.forwards += 1
        if self.group is not None:
            check = torch.tensor([self.forwards])
            dist.all_reduce(check, group=self.group)
            assert int(check) == self.forwards * dist.get_world_size(self.group)
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, mask in enumerate(token_mask):
            length = int(mask.sum())
            assert mask[:length].all(), "padding is on the right"
            for last in range(length):
                logits[row, last, self.following(input_ids[row, : last + 1].tolist())] = 1.0
        return SimpleNamespace(logits=logits)


def plain_answers(model: HashModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], max_new_tokens: int) -> list[str | None]:
    """One question at a time, one token at a time."""
    answers: list[str | None] = []
    for prompt in encode_prompts(tokenizer, questions):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens and (len(tokens) == len(prompt) or tokens[-1] != model.eos):
            tokens.append(model.following(tokens))
        answers.append(tokenizer.decode(tokens[len(prompt) : -1]) if tokens[-1] == model.eos else None)
    return answers


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(PROBLEMS)


QUESTIONS = [problem.question for problem in PROBLEMS]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batched_answers_equal_a_plain_loop(tokenizer: PreTrainedTokenizerFast, batch_size: int) -> None:
    model = HashModel(len(tokenizer), tokenizer.eos_token_id)
    expected = plain_answers(model, tokenizer, QUESTIONS, 6)
    assert greedy_answers(model, tokenizer, QUESTIONS, max_new_tokens=6, batch_size=batch_size) == expected
    assert None in expected, "some must not come to an end in time"
    assert len(set(map(str, expected))) > 5


def test_the_mode_of_the_model_is_restored(tokenizer: PreTrainedTokenizerFast) -> None:
    model = HashModel(len(tokenizer), tokenizer.eos_token_id)
    for mode in (True, False):
        model.train(mode)
        greedy_answers(model, tokenizer, QUESTIONS[:2], max_new_tokens=2)
        assert model.training is mode


def test_generation_stops_when_all_rows_have_ended(tokenizer: PreTrainedTokenizerFast) -> None:
    model = HashModel(len(tokenizer), tokenizer.eos_token_id)
    answered = [question for question in QUESTIONS if plain_answers(model, tokenizer, [question], 3) != [None]]
    assert answered
    greedy_answers(model, tokenizer, answered, max_new_tokens=50)
    assert model.forwards <= 3


def test_no_questions_are_no_forwards(tokenizer: PreTrainedTokenizerFast) -> None:
    model = HashModel(len(tokenizer), tokenizer.eos_token_id)
    assert greedy_answers(model, tokenizer, [], max_new_tokens=5) == []
    assert model.forwards == 0


def test_answers_equal_those_of_transformers_generate(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3MoeForCausalLM(config).eval()

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor, token_mask: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(input_ids=input_ids, attention_mask=token_mask.long()).logits)

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True, padding=True, return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    with torch.no_grad():
        # random weights hardly ever end: put the end token in the place of one that is generated now and then
        output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
        replaced = Counter(output[:, start + 1 :].flatten().tolist()).most_common(4)[3][0]
        model.lm_head.weight[tokenizer.eos_token_id] = 1.5 * model.lm_head.weight[replaced]
        output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    ours = greedy_answers(Adapter(), tokenizer, QUESTIONS, max_new_tokens=8, batch_size=10)
    theirs: list[str | None] = []
    for row in output[:, start:].tolist():
        theirs.append(tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) if tokenizer.eos_token_id in row else None)
    assert ours == theirs
    assert None in theirs
    assert len(set(theirs)) > 3


def test_exact_match_counts_per_task_and_in_all(tokenizer: PreTrainedTokenizerFast) -> None:
    model = HashModel(len(tokenizer), tokenizer.eos_token_id)
    answers = plain_answers(model, tokenizer, QUESTIONS, 3)
    # give the model's own answer as the reference of every third problem, so that those are right
    problems = [
        problem._replace(answer=answer) if index % 3 == 0 and answer is not None and len(answer) <= 2 else problem
        for index, (problem, answer) in enumerate(zip(PROBLEMS, answers, strict=True))
    ]
    right = [problem.answer == answer for problem, answer in zip(problems, answers, strict=True)]
    assert 0 < sum(right) < len(right)
    result = exact_match(model, tokenizer, problems)
    assert result.answers == answers
    assert result.accuracy == sum(right) / len(right)
    for task in ("even", "odd"):
        of_task = [hit for hit, problem in zip(right, problems, strict=True) if problem.task == task]
        assert result.per_task[task] == sum(of_task) / len(of_task)


def test_a_special_token_in_an_answer_is_not_overlooked(tokenizer: PreTrainedTokenizerFast) -> None:
    class PadsFirst(HashModel):
        def following(self, tokens: list[int]) -> int:
            answer = [tokenizer.get_vocab()["5"], tokenizer.pad_token_id, self.eos]
            marker = tokenizer.get_vocab()["<ans>"]
            return answer[len(tokens) - 1 - tokens.index(marker)] if marker in tokens else self.eos

    result = exact_match(PadsFirst(len(tokenizer), tokenizer.eos_token_id), tokenizer, [PROBLEMS[5], PROBLEMS[10]])
    assert result.answers == ["5<pad>", "5<pad>"]
    assert result.accuracy == 0.0


def _answers_on_this_rank(count: int, batch_size: int) -> tuple[list[str | None], int, float]:
    tokenizer = train_tokenizer(PROBLEMS)
    model = HashModel(len(tokenizer), tokenizer.eos_token_id, dist.group.WORLD)
    answers = greedy_answers(model, tokenizer, QUESTIONS[:count], max_new_tokens=6, batch_size=batch_size, dp_group=dist.group.WORLD)
    forwards = model.forwards
    accuracy = exact_match(model, tokenizer, PROBLEMS[:count], batch_size=batch_size, dp_group=dist.group.WORLD).accuracy
    return answers, forwards, accuracy


@pytest.mark.parametrize(("count", "batch_size"), [(23, 5), (3, 100), (1, 2)])
def test_ranks_share_the_questions_and_all_get_all_answers(tokenizer: PreTrainedTokenizerFast, count: int, batch_size: int) -> None:
    model = HashModel(len(tokenizer), tokenizer.eos_token_id)
    expected = plain_answers(model, tokenizer, QUESTIONS[:count], 6)
    accuracy = exact_match(model, tokenizer, PROBLEMS[:count]).accuracy
    results = run_distributed(_answers_on_this_rank, 2, count, batch_size)
    assert [result[0] for result in results] == [expected, expected]
    assert results[0][1] == results[1][1] > 0, "as many forwards on every rank, also without questions"
    assert [result[2] for result in results] == [accuracy, accuracy]


def test_most_frequent_answer() -> None:
    held_out = [Problem("a", "7", "t"), Problem("b", "7", "t"), Problem("c", "8", "t"), Problem("d", "9", "t")]
    assert most_frequent_answer_accuracy({"9": 1, "7": 3, "8": 3}, held_out) == ("7", 0.5)
    assert most_frequent_answer_accuracy({"1": 3, "7": 2}, held_out) == ("1", 0.0)
    with pytest.raises(ValueError, match="training answers and held-out problems"):
        most_frequent_answer_accuracy({}, held_out)


def test_exact_match_needs_problems(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="at least one held-out problem"):
        exact_match(HashModel(len(tokenizer), tokenizer.eos_token_id), tokenizer, [])
