"""Tries several ways side by side, and takes the first that leads where it should."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

STAGGER_S = 0.25
PROOF_S = 3.0


class NoUrlReachable(Exception):  # noqa: N818 - what it holds are the errors
    """Every way failed; `failures` says how each did."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        super().__init__(", ".join(f"{way}: {error}" for way, error in failures.items()))
        self.failures = failures


async def first(
    ways: Sequence[str],
    open_: Callable[[str, Callable[[], None]], Awaitable[T]],
    close: Callable[[T], Awaitable[object]],
    stagger_s: float = STAGGER_S,
    proof_s: float = PROOF_S,
) -> tuple[str, T]:
    """The first way that opens, and what it opened; others that open as well are closed again.

    The next way is begun when one has failed, or has not answered for a moment: if the first answers, it is the only
    one that is tried. `open_` is given a way and what to call as soon as somebody answers there at all; then there is
    more time, because a coordinator to which a thousand agents come at once is slow, and not to be asked twice.
    """
    clock = asyncio.get_running_loop().time
    waiting, next_at = list(ways), 0.0
    tasks: dict[asyncio.Future[T], str] = {}
    failures: dict[str, Exception] = {}

    def answered() -> None:
        nonlocal next_at
        next_at = clock() + proof_s

    try:
        while waiting or tasks:
            if waiting and (not tasks or clock() >= next_at):
                way, next_at = waiting.pop(0), clock() + stagger_s
                tasks[asyncio.ensure_future(open_(way, answered))] = way
            within_s = max(0.0, next_at - clock()) if waiting else None
            done, _ = await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            # In the order in which they were begun: of two that are there, the better one.
            for task in [one for one in tasks if one in done]:
                error = task.exception()
                if error is None:
                    return tasks.pop(task), task.result()
                if not isinstance(error, Exception):
                    raise error
                failures[tasks.pop(task)], next_at = error, 0.0
    finally:
        await _give_up(list(tasks), close)
    raise NoUrlReachable(failures)


async def _give_up(tasks: list[asyncio.Future[T]], close: Callable[[T], Awaitable[object]]) -> None:
    for task in tasks:
        task.cancel()
    for opened in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(opened, BaseException):
            await close(opened)
