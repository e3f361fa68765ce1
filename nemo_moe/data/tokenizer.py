"""A small tokenizer trained from the problems of a run: one token a character, and whole phrases of boilerplate.

Letters and digits must stay apart for a small model to spell, sort and add: merges learnt from frequencies (BPE) cut
words and numbers unevenly, and no run with them learnt the tasks. What repeats in the questions of a task is the
opposite case: its common beginning and end, its frequent words and its separators become one token each, which cuts
sequences three- to twentyfold. Both are found from the training data alone, task by task.

A character outside the vocabulary becomes `<unk>`, which shows when decoded; nothing is dropped in silence, and
`data.build_data` reports how many there are. For every text of known characters decode(encode(text)) == text.

Left out on purpose: special-token text inside a question (a user who types "<ans>" gets that token, as in any chat
template), and byte fallback (256 rows of embedding that a tiny model does not need).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_moe.data.reasoning_gym import Problem, boilerplate

PAD, EOS, ANSWER, UNKNOWN = "<pad>", "<eos>", "<ans>", "<unk>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- message['content'] -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '" + ANSWER + "' -}}{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- raise_exception('this chat template knows the roles user and assistant, found ' + message['role']) -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + ANSWER + "' -}}{%- endif -%}"
)

_MIN_SHARE = 0.2  # of a task's items that a word or separator must occur in
_MIN_PHRASE = 2  # characters; one alone is a token already
_WORD = re.compile(r"[^\W\d_]{2,}")
# whole numbers are often printed as 7.0: the ".0" says nothing and belongs to what separates one number from the next
_SEPARATOR = re.compile(r"(?:\.0)?[\W_]{2,}|\.0\b")


def train_tokenizer(problems: Sequence[Problem]) -> PreTrainedTokenizerFast:
    """A tokenizer for the questions and answers of `problems` (the training items alone).

    Returns a tokenizer with pad, eos, unk and `<ans>` tokens of their own and a chat template: a user turn is its
    text, an assistant turn is `<ans>`, its text and eos, the last two inside {% generation %}. It pads on the left, as
    `transformers.generate` wants (`data.loader` pads training batches itself).

    Deterministic: ids depend on the set of characters and phrases alone.
    """
    if not problems:
        raise ValueError("a tokenizer needs at least one problem to be trained from")
    phrases = find_phrases(problems)
    known = set(string.printable) - set("\t\r\x0b\x0c")
    characters = sorted(known.union(*(problem.question + problem.answer for problem in problems)))
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, ANSWER, UNKNOWN, *characters])}

    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, ANSWER, UNKNOWN)])
    # single_word keeps a frequent word from being cut out of a longer one, whose letters must stay apart
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, single_word=phrase.isalpha()) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def find_phrases(problems: Iterable[Problem]) -> list[str]:
    """Boilerplate worth a token of its own, sorted: per task the common beginning and end of its questions (cut back to
    white space), words in at least 20 % of what remains, and separators in at least 20 % of what remains or of
    the answers: runs of two or more characters that are neither letters nor digits, with a ".0" before them."""
    phrases: set[str] = set()
    for _, group in groupby(sorted(problems, key=lambda problem: problem.task), key=lambda problem: problem.task):
        members = list(group)
        prefix, suffix = boilerplate([problem.question for problem in members])
        remainders = [problem.question[len(prefix) : len(problem.question) - len(suffix)] for problem in members]
        phrases.update(phrase for phrase in (prefix, suffix) if len(phrase) >= _MIN_PHRASE)
        phrases.update(_frequent(_WORD, remainders))
        phrases.update(_frequent(_SEPARATOR, remainders))
        phrases.update(_frequent(_SEPARATOR, [problem.answer for problem in members]))
    return sorted(phrases)


def _frequent(pattern: re.Pattern[str], texts: list[str]) -> list[str]:
    counts = Counter(match for text in texts for match in set(pattern.findall(text)))
    return [match for match, count in counts.items() if count >= _MIN_SHARE * len(texts)]
