"""Validation of integer arguments."""

from __future__ import annotations

import operator
from typing import Any

from shoal.errors import BadSize


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
