"""The supervisor of a detached run: a process of its own session, so that restarts work without a terminal.

It reads a `Launch` from standard input and answers with one line: the accepted run, or what went wrong.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from shoal import errors
from shoal.cli.client import as_error
from shoal.cli.display import Plain
from shoal.cli.follow import Follower
from shoal.cli.frame import Frame
from shoal.cli.interrupts import Interrupts
from shoal.cli.launch import Launch
from shoal.cli.supervise import Supervisor
from shoal.wire.views import Problem, RunView

ANSWER_S = 90.0
EVERY_S = 1.0
LOG = "supervisor.log"


class Answer(msgspec.Struct, frozen=True):
    """What the supervisor tells the command that started it."""

    run: RunView | None = None
    problem: Problem | None = None


def detach(frame: Frame, launch: Launch) -> int:
    """Start the supervisor in the background, and wait until it has its run accepted."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "shoal.cli.background"],
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
    answer = msgspec.json.decode(said, type=Answer) if said else Answer(problem=Problem("S410", "the supervisor died"))
    if answer.problem is not None:
        raise as_error(answer.problem)
    view = answer.run
    assert view is not None
    lines = [f"run {view.run} is accepted", f"status  shoal status {view.run}", f"logs    shoal logs -f {view.run}"]
    frame.answer(view, lambda: "\n".join([*lines, f"stop    shoal stop {view.run}"]))
    return 0


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
    raise errors.ServiceFailed(f"the run was not accepted within {ANSWER_S:g} s")


def main() -> None:
    """Supervise the launch on standard input until its run is over."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    supervisor = Supervisor(launch)
    with Interrupts() as interrupts:
        try:
            client, view = supervisor.open()
        except errors.ShoalError as error:
            _answer(Answer(problem=Problem(error.code, error.what, error.where, error.why, error.do)))
            sys.exit(error.exit_code)
        try:
            _answer(Answer(run=view))
            since = view.since if launch.resume else 0.0
            with (Path(launch.directory) / LOG).open("a", buffering=1) as log:
                display = Plain(lambda text: print(time.strftime("%F %T"), text, file=log), every_s=60.0)
                seen = Follower(client, view, _WithoutLogs(display), supervisor.tend, since).follow(interrupts, EVERY_S)
        finally:
            supervisor.close(client)
    from shoal.cli.summary import exit_code

    sys.exit(exit_code(seen.view, abandoned=seen.abandoned))


class _WithoutLogs:
    """Members' lines are in their own files already."""

    def __init__(self, inner: Plain) -> None:
        self.story, self.view, self.note, self.close = inner.story, inner.view, inner.note, inner.close

    def logs(self, lines: object) -> None:
        del lines


def _answer(answer: Answer) -> None:
    """Say it, and let go of the pipe, which the command reads to its end."""
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    main()
