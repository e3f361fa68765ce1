"""The tokenizer of a run: round trips, phrases, the chat template against what training uses, and transformers' own loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nemo_moe.config import DataConfig, TaskConfig
from nemo_moe.data.build import DataBundle, build_data
from nemo_moe.data.chat import encode_prompts, problem_chat
from nemo_moe.data.reasoning_gym import Problem, generate_problems
from nemo_moe.data.tokenizer import find_phrases, train_tokenizer

CONFIG = DataConfig(
    tasks=[
        TaskConfig(name="spell_backward", train_size=300, params={"min_word_len": 3, "max_word_len": 5}),
        TaskConfig(
            name="number_sorting",
            train_size=300,
            params={"min_numbers": 3, "max_numbers": 4, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 9},
        ),
        TaskConfig(name="chain_sum", train_size=300, params={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}),
    ],
    held_out_per_task=10,
)


@pytest.fixture(scope="module")
def bundle() -> DataBundle:
    return build_data(CONFIG, 0)


@pytest.fixture(scope="module")
def tokenizer(bundle: DataBundle) -> PreTrainedTokenizerFast:
    return bundle.tokenizer


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_every_text_of_known_characters_survives_a_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [problem.question + "|" + problem.answer for problem in generate_problems(CONFIG, 0).train[::20]]
    texts += [
        "",
        " ",
        "  two  spaces ",
        "line\n\nbreak\n",
        "a , b ' c .",
        "ascendingorder descendings",
        "'m n't , . ?",
        "".join(map(chr, range(32, 127))),
    ]
    for text in texts:
        assert tokenizer.decode(ids(tokenizer, text)) == text


def test_boilerplate_is_one_token_and_letters_and_digits_stay_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("Spell this word backward (example: sun -> nus): order") == [
        "Spell this word backward (example: sun -> nus): ",
        "order",
    ]
    assert tokenizer.tokenize("orders reorder")[:6] == list("orders"), "a frequent word is not cut out of a longer one"
    assert tokenizer.tokenize("State the final answer to the following arithmetic problem: 12 + 34 =")[1:] == [
        "1",
        "2",
        " + ",
        "3",
        "4",
        " =",
    ]
    assert tokenizer.tokenize("['1.0', '3.0']") == ["['", "1", ".0', '", "3", ".0']"]
    assert tokenizer.tokenize("descending order: 7.0, 1.0") == ["descending", " ", "order", ": ", "7", ".0, ", "1", ".0"]
    for digit in "0123456789":
        assert len(ids(tokenizer, digit)) == 1


def test_phrases_follow_the_task_and_not_the_mixture() -> None:
    rare = [Problem(f"Rare: {word} now please?", word, "rare") for word in ("dog", "cat", "cow", "owl", "hen")]
    common = [Problem(f"say {number}!", str(number), "common") for number in range(2000, 2400)]
    phrases = find_phrases([*common, *rare, *common])
    assert {"Rare: ", " now please?"} <= set(phrases), "also of a task that is a small part of the mixture"
    assert "dog" in phrases, "one of five remainders is 20 %"
    assert not any(character.isdigit() for phrase in phrases for character in phrase), "a number that varies is never a phrase"


def test_tokenizer_does_not_depend_on_the_order_of_the_problems() -> None:
    problems = generate_problems(CONFIG, 0).train
    assert train_tokenizer(problems).get_vocab() == train_tokenizer(problems[::-1]).get_vocab()


def test_pad_eos_answer_and_unknown_are_four_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """case B56: padding never looks like the end token."""
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == ("<pad>", "<eos>", "<unk>")
    special = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.get_vocab()["<ans>"]}
    assert special == {0, 1, 2, 3}
    assert len(tokenizer) == len(tokenizer.get_vocab()) == max(tokenizer.get_vocab().values()) + 1


def test_a_character_outside_the_vocabulary_is_shown_and_not_lost(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded = ids(tokenizer, "aéb\t")
    assert encoded.count(tokenizer.unk_token_id) == 2
    assert tokenizer.decode(encoded) == "a<unk>b<unk>"
    learnt = train_tokenizer([Problem("naïve", "é\t", "words")])
    assert learnt.decode(ids(learnt, "ïé\ta")) == "ïé\ta", "characters of the data are known"


def test_the_chat_template_gives_the_ids_that_training_used(bundle: DataBundle, tokenizer: PreTrainedTokenizerFast) -> None:
    problems = generate_problems(CONFIG, 0).train
    assert len(problems) == len(bundle.train)
    for index in range(0, len(problems), 37):
        chat = problem_chat(problems[index])
        rendered = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        sample = bundle.train[index]
        assert rendered["input_ids"] == sample.input_ids
        assert [label != -100 for label in sample.labels] == [bool(learnt) for learnt in rendered["assistant_masks"]]
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompt == sample.input_ids[: len(prompt)] == encode_prompts(tokenizer, [problems[index].question])[0]
        assert sample.labels[: len(prompt)] == [-100] * len(prompt)
        assert tokenizer.decode(sample.input_ids[len(prompt) :]) == problems[index].answer + "<eos>"


def test_a_chat_of_two_turns_and_an_unknown_role(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}, {"role": "user", "content": " q2"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "q1<ans>a1<eos> q2<ans>"
    with pytest.raises(Exception, match="found system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_save_and_load_with_transformers_gives_the_same_tokenizer(
    bundle: DataBundle, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    # beside a config.json, as in a model folder: AutoTokenizer must not prefer the tokenizer usual for that model type
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "vocab_size": len(tokenizer)}))
    problems = generate_problems(CONFIG, 0).train
    for loaded in (PreTrainedTokenizerFast.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == tokenizer.get_vocab()
        assert (loaded.pad_token_id, loaded.eos_token_id, loaded.padding_side) == (tokenizer.pad_token_id, tokenizer.eos_token_id, "left")
        assert loaded.chat_template == tokenizer.chat_template
        for index in range(0, len(problems), 97):
            chat = problem_chat(problems[index])
            assert loaded.apply_chat_template(chat, return_dict=True)["input_ids"] == bundle.train[index].input_ids
            assert loaded.decode(bundle.train[index].input_ids) == problems[index].question + "<ans>" + problems[index].answer + "<eos>"
        assert loaded.decode(ids(loaded, "  a , b\n 'm ")) == "  a , b\n 'm "
        assert set(loaded("a")) == {"input_ids", "attention_mask"}, "model.generate refuses token_type_ids"


def test_a_tokenizer_needs_problems() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        train_tokenizer([])
