"""Checks and their messages. Those of the config dataclasses: each raises ValueError that names the key, what was found and what is legal.

Keys are given as keyword arguments, with `__` for the dots of a recipe's key. None stands for a key that was left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

_LARGEST = 2**63 - 1  # what torch and the standard library take for a whole number

E = TypeVar("E", bound=Enum)


def listed(items: Sequence[str], *, separator: str = ", ", most: int = 8) -> str:
    """The first `most` of them for a message, and how many more there are."""
    rest = len(items) - most
    return separator.join(items[:most]) + (f"{separator}and {rest} more" if rest > 0 else "")


def require(ok: bool, message: str) -> None:
    """Raise ValueError(message) unless `ok`."""
    if not ok:
        raise ValueError(message)


def positive(**values: float | None) -> None:
    """Each is a finite number above 0, and a whole one is below 2^63."""
    for key, value in values.items():
        require(value is None or (value > 0 and _is_usable(value)), f"{_dotted(key)} must be above 0{_limit(value)}, found {value}")


def not_negative(**values: float | None) -> None:
    """Each is a finite number, 0 or above, and a whole one is below 2^63."""
    for key, value in values.items():
        require(value is None or (value >= 0 and _is_usable(value)), f"{_dotted(key)} must be 0 or more{_limit(value)}, found {value}")


def within(low: float, high: float, **values: float | None) -> None:
    """Each is a number from `low` to `high`, both included."""
    for key, value in values.items():
        require(value is None or low <= value <= high, f"{_dotted(key)} must be between {low} and {high}, found {value}")


def sizes(**values: int | None) -> None:
    """Each is a whole number, 1 or more."""
    for key, value in values.items():
        if value is not None:
            require(isinstance(value, int) and not isinstance(value, bool), f"{_dotted(key)} must be a whole number, found {value!r}")
            require(1 <= value <= _LARGEST, f"{_dotted(key)} must be 1 or more{_limit(value)}, found {value}")


def member(kind: type[E], key: str, value: E | str) -> E:
    """`value` as a member of `kind`; a member's own value, as a recipe spells it, will do."""
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{key}: unknown value {value!r} (legal: {', '.join(str(each.value) for each in kind)})") from None


def home_expanded(key: str, path: str) -> Path:
    """`path` with its ~ replaced by the home folder. Raises ValueError naming `key` where nobody knows that folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{key}: {path!r} starts with a home folder that is not known here; write the whole path") from error


def _is_usable(value: float) -> bool:
    return value <= _LARGEST if isinstance(value, int) else math.isfinite(value)


def _limit(value: float | None) -> str:
    return "" if value is None or _is_usable(value) else " and below 2^63" if isinstance(value, int) else " and finite"


def _dotted(key: str) -> str:
    return key.replace("__", ".")
