"""The supervisor of a detached run: a process of its own session, so that restarts work without a terminal.

It reads a `Launch` from standard input and answers with one line: the accepted run, or what went wrong.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec

from shoal import errors
from shoal.cli.follower import Follower
from shoal.cli.options import OutputOptions
from shoal.cli.output.lines import PlainOutput
from shoal.cli.signals import SignalCounter
from shoal.launch import background as launch_background
from shoal.launch.background import SupervisorReply
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor
from shoal.wire.api import ErrorView

EVERY_S = 1.0
LOG = "supervisor.log"


def detach(frame: OutputOptions, launch: LaunchPlan) -> int:
    """Start the supervisor in the background, and wait until it has its run accepted."""
    view = launch_background.begin(launch)
    lines = [f"run {view.run} is accepted", f"status  shoal status {view.run}", f"logs    shoal logs -f {view.run}"]
    frame.answer(view, lambda: "\n".join([*lines, f"stop    shoal stop {view.run}"]))
    return 0


def main() -> None:
    """Supervise the launch on standard input until its run is over."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchPlan)
    supervisor = Supervisor(launch)

    def say(text: str) -> None:
        with (Path(launch.directory) / LOG).open("a") as log:
            print(time.strftime("%F %T"), text, file=log)

    with SignalCounter() as interrupts:
        try:
            client, view = supervisor.open()
        except errors.ShoalError as error:
            _answer(SupervisorReply(problem=ErrorView(error.code, error.what, error.where, error.why, error.do)))
            sys.exit(error.exit_code)
        try:
            _answer(SupervisorReply(run=view))
            since = view.since if launch.resume else 0.0
            display = _NoLogDisplay(PlainOutput(say, every_s=60.0))
            seen = Follower(client, view, display, supervisor.tend, since).follow(interrupts, EVERY_S)
        finally:
            supervisor.close(client, say)
        with contextlib.suppress(errors.FetchFailed):
            supervisor.bring_back()
    from shoal.cli.output.summary import exit_code

    sys.exit(exit_code(seen.view, abandoned=seen.abandoned))


class _NoLogDisplay:
    """Members' lines are in their own files already."""

    def __init__(self, inner: PlainOutput) -> None:
        self.story, self.view, self.note, self.close = inner.story, inner.view, inner.note, inner.close

    def logs(self, lines: object) -> None:
        del lines


def _answer(answer: SupervisorReply) -> None:
    """Say it, and let go of the pipe, which the command reads to its end."""
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    main()
