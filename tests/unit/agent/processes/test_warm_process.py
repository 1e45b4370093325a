"""The agent's side of the zygote, with a writer that answers in the zygote's place."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from shoal.agent.processes import warm_process
from shoal.agent.processes.warm_process import WarmProcess
from shoal.agent.processes.zygote_messages import ChildExited, ForkFailed, ForkRequest, ForkStarted
from shoal.errors import WarmProcessFailed

REQUEST = ForkRequest("k", ("train.py",), False, "/", {}, "/dev/null", "/dev/null", 1)


class Writer:
    """Writer to a zygote that answers each request with a report."""

    def __init__(self, process: WarmProcess, report: Any) -> None:
        self._process, self._report = process, report

    def write(self, data: bytes) -> None:
        del data
        if self._report is not None:
            self._process._receive(self._report)

    async def drain(self) -> None:
        return


def warm(report: Any) -> tuple[WarmProcess, list[tuple[str, int]], list[tuple[str, int]]]:
    started: list[tuple[str, int]] = []
    exits: list[tuple[str, int]] = []
    process = WarmProcess((), {}, lambda *start: started.append(start), lambda *exit: exits.append(exit))
    process._writer = Writer(process, report)  # type: ignore[assignment]
    process._up.set()
    return process, started, exits


async def start(report: Any, timeout_s: float = 30.0) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    process, started, exits = warm(report)
    await process.start(REQUEST, timeout_s)
    for _ in range(2):
        process._receive(ChildExited("k", 41, 9))
    return started, exits


def test_start_and_exit_of_a_member_are_reported_once() -> None:
    assert asyncio.run(start(ForkStarted("k", 41))) == ([("k", 41)], [("k", 9)])


def test_fork_that_fails_is_raised_with_its_cause() -> None:
    with pytest.raises(WarmProcessFailed, match="cannot start a member") as error:
        asyncio.run(start(ForkFailed("k", "Cannot allocate memory")))
    assert error.value.why == "Cannot allocate memory"


def test_member_that_does_not_start_in_time_is_an_error() -> None:
    with pytest.raises(WarmProcessFailed, match="did not start within 0 s"):
        asyncio.run(start(None, timeout_s=0.01))


def test_status_of_an_adopted_child_is_its_own_and_sigkill_if_unknown() -> None:
    pid = os.fork()
    if not pid:
        os._exit(3)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert os.waitstatus_to_exitcode(warm_process._status_of(pid)) == 3
    assert warm_process._status_of(pid) == 9
