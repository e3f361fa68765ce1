"""Loss masks, truncation and counts."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from nemo_moe.config import DataConfig, TaskConfig
from nemo_moe.data.build import build_data
from nemo_moe.data.chat import encode_chats, encode_problems, problem_chat
from nemo_moe.data.loader import collate
from nemo_moe.data.reasoning_gym import Problem
from nemo_moe.data.tokenizer import train_tokenizer

PROBLEMS = [Problem(f"add {a} and {b} now", str(a + b), "add") for a in range(8, 12) for b in range(90, 95)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(PROBLEMS)


def test_only_the_answer_and_its_end_are_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = encode_problems(tokenizer, PROBLEMS[:1], max_length=64).samples[0]
    learnt = [token for token, label in zip(sample.input_ids, sample.labels, strict=True) if label != -100]
    assert tokenizer.decode(learnt) == "98<eos>"
    assert tokenizer.decode(sample.input_ids) == "add 8 and 90 now<ans>98<eos>"


def test_the_fast_way_equals_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    fast = encode_problems(tokenizer, [*PROBLEMS, *PROBLEMS], max_length=9)
    assert fast == encode_chats(tokenizer, [problem_chat(problem) for problem in [*PROBLEMS, *PROBLEMS]], max_length=9)


def test_every_answer_of_a_chat_is_learnt(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "user", "content": "add 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "add 3"},
        {"role": "assistant", "content": "44"},
    ]
    sample = encode_chats(tokenizer, [chat], max_length=64).samples[0]
    learnt = [token for token, label in zip(sample.input_ids, sample.labels, strict=True) if label != -100]
    assert tokenizer.decode(learnt) == "2<eos>44<eos>"


def test_a_cut_sample_is_counted_and_one_without_labels_too(tokenizer: PreTrainedTokenizerFast) -> None:
    """case B53: a limit shorter than the prompt leaves nothing to learn, and says so."""
    lengths = [len(sample.input_ids) for sample in encode_problems(tokenizer, PROBLEMS, max_length=64).samples]
    whole, some, none = (encode_problems(tokenizer, PROBLEMS, max_length=limit) for limit in (max(lengths), max(lengths) - 1, 4))
    assert (whole.truncated, whole.without_labels) == (0, 0)
    assert whole.warnings(max(lengths)) == []
    assert (some.truncated, some.without_labels) == (lengths.count(max(lengths)), 0)
    assert (none.truncated, none.without_labels) == (len(PROBLEMS), len(PROBLEMS))
    assert len(none.samples) == len(PROBLEMS), "the samples stay: leaving them out would hide the mistake"
    assert all(len(sample.input_ids) == len(sample.labels) == 4 for sample in none.samples)
    assert any(f"{len(PROBLEMS)} of {len(PROBLEMS)} samples have no answer token left" in line for line in none.warnings(4))


def test_build_data_reports_what_was_cut() -> None:
    """case B53"""
    config = DataConfig(tasks=[TaskConfig(name="spell_backward", train_size=20)], held_out_per_task=5, max_length=3)
    bundle = build_data(config, 0)
    assert len(bundle.train) == 20
    assert any(line.startswith("training data: 20 of 20 samples have no answer token") for line in bundle.warnings)
    assert any(line.startswith("held-out data: 5 of 5 samples have no answer token") for line in bundle.warnings)
    config.max_length = 64
    assert build_data(config, 0).warnings == []


def test_the_tokenizer_of_a_model_is_used_with_its_own_template() -> None:
    given = train_tokenizer([Problem("", "".join(map(chr, range(32, 127))), "letters")])
    given.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}A: "
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
        "{% else %}Q: {{ message['content'] }} {% endif %}{% endfor %}"
    )
    config = DataConfig(tasks=[TaskConfig(name="spell_backward", train_size=20)], held_out_per_task=5, max_length=128)
    bundle = build_data(config, 0, tokenizer=given)
    assert bundle.tokenizer is given
    for sample in bundle.train:
        text = given.decode(sample.input_ids)
        answer = given.decode([label for label in sample.labels if label != -100]).removesuffix("<eos>")
        assert text == f"Q: Spell this word backward (example: sun -> nus): {answer[::-1]} A: {answer}<eos>"


def test_unknown_characters_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = encode_problems(tokenizer, [Problem("add é", "1", "add")], max_length=64)
    assert encoded.unknown == 1
    assert "1 characters are not in the tokenizer's vocabulary" in encoded.warnings(64)[0]


def test_the_answer_marker_inside_a_question_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="<ans>"):
        encode_problems(tokenizer, [Problem("what is <ans>?", "1", "add")], max_length=64)


def test_padding_that_has_the_end_tokens_id_does_not_unlearn_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    """case B56: answers of different length, a tokenizer whose padding is its end token."""
    samples = encode_problems(
        tokenizer, [Problem("add 1 and 1 now", "2", "add"), Problem("add 1 and 9999 now", "10000", "add")], 64
    ).samples
    eos = tokenizer.eos_token_id
    batch = collate(samples, pad_id=eos)
    for row, sample in enumerate(samples):
        end = len(sample.input_ids) - 1
        assert batch.labels[row, end] == eos
        assert (batch.labels[row, end + 1 :] == -100).all()
        assert batch.token_mask[row].sum() == end + 1
    assert (batch.labels == eos).sum() == 2


def test_a_template_without_generation_marks_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    """case B55: a stock template does not tell whose tokens are whose; refused, not masked all or nothing."""
    stock = train_tokenizer(PROBLEMS)
    stock.chat_template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="generation"):
        encode_chats(stock, [problem_chat(PROBLEMS[0])], max_length=64)
    stock.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        encode_chats(stock, [problem_chat(PROBLEMS[0])], max_length=64)


def test_an_empty_insert_of_the_template_is_not_learnt() -> None:
    """case B54: what the template itself adds before the marks carries the ignore label."""
    tokenizer = train_tokenizer(PROBLEMS)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}<think></think>"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    sample = encode_chats(tokenizer, [problem_chat(PROBLEMS[0])], max_length=64).samples[0]
    learnt = [token for token, label in zip(sample.input_ids, sample.labels, strict=True) if label != -100]
    assert "<think></think>98<eos>" in tokenizer.decode(sample.input_ids)
    assert tokenizer.decode(learnt) == "98<eos>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% generation %}{{ messages }}{% endgeneration %}{% if %}", "TemplateSyntaxError"),
        ("{% generation %}{{ raise_exception('no such chats') }}{% endgeneration %}", "no such chats"),
    ],
)
def test_a_chat_template_that_cannot_render_is_named_with_its_reason(template: str, reason: str) -> None:
    given = train_tokenizer(PROBLEMS)
    given.chat_template = template
    with pytest.raises(ValueError, match=f"chat template cannot render chats of the roles user, assistant .*{reason}"):
        encode_chats(given, [problem_chat(PROBLEMS[0])], max_length=64)


def test_a_chat_template_that_cannot_ask_is_refused_before_training() -> None:
    given = train_tokenizer([Problem("", "".join(map(chr, range(32, 127))), "letters")])
    given.chat_template = (
        "{% if add_generation_prompt %}{{ raise_exception('answers only') }}{% endif %}{% for message in messages %}"
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endfor %}"
    )
    config = DataConfig(tasks=[TaskConfig(name="spell_backward", train_size=20)], held_out_per_task=5, max_length=128)
    with pytest.raises(ValueError, match="cannot render chats of the roles user .*answers only"):
        build_data(config, 0, tokenizer=given)
