"""A coordinator with a crowd of agents and members, as the benchmark with a thousand of them has it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from benchmarks import thousand
from tests.process.coordinator.fakes import Coordinator

pytestmark = pytest.mark.process


def test_many_members_form_a_world_lose_one_grow_and_outlive_their_coordinator() -> None:
    figures = dict(thousand.measure(thousand.HOSTS["TLS"], agents=20, joins=1, steady_s=0.5, watch_s=1.0))
    assert figures["form"]["told_bytes"] > 20 * 1000
    assert figures["steady"]["heartbeats_per_s"] > 0
    assert figures["lose"]["journal_bytes"] > 0
    assert figures["join"]["told_bytes"] > 0
    assert figures["restart"]["worlds"] == 0


def test_coordinator_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        coordinator = Coordinator(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        allowed, _ = resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE)
        assert allowed == resource.RLIM_INFINITY or allowed >= min(hard, 1 << 16)
    finally:
        coordinator.close()
