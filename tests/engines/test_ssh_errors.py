"""Faulty hosts, for real: one clear error for each cause, and nothing is left on them."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.ssh_hosts import SshNetwork, ssh_network, why_not
from tests.engines.ssh_site import SOURCES

from shoal.engines.engine import AllocationRequest
from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.engine import Ssh
from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError
from shoal.wire.credentials import Credentials

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)

ASK = AllocationRequest("pool-1", "tag", "http://127.0.0.1:1", Credentials("s3cret"), 1, ("--idle", "1"))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNetwork]:
    with ssh_network(tmp_path_factory.mktemp("ssh") / "net", "h1", "h2") as network:
        yield network


@pytest.fixture(autouse=True)
def _nothing_is_left(network: SshNetwork) -> Iterator[None]:
    yield
    assert not network.running("h1", "shoal.agent")
    assert not list(network.home("h1").rglob("token*"))


def engine(network: SshNetwork, *hosts: str, **options: Any) -> Ssh:
    given = {
        "hosts": hosts or ("h1",),
        "config": str(network.config),
        "connect_timeout_s": 10.0,
        "python": sys.executable,
    }
    return Ssh("lab", SshOptions(**{**given, **options}))


def refusal(engine: Ssh, kind: type[LaunchError] = AllocationRefused) -> LaunchError:
    with pytest.raises(kind) as caught:
        engine.submit(ASK)
    engine.close()
    assert caught.type is kind
    assert caught.value.do, "it names no remedy"
    return caught.value


def test_unknown_host_is_refused(network: SshNetwork) -> None:
    # A name that no server has to be asked for: there is none in the hub.
    name = 70 * "n"
    error = refusal(engine(network, name))
    assert error.what == f"unknown host {name}"
    assert "Name or service not known" in error.why


def test_temporary_resolver_failure_is_unreachable(network: SshNetwork) -> None:
    error = refusal(engine(network, "nowhere.invalid"), EngineUnreachable)
    assert error.what == "temporary failure to resolve nowhere.invalid"
    assert "correct hosts in [pool.lab]" in error.do


def test_host_without_sshd_is_unreachable(network: SshNetwork) -> None:
    error = refusal(engine(network, port=2222), EngineUnreachable)
    assert error.what == "h1 refused the connection: no sshd is listening"
    assert "port 2222: Connection refused" in error.why


def test_host_that_is_down_is_unreachable(network: SshNetwork) -> None:
    error = refusal(engine(network, "10.91.0.200", connect_timeout_s=2.0), EngineUnreachable)
    assert error.what == "10.91.0.200 does not answer"


def test_wrong_key_is_refused(network: SshNetwork, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    config = tmp_path / "config"
    config.write_text(network.config.read_text().replace("IdentityFile", "#"))
    error = refusal(engine(network, config=str(config), identity=str(tmp_path / "other")))
    assert error.what == "authentication failed on h1"
    assert "Permission denied (publickey)" in error.why
    assert "identity in [pool.lab]" in error.do


def test_pool_whose_hosts_all_reject_us_is_refused(network: SshNetwork, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(network.config.read_text().replace("IdentityFile", "#"))
    for hosts, what in ((("h1",), "authentication failed on h1"), (("h1", "h2"), "no host of pool lab answers")):
        away = engine(network, *hosts, config=str(config))
        with pytest.raises(AllocationRefused, match=what) as caught:
            away.watch("tag")
        assert "Permission denied (publickey)" in caught.value.why
        away.close()
    partly = engine(network, "h1", "10.91.0.200", config=str(config), connect_timeout_s=2.0)
    with pytest.raises(EngineUnreachable, match="no host of pool lab answers"):
        partly.watch("tag")
    partly.close()


def test_new_host_key_is_stored_only_with_accept_new(network: SshNetwork, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    config = tmp_path / "config"
    config.write_text(network.config.read_text().replace(str(network.config.parent / "known_hosts"), str(known)))
    error = refusal(engine(network, config=str(config)))
    assert error.what == "the host key of h1 is unknown"
    assert "accept_new = true" in error.do
    assert not known.exists()
    trusting = engine(network, config=str(config), accept_new=True)
    assert trusting.watch("tag") == []
    trusting.close()
    assert network.address("h1") in known.read_text()


def test_changed_host_key_is_refused_even_with_accept_new(network: SshNetwork, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    lines = (network.config.parent / "known_hosts").read_text().splitlines()
    first, second = (line.partition(" ") for line in lines)
    known.write_text(f"{first[0]} {second[2]}\n")
    config = tmp_path / "config"
    config.write_text(network.config.read_text().replace(str(network.config.parent / "known_hosts"), str(known)))
    error = refusal(engine(network, config=str(config), accept_new=True))
    assert error.what == "the host key of h1 has changed"
    assert "ssh-keygen -R h1" in error.do


def test_missing_ssh_config_is_refused(network: SshNetwork, tmp_path: Path) -> None:
    error = refusal(engine(network, config=str(tmp_path / "none")))
    assert error.what == "ssh is misconfigured on this machine"


def test_host_without_python_is_refused(network: SshNetwork) -> None:
    error = refusal(engine(network, python="/opt/none/bin/python"))
    assert error.what == "Python not found on h1"
    assert "/opt/none/bin/python" in error.why
    late = refusal(engine(network, python="/opt/none/bin/python", setup=("true",)))
    assert late.what == "Python not found on h1"
    assert "/opt/none/bin/python" in late.why


def test_python_that_is_too_old_is_refused(network: SshNetwork, tmp_path: Path) -> None:
    old = _program(tmp_path / "old", "echo 3.9.2")
    error = refusal(engine(network, python=str(old), setup=("echo hello",)))
    assert error.what == "Python on h1 is too old"
    assert "3.9.2" in error.why
    assert "3.11" in error.why
    older = _program(tmp_path / "older", "echo 'shoal needs a newer Python here than 2.7.18' >&2; exit 1")
    assert refusal(engine(network, python=str(older))).what == "Python on h1 is too old"


def test_python_without_shoal_is_refused(network: SshNetwork) -> None:
    error = refusal(engine(network, python="/usr/bin/python3"))
    assert error.what == "Shoal is not installed on h1"
    assert "/usr/bin/python3" in error.why


def test_failing_setup_is_refused(network: SshNetwork) -> None:
    error = refusal(engine(network, setup=("echo oh no >&2; exit 3",)))
    assert error.what == "cannot start Python on h1"
    assert "exit code 3, oh no" in error.why


def test_full_disk_is_refused(network: SshNetwork, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    network.on("h1", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "disk"))
    network.on("h1", "sh", "-c", f"head -c 100000 /dev/zero >{tmp_path}/disk/fill || true")
    full = engine(network, directory=str(tmp_path / "disk"))
    assert "0 MiB of disk are free" in full.capacity()[0].why
    error = refusal(full)
    assert error.what == "no space left on h1"
    assert str(tmp_path / "disk") in error.why
    assert network.on("h1", "find", str(tmp_path / "disk"), "-name", "token*") == ""


def test_agent_can_be_stopped_on_a_read_only_disk(network: SshNetwork, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    network.on("h1", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "disk"))
    some = engine(network, directory=str(tmp_path / "disk"), setup=("exec sleep 4711",))
    some._connections["h1"].checked = True
    handle = some.submit(ASK)
    network.on("h1", "mount", "--bind", str(tmp_path / "disk"), str(tmp_path / "disk"))
    network.on("h1", "mount", "-o", "remount,bind,ro", str(tmp_path / "disk"))
    with pytest.raises(EngineUnreachable, match="cannot write to"):
        some.cancel(handle)
    assert not network.running("h1", "4711")
    assert [one.state for one in some.watch("tag")] == ["gone"]
    some.close()


def test_unwritable_directory_is_refused(network: SshNetwork, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    network.on("h1", "mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path / "disk"))
    error = refusal(engine(network, directory=str(tmp_path / "disk")))
    assert error.what == "cannot write to Shoal's directory on h1"
    assert "Read-only file system" in error.why


def test_wrong_clock_is_reported(network: SshNetwork, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\nright = time.time\ntime.time = lambda: right() - 3600.0\n")
    late = _program(tmp_path / "late", f'exec env PYTHONPATH={tmp_path} {sys.executable} "$@"')
    offer = engine(network, python=str(late)).capacity()[0]
    assert re.search(r"its clock is 3[56]\d\d s behind this machine's", offer.why)
    assert "clock" not in engine(network).capacity()[0].why


def test_bad_host_does_not_keep_an_allocation_from_a_good_one(network: SshNetwork) -> None:
    some = engine(
        network, 70 * "n", "10.91.0.200", "h2", connect_timeout_s=5.0, setup=(f"export PYTHONPATH={SOURCES}",)
    )
    handle = some.submit(ASK)
    assert handle == "h2/tag/pool-1"
    assert [one.handle for one in some.watch("tag")] == [handle]
    some.cancel(handle)
    some.close()


def test_error_names_the_cause_of_each_bad_host(network: SshNetwork) -> None:
    error = refusal(engine(network, "nowhere.invalid", "h1", python="/opt/none/bin/python"))
    assert "nowhere.invalid" in error.why
    assert "h1: Python not found on h1" in error.why


def _program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
