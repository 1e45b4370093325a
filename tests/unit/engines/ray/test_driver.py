"""Ray driver, as far as it needs no Ray."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shoal.engines.ray import driver


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Version mismatch: the cluster was started with Ray 2.9"), "version"),
        (RuntimeError("Can't find a `node_ip_address.json` file"), "not a node"),
        (ValueError("no such placement group"), "refused"),
        (ConnectionError("GCS is gone"), "lost"),
    ],
)
def test_kind_of_an_error_decides_what_the_engine_does(error: Exception, kind: str) -> None:
    assert driver._kind(error) == kind


def test_identity_distinguishes_processes() -> None:
    node, boot, pid, started = driver._identity(os.getpid())
    assert (pid, started != "", boot != "", node != "") == (os.getpid(), True, True, True)
    assert driver._identity(2**22 + 1)[3] == ""


def test_process_that_was_not_reaped_counts_as_dead() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path("/proc", str(process.pid), "stat").exists()
        assert driver._identity(process.pid)[3] == ""
