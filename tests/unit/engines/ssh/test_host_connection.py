"""Calls to one host, and its last replies."""

from __future__ import annotations

import pytest

from shoal.engines.ssh import host_connection
from shoal.engines.ssh.command import SshHost, SshOptions
from shoal.engines.ssh.errors import HostError, silent
from shoal.engines.ssh.host_connection import HostConnection
from shoal.errors import AllocationRefused

OPTIONS = SshOptions(hosts=("gpu1",))


def test_silent_host_is_called_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls, waiting = 1000.0, [], []

    def call(self: HostConnection, request: object, reply_s: float) -> dict[str, object]:
        calls.append(now)
        raise HostError(silent("lab", "gpu1", 3.0).error)

    monkeypatch.setattr(HostConnection, "call", call)
    monkeypatch.setattr(host_connection.time, "monotonic", lambda: now)
    connection = HostConnection("lab", SshHost("gpu1", 1), OPTIONS, "/tmp/c", waiting.append)
    for _ in range(100):
        assert connection.list("tag") is None
        while waiting:
            waiting.pop()()
        now += 1.0
    assert calls == [1000.0, 1001.0, 1003.0, 1007.0, 1015.0, *range(1030, 1100, 15)]
    assert connection.why().startswith("gpu1 does not answer: no reply within 3 s, since ")


def test_clock_that_jumps_does_not_make_a_silent_host_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(host_connection.time, "monotonic", lambda: now)
    connection = HostConnection("lab", SshHost("gpu1", 1), OPTIONS, "/tmp/c", lambda _: None)
    connection._replies["tag"] = (now, {"allocations": []})
    connection._on_failure(silent("lab", "gpu1", 3.0))
    with monkeypatch.context() as patched:
        patched.setattr(host_connection.time, "time", lambda: 1e10)
        assert connection.last_reply("tag") is not None
    now += OPTIONS.lost_after_s + 1.0
    assert connection.last_reply("tag") is None


def test_machine_without_ssh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    connection = HostConnection("lab", SshHost("gpu1", 1), OPTIONS, "/tmp/c", lambda _: None)
    with pytest.raises(HostError) as failure:
        connection.call({"do": "list"}, 1.0)
    assert type(failure.value.error) is AllocationRefused
    assert failure.value.error.what == "cannot run ssh on this machine"
    assert not failure.value.unsure
