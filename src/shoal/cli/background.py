"""The supervisor process of a detached run, and the command that starts it.

The process has a session of its own, so restarts work after the terminal is gone. It reads a `LaunchPlan` from standard
input and replies with one `SupervisorReply`: the accepted run, or what went wrong.
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
from shoal.launch.background import SupervisorReply, start_in_background
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor
from shoal.wire.api import ErrorView

POLL_S = 1.0
PROGRESS_EVERY_S = 60.0
LOG = "supervisor.log"


def detach(output: OutputOptions, plan: LaunchPlan) -> int:
    """Start the supervisor, block until its run is accepted, and print how to reach it; return the exit code."""
    view = start_in_background(plan)
    lines = [f"run {view.run} accepted", f"status  shoal status {view.run}", f"logs    shoal logs -f {view.run}"]
    output.result(view, lambda: "\n".join([*lines, f"stop    shoal stop {view.run}"]))
    return 0


def main() -> None:
    """Supervise the plan from standard input until its run has ended."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchPlan)
    supervisor = Supervisor(plan)

    def write_log(text: str) -> None:
        with (Path(plan.directory) / LOG).open("a") as log:
            print(time.strftime("%F %T"), text, file=log)

    with SignalCounter() as signals:
        try:
            client, view = supervisor.open()
        except errors.ShoalError as error:
            _reply(SupervisorReply(problem=ErrorView(error.code, error.what, error.where, error.why, error.do)))
            sys.exit(error.exit_code)
        clean_end = False
        try:
            _reply(SupervisorReply(run=view))
            since = view.since if plan.resume else 0.0
            display = _WithoutMemberOutput(PlainOutput(write_log, every_s=PROGRESS_EVERY_S))
            follower = Follower(client, view, display, supervisor.restart_dead_services, since)
            result = follower.follow(signals, POLL_S)
            clean_end = not result.abandoned
        finally:
            supervisor.close(client if clean_end else None, write_log)
        with contextlib.suppress(errors.FetchFailed):
            supervisor.download_outputs()
    from shoal.cli.output.summary import exit_code

    sys.exit(exit_code(result.view, abandoned=result.abandoned))


class _WithoutMemberOutput:
    """A display that drops members' output, which has files of its own."""

    def __init__(self, inner: PlainOutput) -> None:
        self.story, self.view, self.note, self.close = inner.story, inner.view, inner.note, inner.close

    def logs(self, lines: object) -> None:
        del lines


def _reply(reply: SupervisorReply) -> None:
    """Write the reply and close the pipe, which the command reads to its end."""
    sys.stdout.buffer.write(msgspec.json.encode(reply))
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


if __name__ == "__main__":
    main()
