"""Full disks, other machines, lost parents, silent members."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.process.coordinator.fakes import WAIT_S, Coordinator, FakeMember

from shoal.store import journal
from shoal.wire import member_messages as ms

pytestmark = pytest.mark.process


def test_full_disk_blocks_changes_until_space_is_freed(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 2, settings={"regroup_s": 60.0, "lease_s": 60.0})
    members = [FakeMember(coordinator, run, f"m/{i}").hello().ready() for i in range(2)]
    for member in members:
        member.hear(ms.EnterWorldMsg)
    path = coordinator.directory / journal.FILE
    pid, (_, hard) = coordinator.process.pid, resource.prlimit(coordinator.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    for member in members:
        member.say(ms.WorldBrokenMsg(1, 5))
    deadline = time.monotonic() + WAIT_S
    while True:
        status, problem = coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 3})
        if status == 507:
            break
        assert time.monotonic() < deadline
    assert problem["code"] == "S520"
    size = path.stat().st_size
    with pytest.raises(TimeoutError):
        members[0].hear(ms.EnterWorldMsg, within_s=0.5)
    assert path.stat().st_size == size
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert members[0].hear(ms.EnterWorldMsg).world.step == 5
    assert coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 3})[0] == 200


def test_run_whose_directory_cannot_be_created_is_refused(coordinator: Coordinator) -> None:
    """As when the disk that the directory is on is gone, or full."""
    runs = coordinator.directory / "runs"
    runs.rmdir()
    runs.symlink_to("nowhere")
    spec = {"name": "train", "argv": ["train.py"], "cwd": "/tmp", "members": [1, 1]}
    status, problem = coordinator.ask("POST", "/v1/runs", spec)
    assert (status, problem["code"]) == (507, "S520")
    assert coordinator.ask("GET", "/v1/runs") == (200, [])
    runs.unlink()
    coordinator.create()


@pytest.mark.parametrize("room", [1 << 10, 4 << 10])
def test_disk_full_at_start_is_reported(tmp_path: Path, room: int) -> None:
    command = [sys.executable, "-m", "shoal.coordinator", "--dir", str(tmp_path / "c")]
    limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))"
    begin = [sys.executable, "-c", f"{limit}; os.execv(sys.argv[1], sys.argv[1:])", *command]
    found = subprocess.run(begin, capture_output=True, text=True, timeout=WAIT_S)
    assert found.returncode == 4
    assert "S520" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("name", ["pid.part", "url.part"])
def test_unwritable_address_file_is_reported(tmp_path: Path, name: str) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "c" / name).mkdir()
    command = [sys.executable, "-m", "shoal.coordinator", "--dir", str(tmp_path / "c")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert found.returncode == 4
    assert "S520" in found.stderr
    assert "Traceback" not in found.stderr


def test_coordinator_off_loopback_uses_tls_and_keeps_its_certificate(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path / "c", "--host", "0.0.0.0")
    try:
        assert coordinator.url.startswith("https://127.0.0.1:"), (
            "the URL is for this machine; urls has those for others"
        )
        assert oct((coordinator.directory / "token").stat().st_mode)[-3:] == "600"
        assert oct((coordinator.directory / "key.pem").stat().st_mode)[-3:] == "600"
        before = coordinator.credentials
        assert before.certificate_pem
        run = coordinator.create(1, 1, settings={"regroup_s": 0.05})
        FakeMember(coordinator, run, "m/0").hello().ready().hear(ms.EnterWorldMsg)
        with pytest.raises(urllib.error.URLError) as error:
            urllib.request.urlopen(f"{coordinator.url}/v1/health", timeout=WAIT_S)
        assert isinstance(error.value.reason, ssl.SSLCertVerificationError)
        coordinator.kill()
        coordinator.restart()
        assert coordinator.credentials == before
    finally:
        coordinator.close()


def test_tls_server_sends_nothing_before_a_request(tmp_path: Path) -> None:
    """A session ticket would wake a member's reader, which then waits beyond any timeout for what it never asked."""
    coordinator = Coordinator(tmp_path / "c", "--host", "0.0.0.0")
    try:
        context = ssl.create_default_context(cadata=coordinator.credentials.certificate_pem)
        context.check_hostname = False
        port = int(coordinator.url.rpartition(":")[2])
        with (
            socket.create_connection(("127.0.0.1", port), WAIT_S) as bare,
            context.wrap_socket(bare) as secure,
        ):
            assert select.select([secure], [], [], 0.3)[0] == []
            secure.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert secure.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        coordinator.close()


def test_coordinator_ends_with_the_process_that_holds_its_lifeline(tmp_path: Path) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-m", "shoal.coordinator", "--dir", str(tmp_path / "c"), "--lifeline", str(read)]
    process = subprocess.Popen(command, pass_fds=[read])
    os.close(read)
    deadline = time.monotonic() + WAIT_S
    while not (tmp_path / "c" / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.close(write)
    assert process.wait(WAIT_S) == 0


def test_silent_member_is_evicted_and_may_rejoin_on_the_same_connection(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 2, settings={"regroup_s": 60.0, "lease_s": 3.0, "heartbeat_s": 0.2})
    members = [FakeMember(coordinator, run, f"m/{i}").hello().ready() for i in range(2)]
    for member in members:
        assert member.hear(ms.EnterWorldMsg).world.size == 2
    deadline = time.monotonic() + WAIT_S
    while coordinator.view(run)["losses"] == 0:
        members[0].heartbeat(1, 5)
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "lease" in members[1].hear(ms.EvictedMsg).reason
    members[0].hear(ms.DissolveWorldMsg)
    members[0].say(ms.WorldBrokenMsg(1, 5))
    assert members[0].hear(ms.EnterWorldMsg).world.size == 1
    members[1].say(ms.WorldEnteredMsg(1, 3))
    members[1].hello().ready()
    members[1].hear(ms.WelcomeMsg)
    assert members[0].hear(ms.PrepareWorldMsg).world.size == 2
    assert members[1].hear(ms.PrepareWorldMsg).world.size == 2


def test_silent_connection_does_not_delay_others(coordinator: Coordinator) -> None:
    silent = [coordinator.open("/v1/member") for _ in range(20)]
    run = coordinator.create(1, 1, settings={"regroup_s": 0.05})
    FakeMember(coordinator, run, "m/0").hello().ready().hear(ms.EnterWorldMsg)
    for each in silent:
        each.close()


def test_sleep_of_the_coordinator_does_not_count_against_members(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 2, settings={"regroup_s": 60.0, "lease_s": 3.0, "heartbeat_s": 0.2})
    members = [FakeMember(coordinator, run, f"m/{i}").hello().ready() for i in range(2)]
    for member in members:
        member.hear(ms.EnterWorldMsg)
    coordinator.process.send_signal(signal.SIGSTOP)
    for _ in range(16):
        time.sleep(0.4)
        for member in members:
            member.heartbeat(1, 5)
    coordinator.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        for member in members:
            member.heartbeat(1, 6)
        time.sleep(0.2)
    view = coordinator.view(run)
    assert (view["losses"], view["world"]) == (0, 1)
