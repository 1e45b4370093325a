"""Validation of integer arguments, and of the fields of values that arrive from other processes."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

from shoal.errors import BadSize

MAX_COUNT = 1 << 53
MAX_NAME = 256
MAX_ITEMS = 1 << 16


def checked_int(name: str, value: Any, least: int = 1) -> int:
    """Return the value as an integer; raise BadSize, naming the argument, if it is none or less than `least`.

    >>> checked_int("size", 64)
    64
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise BadSize(f"invalid {name}={value!r}", why="it is not an integer", do=f"pass {name}={least} or more")
    if number < least:
        raise BadSize(f"invalid {name}={number}", why=f"it must be at least {least}", do=f"pass {name}={least} or more")
    return number


def check_counts(*numbers: int | None, most: int = MAX_COUNT) -> None:
    """Raise ValueError unless every number is None or within 0 and `most`."""
    for number in numbers:
        if number is not None and not 0 <= number <= most:
            raise ValueError(f"expected an integer from 0 to {most}, got {str(number)[:40]}")


def check_amount(number: float) -> None:
    """Raise ValueError unless the number is finite and not negative."""
    if not 0.0 <= number < math.inf:
        raise ValueError(f"expected a finite number, at least 0, got {number}")


def check_names(*texts: str) -> None:
    """Raise ValueError if a text is too long for a name."""
    for text in texts:
        if len(text) > MAX_NAME:
            raise ValueError(f"expected at most {MAX_NAME} characters, got {len(text)}")


def check_length(*collections: Collection[object], most: int = MAX_ITEMS) -> None:
    """Raise ValueError if a collection has more than `most` items."""
    for items in collections:
        if len(items) > most:
            raise ValueError(f"expected at most {most} items, got {len(items)}")
