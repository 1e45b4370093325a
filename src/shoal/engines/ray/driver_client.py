"""A conversation with the process that talks to Ray: many questions at once, an answer to each, or its end."""

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
WORDS = 5
_CHATTER = re.compile(r"\[[^]]* [IW] \d+ \d+\]")


class DriverError(Exception):
    """The driver's answer: `kind` is what the engine decides by, `why` is for the user."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class RayDriverClient:
    """A driver that was just started; `ready` is done when it has reached the cluster."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._next = 2
        self._started: Future[Any] = Future()
        self.ready: Future[Any] = Future()
        self._waiting: dict[int, Future[Any]] = {0: self._started, 1: self.ready}
        self._words: deque[str] = deque(maxlen=WORDS)
        self.ended = False
        self.late_since: float | None = None
        # Ray lets all workers import from the directory in which a driver was started.
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
        threading.Thread(target=self._read_answers, name="ray-answers", daemon=True).start()

    def ask(self, request: Mapping[str, Any]) -> Future[Any]:
        """Send a question; what it becomes is its answer, or DriverError."""
        asked: Future[Any] = Future()
        with self._lock:
            if self.ended:
                asked.set_exception(DriverError("lost", self._last_words()))
                return asked
            number, self._next = self._next, self._next + 1
            self._waiting[number] = asked
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"id": number, **request}) + "\n")
                self._process.stdin.flush()
            except OSError:
                self._waiting.pop(number)
                asked.set_exception(DriverError("lost", self._last_words()))
        return asked

    def late_for_s(self) -> float:
        """How long it has been silent since an answer was first missed; to be asked when one is."""
        now = time.monotonic()
        with self._lock:
            if self.late_since is None:
                self.late_since = now
            return now - self.late_since

    def end(self) -> None:
        """Let it leave the cluster, in bounded time."""
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

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._lock:
                self.late_since = None
                asked = self._waiting.pop(message["id"], None)
            if asked is None:
                continue
            if "failed" in message:
                asked.set_exception(DriverError(message["failed"], message["why"]))
            else:
                asked.set_result(message["ok"])
        self._process.wait()
        self._errors.join(1.0)
        with self._lock:
            self.ended = True
            left, self._waiting = list(self._waiting.values()), {}
        kind = "lost" if self._started.done() else "never started"
        for asked in left:
            asked.set_exception(DriverError(kind, self._last_words()))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip() and not _CHATTER.match(line):
                self._words.append(line.strip())

    def _last_words(self) -> str:
        code = self._process.poll()
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        return " / ".join(self._words)[-600:] or f"the process that talks to Ray ended with {how}"
