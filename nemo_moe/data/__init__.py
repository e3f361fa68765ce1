"""The data of a run: problems, chats, tokenizer, loader. A label of IGNORE_INDEX is not learnt."""

IGNORE_INDEX = -100
