"""Start of a detached run, under a supervisor process that outlives this one."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import msgspec

from shoal.errors import ServiceFailed, from_code
from shoal.launch.launch_plan import LaunchPlan
from shoal.wire.api import ErrorView, RunView

REPLY_TIMEOUT_S = 90.0
SUPERVISOR_MODULE = "shoal.cli.background"


class SupervisorReply(msgspec.Struct, frozen=True):
    """The first and only line that a detached supervisor writes: the accepted run, or why there is none."""

    run: RunView | None = None
    problem: ErrorView | None = None


def start_in_background(plan: LaunchPlan) -> RunView:
    """Start the supervisor and block until its run is accepted; raise the error that it reports otherwise."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", SUPERVISOR_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output = _exchange(process, msgspec.json.encode(plan))
    except BaseException:
        process.terminate()
        raise
    if not output:
        raise ServiceFailed("the detached supervisor exited before the run was accepted")
    reply = msgspec.json.decode(output, type=SupervisorReply)
    if reply.problem is not None:
        raise from_code(**msgspec.structs.asdict(reply.problem))
    assert reply.run is not None
    return reply.run


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """Write the request and return all output up to the end of the stream; the process itself lives on."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    process.stdin.close()
    output, deadline = b"", time.monotonic() + REPLY_TIMEOUT_S
    while time.monotonic() < deadline:
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        chunk = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if ready and not chunk:
            return output
        output += chunk
    raise ServiceFailed(f"the run was not accepted within {REPLY_TIMEOUT_S:g} s")
