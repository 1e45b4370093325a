"""The coordinator and the agent that `shoal run` starts: kept alive while it lives, and never longer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import ServiceFailed

RESTARTS = 5
RESTARTS_WITHIN_S = 30.0


def restart_delay_s(deaths: Sequence[float], now: float) -> float | None:
    """How long to wait before a service is started again; None if it died too often lately."""
    lately = [at for at in deaths if now - at < RESTARTS_WITHIN_S]
    if len(lately) > RESTARTS:
        return None
    return 0.0 if len(lately) <= 1 else 0.1 * 2.0 ** (len(lately) - 2)


class ChildService:
    """One child process with a lifeline: a pipe whose other end only we hold, so that it ends when we do."""

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
        """Start it in a session of its own, where the terminal's Ctrl-C does not reach it."""
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

    def died(self) -> str:
        """How it ended, in words; empty while it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return ""
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def revive(self) -> str:
        """Start it again if it died, within its budget; says how it had died, or nothing."""
        how = self.died()
        if not how:
            return ""
        now = self._clock()
        self._deaths.append(now)
        delay_s = restart_delay_s(self._deaths, now)
        if delay_s is None:
            raise self.failure(f"the {self.name} died {RESTARTS + 1} times within {RESTARTS_WITHIN_S:g} s ({how})")
        self.cut()
        time.sleep(delay_s)
        self.start()
        return how

    def failure(self, what: str) -> ServiceFailed:
        """An error that ends with the service's last words."""
        return ServiceFailed(what, where=str(self.log), why=tail(self.log) or "it said nothing")

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within so many seconds."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float) -> None:
        """Cut the lifeline, then kill whatever is left after the grace."""
        self.cut()
        if self._process is not None and not self.wait(grace_s):
            self._process.kill()
            self._process.wait()

    def cut(self) -> None:
        """Cut the lifeline: it ends by itself, when it has done what it has to do before."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    try:
        text = path.read_bytes()[-8192:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n         ".join(text.strip().splitlines()[-lines:])
