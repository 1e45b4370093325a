"""Agents are done with handing over before their engines kill them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.engines import grace_period
from shoal.engines.engine import AllocationRequest
from shoal.engines.slurm.jobs import kill_wait_s
from shoal.wire.credentials import Credentials

ASK = AllocationRequest("a-1", "t", "http://h:1", Credentials("x"), 1)


@pytest.mark.parametrize(
    ("given", "granted_s", "told"),
    [
        ((), 60.0, ()),
        ((), 30.0, ("--grace", "25")),
        (("--grace", "20", "--idle", "5"), 30.0, ("--grace", "20", "--idle", "5")),
        (("--idle", "5", "--grace", "120", "--apart"), 30.0, ("--idle", "5", "--apart", "--grace", "25")),
        (("--grace", "30"), 4.0, ("--grace", "2")),
        (("--grace", "30"), 0.0, ("--grace", "0")),
    ],
)
def test_an_agent_has_less_time_than_its_engine_grants(
    given: tuple[str, ...], granted_s: float, told: tuple[str, ...]
) -> None:
    assert grace_period.within(replace(ASK, options=given), granted_s).options == told


def test_what_slurm_grants_is_in_its_configuration() -> None:
    assert kill_wait_s("JobRequeue              = 1\nKillWait                = 45 sec\nLaunch = x\n") == 45.0
    assert kill_wait_s("slurm_load_ctl_conf error: Unable to contact slurm controller") is None
