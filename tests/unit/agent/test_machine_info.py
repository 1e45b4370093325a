"""Information about a machine, from its files."""

from __future__ import annotations

import os

import pytest

from shoal.agent import machine_info
from shoal.errors import PeerUnreachable


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_cores_are_those_of_the_affinity(tmp_path, many_cores):
    assert machine_info.cores(tmp_path) == 16


def test_cgroup_2_quota_limits_cores_also_in_a_parent(tmp_path, many_cores):
    put(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    put(tmp_path, "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    assert machine_info.cores(tmp_path) == 16
    put(tmp_path, "sys/fs/cgroup/a/cpu.max", "350000 100000\n")
    assert machine_info.cores(tmp_path) == 3


def test_cgroup_1_quota_limits_cores(tmp_path, many_cores):
    put(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/job\n")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    assert machine_info.cores(tmp_path) == 1


def test_cgroup_1_quota_of_minus_one_is_no_limit(tmp_path, many_cores):
    put(tmp_path, "proc/self/cgroup", "4:cpu:/\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert machine_info.cores(tmp_path) == 16


def test_memory_is_limited_by_either_cgroup_version(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/a\n5:memory:/b\n")
    total = machine_info.memory_bytes(tmp_path)
    put(tmp_path, "sys/fs/cgroup/memory/b/memory.limit_in_bytes", f"{1 << 62}\n")
    assert machine_info.memory_bytes(tmp_path) == total
    put(tmp_path, "sys/fs/cgroup/a/memory.max", "1048576\n")
    assert machine_info.memory_bytes(tmp_path) == 1 << 20
    put(tmp_path, "sys/fs/cgroup/memory/b/memory.limit_in_bytes", "4096\n")
    assert machine_info.memory_bytes(tmp_path) == 4096


def test_oom_kills_are_summed_over_all_files(tmp_path):
    put(tmp_path, "proc/self/cgroup", "0::/a\n")
    put(tmp_path, "proc/vmstat", "pgfault 3\noom_kill 2\n")
    assert machine_info.oom_kills(tmp_path) == 2
    put(tmp_path, "sys/fs/cgroup/a/memory.events", "low 0\noom 5\noom_kill 1\n")
    assert machine_info.oom_kills(tmp_path) == 3


def test_devices_are_read_from_the_drivers_files(tmp_path):
    put(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA A10G\nIRQ: 5\n")
    assert machine_info.devices(tmp_path) == ("NVIDIA A10G",)


def test_garbage_in_the_files_is_ignored(tmp_path, many_cores):
    put(tmp_path, "proc/self/cgroup", "nonsense\n0::/a\n::::\n")
    put(tmp_path, "sys/fs/cgroup/a/cpu.max", "lots of it\n")
    assert machine_info.cores(tmp_path) == 16


def test_coordinator_on_loopback_gets_a_loopback_address():
    assert machine_info.hosts_to_announce("http://127.0.0.1:9") == ("127.0.0.1",)
    assert machine_info.hosts_to_announce("http://[::1]:9", interface="lo") == ("127.0.0.1",)


def test_unknown_interface_is_named_with_the_existing_ones():
    with pytest.raises(PeerUnreachable, match="nope") as caught:
        machine_info.hosts_to_announce("http://127.0.0.1:9", "nope")
    assert "lo" in caught.value.why


def test_machine_describes_itself():
    machine = machine_info.machine("lab")
    assert machine.name == "lab"
    assert machine.cores >= 1
    assert machine.memory_bytes > 0
    assert machine.python
    assert "127.0.0.1" in machine.addresses
