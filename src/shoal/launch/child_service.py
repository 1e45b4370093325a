"""A coordinator or an agent as a child process that never outlives its supervisor.

The supervisor holds the write end of a pipe and the child reads from it (`--lifeline FD`). The child stops when it
reads end-of-file, which happens when the supervisor closes the pipe, and also when it dies in any way. A child in a
session of its own gets no Ctrl-C from the terminal, so the supervisor alone decides when it stops.

A child that dies is restarted at once the first time, then after 0.1 s, 0.2 s, 0.4 s, …; more than RESTARTS deaths
within RESTARTS_WITHIN_S are an error. One that refuses its settings is not restarted: it would refuse them again. Both
logs are appended to, so the last lines tell why it died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal import exit_codes
from shoal.errors import ServiceFailed

RESTARTS = 5
RESTARTS_WITHIN_S = 30.0


def restart_delay_s(deaths: Sequence[float], now: float) -> float | None:
    """Return the seconds to wait before the next restart, or None if the service died too often lately."""
    recent = [at for at in deaths if now - at < RESTARTS_WITHIN_S]
    if len(recent) > RESTARTS:
        return None
    return 0.0 if len(recent) <= 1 else 0.1 * 2.0 ** (len(recent) - 2)


class ChildService:
    """One child process with a lifeline: a pipe whose write end only we hold, so that the child stops when we do."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._deaths: list[float] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process in a session of its own, where the terminal's Ctrl-C does not reach it."""
        open_standard_descriptors()
        reader, writer = os.pipe()
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self.argv, "--lifeline", str(reader)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reader,),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(writer)
            raise ServiceFailed(f"the {self.name} could not be started", why=str(error)) from error
        finally:
            os.close(reader)
        self._lifeline = writer

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def exit_description(self) -> str:
        """Return how the process ended, such as "exit code 3"; empty while it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return ""
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def restart_if_dead(self) -> str:
        """Restart the process if it died and return how it had ended; empty if it runs.

        Raises ServiceFailed if it died too often.
        """
        ended = self.exit_description()
        if not ended:
            return ""
        if self._process is not None and self._process.returncode in (exit_codes.BAD_USAGE, exit_codes.BAD_SETTING):
            raise self.failure(f"the {self.name} cannot run with these settings ({ended})")
        now = self._clock()
        self._deaths.append(now)
        delay_s = restart_delay_s(self._deaths, now)
        if delay_s is None:
            raise self.failure(f"the {self.name} died {RESTARTS + 1} times within {RESTARTS_WITHIN_S:g} s ({ended})")
        self.close_lifeline()
        time.sleep(delay_s)
        self.start()
        return ended

    def failure(self, what: str) -> ServiceFailed:
        """Return an error that ends with the last lines of the service's log."""
        return ServiceFailed(what, where=str(self.log), why=last_lines(self.log) or "its log is empty")

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process has ended within so many seconds."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, grace_s: float) -> None:
        """Close the lifeline, then kill the process if it still runs after the grace period."""
        self.close_lifeline()
        if self._process is not None and not self.wait(grace_s):
            self._process.kill()
            self._process.wait()

    def close_lifeline(self) -> None:
        """Tell the process to stop by itself once its remaining work is done."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def open_standard_descriptors() -> None:
    """Open /dev/null in place of each of stdin, stdout and stderr that is closed.

    Otherwise the next pipe gets its number, and a child that is started with it finds its own standard stream there.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def last_lines(path: Path, lines: int = 12) -> str:
    """Return the last lines of a log, indented for an error message; empty if there is no log."""
    try:
        text = path.read_bytes()[-8192:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n         ".join(text.strip().splitlines()[-lines:])
