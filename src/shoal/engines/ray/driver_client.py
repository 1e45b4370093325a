"""Client of the Ray driver process: sends requests, many at a time, and matches the replies by number.

Every request ends: by its reply, or by `DriverError` when the driver has ended.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

END_S = 8.0
ERROR_LINES = 5
_RAY_LOG_LINE = re.compile(r"\[[^]]* [IW] \d+ \d+\]")


class DriverError(Exception):
    """Failure reported by the driver; the engine decides by `kind`, and `why` is for the user."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class RayDriverClient:
    """Driver process, started by the constructor.

    `ready` completes when it has reached the cluster; `late_since` is when a reply was first missed, in monotonic
    seconds, until the next one arrives; `ended` says that the process is gone.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._next = 2
        self._started: Future[Any] = Future()
        self.ready: Future[Any] = Future()
        self._waiting: dict[int, Future[Any]] = {0: self._started, 1: self.ready}
        self._error_lines: deque[str] = deque(maxlen=ERROR_LINES)
        self.ended = False
        self.late_since: float | None = None
        # Not the current directory: Ray lets all workers import from where the driver was started.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._errors = threading.Thread(target=self._read_errors, name="ray-errors", daemon=True)
        self._errors.start()
        threading.Thread(target=self._read_replies, name="ray-replies", daemon=True).start()

    def call(self, request: Mapping[str, Any]) -> Future[Any]:
        """Send a request; return a future of its reply, or of `DriverError`."""
        reply: Future[Any] = Future()
        with self._lock:
            if self.ended:
                reply.set_exception(DriverError("lost", self._exit_message()))
                return reply
            number, self._next = self._next, self._next + 1
            self._waiting[number] = reply
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": number, **request}) + "\n")
                self._process.stdin.flush()
            except OSError:
                self._waiting.pop(number)
                reply.set_exception(DriverError("lost", self._exit_message()))
        return reply

    def late_for_s(self) -> float:
        """Record that a reply was missed; return for how many seconds the driver has been silent since the first."""
        now = time.monotonic()
        with self._lock:
            if self.late_since is None:
                self.late_since = now
            return now - self.late_since

    def end(self) -> None:
        """Let the driver leave the cluster; kill it if it takes longer than `END_S`."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._lock:
                self.late_since = None
                reply = self._waiting.pop(message["id"], None)
            if reply is None:
                continue
            if "failed" in message:
                reply.set_exception(DriverError(message["failed"], message["why"]))
            else:
                reply.set_result(message["ok"])
        self._process.wait()
        self._errors.join(1.0)
        with self._lock:
            self.ended = True
            unanswered, self._waiting = list(self._waiting.values()), {}
        kind = "lost" if self._started.done() else "never started"
        for reply in unanswered:
            reply.set_exception(DriverError(kind, self._exit_message()))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip() and not _RAY_LOG_LINE.match(line):
                self._error_lines.append(line.strip())

    def _exit_message(self) -> str:
        code = self._process.poll()
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return " / ".join(self._error_lines)[-600:] or f"the Ray driver process ended with {how}"
