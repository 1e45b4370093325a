"""Connection to the first of several addresses that works, as in "happy eyeballs" (RFC 8305).

Addresses are tried in order. The next one is started when one has failed, or has not answered for `STAGGER_S`; so if
the first answers, no other is tried. One that answers gets `PROOF_S` more to prove that it is the coordinator: with a
thousand agents connecting at once it is slow, and must not be asked twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

STAGGER_S = 0.25
PROOF_S = 3.0


class NoUrlReachable(Exception):  # noqa: N818 - it carries the errors
    """No address worked; `failures` has the error of each."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        super().__init__(", ".join(f"{url}: {error}" for url, error in failures.items()))
        self.failures = failures


async def first(
    urls: Sequence[str],
    open_: Callable[[str, Callable[[], None]], Awaitable[T]],
    close: Callable[[T], Awaitable[object]],
    stagger_s: float = STAGGER_S,
    proof_s: float = PROOF_S,
) -> tuple[str, T]:
    """Return the first address that opens, and what `open_` returned; close others that open as well.

    `open_` gets an address and a function to call as soon as any answer arrives. Raise `NoUrlReachable` if all fail.
    """
    clock = asyncio.get_running_loop().time
    waiting, next_at = list(urls), 0.0
    tasks: dict[asyncio.Future[T], str] = {}
    failures: dict[str, Exception] = {}

    def on_answer() -> None:
        nonlocal next_at
        next_at = clock() + proof_s

    try:
        while waiting or tasks:
            if waiting and (not tasks or clock() >= next_at):
                url, next_at = waiting.pop(0), clock() + stagger_s
                tasks[asyncio.ensure_future(open_(url, on_answer))] = url
            within_s = max(0.0, next_at - clock()) if waiting else None
            done, _ = await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            # In the order of the addresses: the earlier is the better one.
            for task in [task for task in tasks if task in done]:
                error = task.exception()
                if error is None:
                    return tasks.pop(task), task.result()
                if not isinstance(error, Exception):
                    raise error
                failures[tasks.pop(task)], next_at = error, 0.0
    finally:
        await _give_up(list(tasks), close)
    raise NoUrlReachable({url: failures[url] for url in urls})


async def _give_up(tasks: list[asyncio.Future[T]], close: Callable[[T], Awaitable[object]]) -> None:
    for task in tasks:
        task.cancel()
    for opened in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(opened, BaseException):
            await close(opened)
