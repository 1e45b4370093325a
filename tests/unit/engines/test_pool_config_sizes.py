"""Sizes: what members need is requested of the engine, unless the pool configures the size of machines."""

from __future__ import annotations

import json

import pytest

from shoal.engines import pool_config
from shoal.engines.engine import AllocationRequest, RenderedRequest
from shoal.errors import BadPool
from shoal.wire.credentials import Credentials

REQUEST = AllocationRequest(
    "spot-1", "c0ffee", "http://h:1", Credentials("secret"), 2, (), cpus=8, memory_bytes=(5 << 30) + 1
)


def rendered(**table: object) -> RenderedRequest:
    return pool_config.parse("spot", table)[1].render(REQUEST)


def test_slurm_requests_what_members_need() -> None:
    argv = rendered(engine="slurm").argv
    assert "--cpus-per-task=8" in argv
    assert "--mem=5121M" in argv


def test_slurm_pool_with_own_sizes_requests_these() -> None:
    argv = rendered(engine="slurm", cpus_per_task=16, memory="32G").argv
    assert "--cpus-per-task=16" in argv
    assert "--mem=32G" in argv
    pool, _ = pool_config.parse("spot", {"engine": "slurm", "cpus_per_task": 16, "memory": "32G"})
    assert (pool.sized, pool.cpus, pool.memory_bytes) == (True, 16, 32 << 30)


def test_ray_requests_what_members_need_unless_the_pool_configures_it() -> None:
    options = json.loads(rendered(engine="ray").text)["options"]
    assert (options["num_cpus"], options["memory"]) == (8.0, (5 << 30) + 1)
    options = json.loads(rendered(engine="ray", cpus=2, memory_bytes=7).text)["options"]
    assert (options["num_cpus"], options["memory"]) == (2.0, 7)


def test_labels_mark_machines_and_select_nodes_in_ray() -> None:
    labels = {"gpu": "a100"}
    for engine in ("local", "slurm", "ray"):
        pool, _ = pool_config.parse("spot", {"engine": engine, "labels": labels})
        assert pool.labels == labels
    assert json.loads(rendered(engine="ray", labels=labels).text)["options"]["label_selector"] == labels
    with pytest.raises(BadPool):
        pool_config.parse("spot", {"engine": "local", "labels": "gpu"})
