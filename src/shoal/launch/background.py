"""Starts a launch in the background, under a supervisor of its own that outlives us."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import msgspec

from shoal.errors import ServiceFailed
from shoal.launch.api_client import as_error
from shoal.launch.launch_plan import LaunchPlan
from shoal.wire.api import ErrorView, RunView

ANSWER_S = 90.0
SUPERVISOR = "shoal.cli.background"


class SupervisorReply(msgspec.Struct, frozen=True):
    """What the supervisor tells who started it."""

    run: RunView | None = None
    problem: ErrorView | None = None


def begin(launch: LaunchPlan) -> RunView:
    """Start the supervisor, and wait until it has its run accepted."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", SUPERVISOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        said = _hear(process, msgspec.json.encode(launch))
    except BaseException:
        process.terminate()
        raise
    answer = (
        msgspec.json.decode(said, type=SupervisorReply)
        if said
        else SupervisorReply(problem=ErrorView("S410", "the supervisor died"))
    )
    if answer.problem is not None:
        raise as_error(answer.problem)
    assert answer.run is not None
    return answer.run


def _hear(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """What the supervisor answers before it closes its end; it goes on living."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question)
    process.stdin.close()
    said, deadline = b"", time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if ready and not part:
            return said
        said += part
    raise ServiceFailed(f"the run was not accepted within {ANSWER_S:g} s")
