"""Worker processes read ahead what will be needed, report a sample that fails, and die with their pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import LoaderDied, SampleFailed
from shoal.testing.wait import until
from shoal.torch.data.worker_processes import WorkerPool
from shoal.worker.data.fetch import ReadKey, Watch


class Source:
    """Reads the numbers of a slice; number 13 fails and number 66 kills its reader."""

    noun = "sample"

    def read(self, key: ReadKey, watch: Watch) -> Any:
        for sample in range(key.start, key.stop):
            if not watch(sample):
                return None
            if sample == 13:
                raise SampleFailed("sample 13 failed") from ValueError("13")
            if sample == 66:
                os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), list(range(key.start, key.stop))


def key(step: int, start: int = 0, stop: int = 2) -> ReadKey:
    return ReadKey(step, start, stop, None)


def nothing(_: int) -> None:
    return None


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(Source(), workers=1, prefetch=2, pin_memory=False)
    yield pool
    pool.close()


def test_batches_come_from_one_worker_that_outlives_a_change_of_prediction(pool: WorkerPool) -> None:
    first = pool.get(key(0), lambda step: key(step, 0, 2))
    second = pool.get(key(1, 4, 6), lambda step: key(step, 4, 6))
    assert (first[1], second[1]) == ([0, 1], [4, 5])
    assert first[0] == second[0] == pool.pids[0] != os.getpid()


def test_pool_ends_its_workers(pool: WorkerPool) -> None:
    pool.get(key(0), nothing)
    (pid,) = pool.pids
    pool.close()
    until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of worker {pid}")
    with pytest.raises(RuntimeError, match="closed"):
        pool.get(key(1), nothing)


def test_sample_that_fails_in_a_worker_raises_in_the_member(pool: WorkerPool) -> None:
    with pytest.raises(SampleFailed, match="sample 13 failed"):
        pool.get(key(0, 12, 14), nothing)
    assert pool.get(key(1), nothing)[1] == [0, 1]


def test_worker_that_is_killed_is_named_with_the_sample_it_read(pool: WorkerPool) -> None:
    with pytest.raises(LoaderDied, match=r"data worker \d+ ended while it read sample 66") as raised:
        pool.get(key(0, 65, 68), nothing)
    assert raised.value.why == "killed by SIGKILL"
