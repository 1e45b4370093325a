"""Connection to one host of a pool: calls the remote helper there, and remembers its last replies.

Calls share one TCP connection by ssh's own multiplexing (ControlMaster); the sockets are in a directory of this engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.engines.ssh import command, helper_source, remote_helper
from shoal.engines.ssh import errors as ssh_errors
from shoal.engines.ssh.command import SshHost, SshOptions
from shoal.engines.ssh.errors import HostError

if TYPE_CHECKING:
    from shoal.engines.ssh.remote_helper import RemoteAllocation

ENV = {"SSH_ASKPASS_REQUIRE": "never"}
PAUSE_S, PAUSE_MAX_S = 1.0, 15.0
DISCONNECT_S = 3.0
LIST_S = 5.0

Json = Mapping[str, Any]


class HostConnection:
    """One host. While it does not answer, it is called in the background, so that it does not delay the others.

    `error` is set from the first failed list until the next one that succeeds, `silent_since` likewise. `ahead_s` is
    the host's clock minus ours; `skew` a sentence about it if that is much. `checked` says that an agent can run there,
    `room` how many allocations it takes.
    """

    def __init__(
        self,
        pool: str,
        host: SshHost,
        options: SshOptions,
        control: str,
        background: Callable[[Callable[[], object]], None],
    ) -> None:
        self.host, self.room = host.host, host.room
        self._pool, self._options, self._control = pool, options, control
        self._background = background
        self.silent_since: float | None = None
        self.error: HostError | None = None
        self.ahead_s = 0.0
        self.skew = ""
        self.checked = False
        self._replies: dict[str, tuple[float, dict[str, Any]]] = {}
        self._retry_at = 0.0
        self._pause_s = PAUSE_S
        self._retrying = False
        self._lock = threading.Lock()

    # --- allocations on this host

    def list(self, tag: str, *, within_s: float = 0.0, gpus: bool = False) -> Json | None:
        """Return the host's reply to `list`, at most `within_s` old; None if it does not answer."""
        with self._lock:
            if self.silent_since is not None:
                if time.monotonic() >= self._retry_at and not self._retrying:
                    self._retrying = True
                    self._background(partial(self._list, tag, gpus=gpus))
                return None
            at, reply = self._replies.get(tag, (0.0, None))
            if reply is not None and time.monotonic() - at < within_s:
                return reply
            return self._list(tag, gpus=gpus)

    def _list(self, tag: str, *, gpus: bool) -> Json | None:
        try:
            reply = self.call({"do": "list", "tag": tag, "gpus": gpus}, LIST_S)
        except HostError as failure:
            self._on_failure(failure)
            return None
        finally:
            self._retrying = False
        self._replies[tag] = (time.monotonic(), reply)
        self.silent_since, self.error = None, None
        return reply

    def last_reply(self, tag: str) -> Json | None:
        """Return the last reply to `list`; None if there is none, or the host counts as lost by now."""
        _, reply = self._replies.get(tag, (0.0, None))
        since = self.silent_since
        lost = since is not None and time.monotonic() - since > self._options.lost_after_s
        return None if lost else reply

    def allocations(self, tag: str) -> tuple[RemoteAllocation, ...]:
        """Return the allocations in the last reply; none if the host is lost."""
        reply = self.last_reply(tag)
        return tuple(reply["allocations"]) if reply is not None else ()

    def add_allocation(self, tag: str, allocation: str) -> None:
        """Add an allocation that was just started to the last reply."""
        self._replace(tag, allocation, {"allocation": allocation, "alive": True, "process": None, "log": ""})

    def remove_allocation(self, tag: str, allocation: str) -> None:
        """Remove an allocation that was just stopped from the last reply."""
        self._replace(tag, allocation)

    def _replace(self, tag: str, allocation: str, *instead: RemoteAllocation) -> None:
        with self._lock:
            at, reply = self._replies.get(tag, (0.0, None))
            if reply is not None:
                others = [remote for remote in reply["allocations"] if remote["allocation"] != allocation]
                self._replies[tag] = (at, {**reply, "allocations": [*others, *instead]})

    def why(self) -> str:
        """Return what is wrong with the host, and since when."""
        silent_s = time.monotonic() - self.silent_since if self.silent_since is not None else 0.0
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        return f"{self.error}, since {since}"

    def _on_failure(self, failure: HostError) -> None:
        self.error = failure
        if self.silent_since is None:
            self.silent_since, self._pause_s = time.monotonic(), PAUSE_S
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    # --- calls

    def call(self, request: Json, reply_s: float) -> dict[str, Any]:
        """Return the helper's reply; raise `HostError` if it fails, or takes longer than to connect plus `reply_s`."""
        options = self._options
        argv = command.argv(options, self.host, self._control)
        text = f"{json.dumps(helper_source.program())}\n{json.dumps({'directory': options.directory, **request})}"
        sent_at = time.time()
        code, output, errors = self._run(argv, text, options.connect_timeout_s + reply_s)
        replies = [line for line in output.splitlines() if line.startswith(remote_helper.REPLY_MARK)]
        if not replies:
            failure = ssh_errors.of_ssh(self._pool, self.host, code, errors)
            if failure.unsure:
                self.disconnect()
            raise failure
        reply: dict[str, Any] = json.loads(replies[-1][len(remote_helper.REPLY_MARK) :])
        received_at = time.time()
        self.ahead_s = reply["now"] - (sent_at + received_at) / 2
        self.skew = ssh_errors.skew(reply["now"], sent_at, received_at)
        rejection = ssh_errors.of_reply(self._pool, self.host, options, reply)
        if rejection is not None:
            raise rejection
        return reply

    def _run(self, argv: tuple[str, ...], text: str, within_s: float) -> tuple[int, str, str]:
        """Run ssh; return its exit code, output and errors."""
        pipe = subprocess.PIPE
        env = {**os.environ, **ENV}
        try:
            # Without a terminal, nothing on the way can ask the user for a password and wait.
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
        except OSError as error:
            raise ssh_errors.no_ssh(self._pool, str(error)) from error
        with process:
            try:
                output, errors = process.communicate(text.encode(), timeout=within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                self.disconnect()
                raise ssh_errors.silent(self._pool, self.host, within_s) from None
        return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")

    def disconnect(self) -> None:
        """Close the shared connection."""
        disconnect(self._options, (self.host,), self._control)


def disconnect(options: SshOptions, hosts: Iterable[str], control: str) -> None:
    """Close the shared connections to these hosts, where there are any."""
    if not os.path.isdir(control) or not os.listdir(control):
        return
    null = subprocess.DEVNULL
    processes = [
        subprocess.Popen(command.disconnect_argv(options, host, control), stdin=null, stdout=null, stderr=null)
        for host in hosts
    ]
    for process in processes:
        try:
            process.wait(DISCONNECT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
