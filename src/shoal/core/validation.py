"""Numbers of things that people ask for: whole, and not too few."""

from __future__ import annotations

import operator
from typing import Any

from shoal.errors import BadSize


def checked_int(name: str, value: Any, least: int = 1) -> int:
    """The value as an integer; BadSize, with the name that it was passed under, if it is none or too small.

    >>> checked_int("size", 64)
    64
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise BadSize(f"{name}={value!r}", why="it is not a whole number", do=f"pass {name}={least} or more")
    if found < least:
        raise BadSize(f"{name}={found}", why=f"it must be at least {least}", do=f"pass {name}={least} or more")
    return found
