"""The setting `batch`: which global batch a run trains with, if not the one that its script asks for."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.batch.goodput import Bounds
from shoal.errors import BadSize

SMALLER, LARGER = 4, 16


@dataclass(frozen=True, slots=True)
class BatchSetting:
    """A global batch to begin with, and the bounds within which it may be chosen while training; None to keep it."""

    size: int
    bounds: Bounds | None = None


def resolve_batch(text: str, size: int, samples: int) -> BatchSetting:
    """What the setting says of a script that asks for `size` out of `samples`: nothing, a number, or ``auto:32:1024``.

    Without bounds of its own, `auto` stays between a quarter and sixteen times the size, and gives every epoch at
    least four steps.
    """
    kind, _, rest = text.strip().partition(":")
    if not kind:
        return BatchSetting(size)
    if kind != "auto":
        return BatchSetting(_number(text, text))
    if not rest:
        most = max(size, min(size * LARGER, samples // 4))
        return BatchSetting(size, (max(1, size // SMALLER), most))
    low, _, high = rest.partition(":")
    bounds = (_number(low, text), _number(high, text))
    if bounds[0] > bounds[1]:
        raise BadSize(f"batch={text!r}", why="the lower bound is above the upper one", do="for example auto:32:1024")
    return BatchSetting(min(max(size, bounds[0]), bounds[1]), (bounds[0], min(bounds[1], samples)))


def _number(text: str, setting: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise BadSize(
            f"batch={setting!r}",
            why=f"{text!r} is not a number of samples",
            do="pass a number, auto, or for example auto:32:1024",
        )
    return int(text)
