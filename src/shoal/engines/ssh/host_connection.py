"""One host of a pool as it is called: over a connection that calls share, with a memory of what was seen last."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from shoal.engines.ssh import command, remote_helper
from shoal.engines.ssh import errors as ssh_errors
from shoal.engines.ssh.command import SshHost, SshOptions
from shoal.engines.ssh.errors import HostError

ENV = {"SSH_ASKPASS_REQUIRE": "never"}
PAUSE_S, PAUSE_MAX_S = 1.0, 15.0
LEAVE_S = 3.0
LOOK_S = 5.0

Json = Mapping[str, Any]


class HostConnection:
    """A host. One that does not answer is asked again in the background, so that it costs the others no time."""

    def __init__(
        self,
        pool: str,
        place: SshHost,
        options: SshOptions,
        control: str,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self.place, self._pool, self._options, self._control = place, pool, options, control
        self._later = later
        self.silent_since: float | None = None
        self.trouble: HostError | None = None
        self.ahead_s = 0.0
        self.skew = ""
        self.proved = False
        self._seen: dict[str, tuple[float, dict[str, Any]]] = {}
        self._ask_at = 0.0
        self._pause_s = PAUSE_S
        self._asking = False
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        return self.place.host

    # --- what is there

    def look(self, tag: str, *, within_s: float = 0.0, gpus: bool = False) -> Json | None:
        """What the host says is there, no older than `within_s`; None if it does not answer."""
        with self._lock:
            if self.silent_since is not None:
                if time.monotonic() >= self._ask_at and not self._asking:
                    self._asking = True
                    self._later(partial(self._ask, tag, gpus=gpus))
                return None
            at, known = self._seen.get(tag, (0.0, None))
            if known is not None and time.monotonic() - at < within_s:
                return known
            return self._ask(tag, gpus=gpus)

    def _ask(self, tag: str, *, gpus: bool) -> Json | None:
        try:
            answer = self.call({"do": "look", "tag": tag, "gpus": gpus}, LOOK_S)
        except HostError as trouble:
            self._failed(trouble)
            return None
        finally:
            self._asking = False
        self._seen[tag] = (time.monotonic(), answer)
        self.silent_since, self.trouble = None, None
        return answer

    def last(self, tag: str) -> Json | None:
        """What was there when it last answered; None if it never did, or is silent for so long that all is lost."""
        _, known = self._seen.get(tag, (0.0, None))
        since = self.silent_since
        lost = since is not None and time.time() - since > self._options.lost_after_s
        return None if lost else known

    def note(self, tag: str, hire: str) -> None:
        """It was just started there."""
        self._replace(tag, hire, {"hire": hire, "alive": True, "born": None, "said": ""})

    def forget(self, tag: str, hire: str) -> None:
        """It was just ended there."""
        self._replace(tag, hire)

    def _replace(self, tag: str, hire: str, *instead: Json) -> None:
        with self._lock:
            at, known = self._seen.get(tag, (0.0, None))
            if known is not None:
                others = [one for one in known["hires"] if one["hire"] != hire]
                self._seen[tag] = (at, {**known, "hires": [*others, *instead]})

    def why(self) -> str:
        """What is wrong with it, and since when."""
        since = time.strftime("%H:%M:%S", time.localtime(self.silent_since or time.time()))
        return f"{self.trouble}, since {since}"

    def _failed(self, trouble: HostError) -> None:
        self.trouble = trouble
        if self.silent_since is None:
            self.silent_since, self._pause_s = time.time(), PAUSE_S
        self._ask_at = time.monotonic() + self._pause_s
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    # --- calls

    def call(self, request: Json, more_s: float) -> dict[str, Any]:
        """The host's answer; it has the time of a connection and `more_s` for it. Raises Trouble."""
        options = self._options
        words = command.argv(options, self.host, self._control)
        asked = json.dumps({"directory": options.directory, **request})
        program = json.dumps(inspect.getsource(remote_helper))
        within_s = options.connect_timeout_s + more_s
        asked_at = time.time()
        code, said, erred = self._run(words, f"{program}\n{asked}", within_s)
        answers = [line for line in said.splitlines() if line.startswith(remote_helper.MARK)]
        if not answers:
            trouble = ssh_errors.of_ssh(self._pool, self.host, code, erred)
            if trouble.unsure:
                self.leave()
            raise trouble
        answer: dict[str, Any] = json.loads(answers[-1][len(remote_helper.MARK) :])
        answered_at = time.time()
        self.ahead_s = answer["now"] - (asked_at + answered_at) / 2
        self.skew = ssh_errors.skew(answer["now"], asked_at, answered_at)
        wrong = ssh_errors.of_answer(self._pool, self.host, options, answer)
        if wrong is not None:
            raise wrong
        return answer

    def _run(self, words: tuple[str, ...], text: str, within_s: float) -> tuple[int, str, str]:
        pipe = subprocess.PIPE
        env = {**os.environ, **ENV}
        try:
            # Without a terminal, nothing on the way can ask the user for a password and wait.
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
        except OSError as error:
            raise ssh_errors.no_ssh(self._pool, str(error)) from error
        with process:
            try:
                said, erred = process.communicate(text.encode(), timeout=within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                self.leave()
                raise ssh_errors.silent(self._pool, self.host, within_s) from None
        return process.returncode, said.decode(errors="replace"), erred.decode(errors="replace")

    def leave(self) -> None:
        """Let go of the shared connection."""
        leave(self._options, (self.host,), self._control)


def leave(options: SshOptions, hosts: Iterable[str], control: str) -> None:
    """End the connections that calls to hosts share, where there are any."""
    if not os.path.isdir(control) or not os.listdir(control):
        return
    quiet = subprocess.DEVNULL
    leaving = [
        subprocess.Popen(command.leave_argv(options, host, control), stdin=quiet, stdout=quiet, stderr=quiet)
        for host in hosts
    ]
    for process in leaving:
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
