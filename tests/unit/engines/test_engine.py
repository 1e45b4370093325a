"""Defaults that engines share."""

from __future__ import annotations

from shoal.engines.engine import CANCEL_S, EngineOptions, agent_options
from shoal.engines.local import Local
from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.engine import Ssh


def test_agent_is_apart_where_the_disk_is_not_shared() -> None:
    local, ssh = Local("here", EngineOptions()), Ssh("lab", SshOptions(hosts=("h",)))
    assert agent_options(("--grace", "3"), local) == ("--grace", "3")
    assert agent_options(("--grace", "3"), ssh) == ("--grace", "3", "--apart")


def test_shared_in_the_pool_overrides_the_default() -> None:
    assert not Local("here", EngineOptions(shared=False)).shared
    assert Ssh("lab", SshOptions(hosts=("h",), shared=True)).shared


def test_cancel_may_take_longer_than_the_grace_period() -> None:
    assert Local("here", EngineOptions()).cancel_timeout_s(30.0) == 30.0 + CANCEL_S
