"""How a generator that is closed tells `break` and `return` from an exception."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import pytest

from shoal.worker.training.loop_exit import left_on_purpose

Make = Callable[[], Iterator[int]]
SEEN: list[bool] = []


def batches() -> Iterator[int]:
    try:
        yield from range(3)
    finally:
        if sys.exc_info()[0] is GeneratorExit:
            SEEN.append(left_on_purpose())


def wrapped() -> Iterator[int]:
    """Iterate as a progress bar does."""
    for number in batches():
        yield number + 1


def breaks(make: Make) -> None:
    for _ in make():
        break


def returns(make: Make) -> int:
    for number in make():
        with contextlib.nullcontext():
            return number
    return -1


def breaks_in_a_handler(make: Make) -> None:
    for _ in make():
        try:
            int("x")
        except ValueError:
            break


def raises(make: Make) -> None:
    for _ in make():
        raise ValueError


def fails_in_a_call(make: Make) -> None:
    for _ in make():
        int("x")


def fails_in_finally(make: Make) -> None:
    for number in make():
        try:
            int("x")
        finally:
            SEEN.append(number is None)
            SEEN.pop()


def exits(make: Make) -> None:
    for _ in make():
        sys.exit(0)


@pytest.mark.parametrize(
    "make", [batches, wrapped, lambda: enumerate(batches())], ids=["plain", "wrapped", "enumerate"]
)
@pytest.mark.parametrize(
    ("leave", "on_purpose"),
    [
        (breaks, True),
        (returns, True),
        (breaks_in_a_handler, True),
        (raises, False),
        (fails_in_a_call, False),
        (fails_in_finally, False),
        (exits, False),
    ],
)
def test_break_and_return_are_told_from_an_exception(
    make: Make, leave: Callable[[Make], object], on_purpose: bool
) -> None:
    SEEN.clear()
    with contextlib.suppress(ValueError, SystemExit):
        leave(make)
    assert [on_purpose] == SEEN
