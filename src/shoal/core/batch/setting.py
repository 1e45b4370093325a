"""Setting `batch`: the global batch of a run, if not the one that its script asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.core.batch.goodput import Bounds
from shoal.errors import BadSize

# Default bounds of `auto`, relative to the size that the script asks for.
MAX_SHRINK, MAX_GROWTH = 4, 16
MIN_STEPS_PER_EPOCH = 4


@dataclass(frozen=True, slots=True)
class BatchSetting:
    """A global batch to start with, and the bounds within which it may change; None to keep it."""

    size: int
    bounds: Bounds | None = None


def resolve_batch(text: str, size: int, samples: int) -> BatchSetting:
    """Return the batch of a script that asks for `size` out of `samples`, given the text of the setting.

    The text is empty, a number, ``auto``, or with bounds ``auto:32:1024``. Without bounds, `auto` stays between a
    quarter and sixteen times the size, and leaves every epoch at least four steps. Raises `BadSize` for other texts.
    """
    text = text.strip()
    kind, _, rest = text.partition(":")
    if not kind:
        return BatchSetting(size)
    if kind != "auto":
        return BatchSetting(_number(text, text))
    if not rest:
        most = max(size, min(size * MAX_GROWTH, samples // MIN_STEPS_PER_EPOCH))
        return BatchSetting(size, (max(1, size // MAX_SHRINK), most))
    low, _, high = rest.partition(":")
    bounds = (_number(low, text), _number(high, text))
    if bounds[0] > bounds[1]:
        raise BadSize(
            f"invalid value for batch: {text!r}",
            why="the lower bound is above the upper one",
            do="for example auto:32:1024",
        )
    return BatchSetting(min(max(size, bounds[0]), bounds[1]), (bounds[0], min(bounds[1], samples)))


def _number(text: str, setting: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or int(text) < 1:
        raise BadSize(
            f"invalid value for batch: {setting!r}",
            why=f"expected a number of samples ≥ 1, not {text!r}",
            do="set it to a number, auto, or for example auto:32:1024",
        )
    return int(text)
