"""Data workers: they outlive every world, never their member, and change nothing about the data."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shoal.core.data.lanes import LaneLayout
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import LoaderDied, SampleFailed
from shoal.torch.data import worker_processes
from shoal.torch.data.fetch import lane_reader, share_loader

pytestmark = pytest.mark.process

ORDER = SampleOrder(200, 16, epochs=3, seed=7)


class Counted(Dataset[Any]):
    """Counts how often each sample is read, in whichever process (one worker only)."""

    def __init__(self) -> None:
        self.reads = RawArray(ctypes.c_int32, 200)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        return torch.tensor([index, random.random(), float(np.random.rand()), torch.rand(()).item()])


class Hostile(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("no such file")
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Gated(Counted):
    """Reads nothing beyond step 0 before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = RawArray(ctypes.c_int32, 1)

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        while index >= 16 and not self.open[0]:
            time.sleep(0.01)
        return index


class Unsendable(Dataset[Any]):
    """Samples that cannot be pickled."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return lambda: index


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    made: list[Any] = []
    yield lambda loader: made.append(loader) or loader
    for loader in made:
        loader.close()


def always_ahead(span: tuple[int, int]) -> Callable[[int], tuple[int, int] | None]:
    def ahead(step: int) -> tuple[int, int] | None:
        if step >= ORDER.total_steps:
            return None
        size = ORDER.size_of(step)
        return min(span[0], size), min(span[1], size)

    return ahead


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether a process ends in time; a zombie has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_world_changes_keep_the_workers_and_the_data(closing: Callable[[Any], Any]) -> None:
    plain = share_loader(Counted(), ORDER)
    ahead = closing(share_loader(Counted(), ORDER, workers=2, micro=5))
    pids = set()
    spans = [(0, 8), (0, 8), (4, 16), (4, 16), (0, 16), (0, 0), (3, 4), (0, 8)]
    steps = [0, 1, 2, 2, 3, 4, 4, 5, 6, 20, 21, 5, 6]
    for number, step in enumerate(steps):
        span = spans[number % len(spans)]
        expected = plain.take(step, span, always_ahead(span))
        found = ahead.take(step, span, always_ahead(span))
        assert [len(piece) for piece in found] == list(ahead.sizes(span))
        assert torch.equal(torch.cat([torch.empty(0, 4), *found]), torch.cat([torch.empty(0, 4), *expected]))
        pids.add(ahead.pids)
    assert len(pids) == 1
    assert len(ahead.pids) == 2


def test_data_read_ahead_is_used_if_the_share_is_unchanged(closing: Callable[[Any], Any]) -> None:
    data = Counted()
    loader = closing(share_loader(data, ORDER, workers=1, prefetch=3))
    for step in range(9):
        loader.take(step, (0, 16), lambda step: (0, 16) if step < 9 else None)
    loader.take(9, (0, 1), lambda _: None)
    wanted = {int(i) for step in range(9) for i in ORDER.ids(step, 0, 16)} | {int(ORDER.ids(9, 0, 1)[0])}
    assert list(data.reads) == [int(index in wanted) for index in range(200)]


def test_reads_in_flight_for_another_world_are_dropped(closing: Callable[[Any], Any]) -> None:
    data = Gated()
    loader = closing(share_loader(data, SampleOrder(200, 16, shuffle=False), workers=1, prefetch=3))
    loader.take(0, (0, 16), always_ahead((0, 16)))

    def ahead(step: int) -> tuple[int, int]:
        data.open[0] = int(step >= 3)
        return 0, 2

    assert loader.take(1, (8, 10), ahead)[0].tolist() == [24, 25]
    read = {index for index in range(16, 48) if data.reads[index]}
    assert read <= {16, 24, 25, 32, 33}


def test_last_step_does_not_wait_for_later_ones(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Counted(), ORDER, workers=2, prefetch=4))
    for step in range(ORDER.total_steps):
        span = (0, ORDER.size_of(step))
        loader.take(step, span, lambda later: (0, ORDER.size_of(later)) if later < ORDER.total_steps else None)


def test_reading_ahead_preserves_the_global_random_state(closing: Callable[[Any], Any]) -> None:
    before = torch.get_rng_state(), random.getstate()
    loader = closing(share_loader(Counted(), ORDER, workers=1))
    loader.take(0, (0, 8), always_ahead((0, 8)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_placeholder_batch_is_read_by_the_workers(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Counted(), ORDER, workers=1))
    assert loader.placeholder_batch(0).shape == (2, 4)
    assert loader.take(0, (0, 4), always_ahead((0, 4)))[0].shape == (4, 4)


def test_member_with_an_empty_share_reads_ahead(closing: Callable[[Any], Any]) -> None:
    data = Counted()
    loader = closing(share_loader(data, ORDER, workers=1))
    loader.start()
    loader.placeholder_batch(4)
    assert loader.take(4, (0, 0), lambda step: (0, 8) if step == 5 else None) == []
    wanted = ORDER.ids(5, 0, 8).tolist()
    deadline = time.monotonic() + 120
    while not all(data.reads[index] for index in wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    before = list(data.reads)
    loader.take(5, (0, 8), lambda _: None)
    assert list(data.reads) == before


def test_error_in_a_worker_names_the_sample(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Hostile(), SampleOrder(20, 4, shuffle=False), workers=1))
    assert loader.take(0, (0, 4), lambda step: (0, 4) if step < 2 else None)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(SampleFailed, match="sample 7 cannot be read: KeyError") as caught:
        loader.take(1, (0, 4), lambda _: None)
    assert "__getitem__" in caught.value.__notes__[0]


def test_batch_that_cannot_be_sent_is_an_error_and_no_endless_wait(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Unsendable(), ORDER, workers=1, collate=list))
    with pytest.raises(SampleFailed, match="cannot send this batch") as failed:
        loader.take(0, (0, 8), always_ahead((0, 8)))
    assert "lambda" in failed.value.why
    assert "workers=0" in failed.value.do


def test_worker_that_cannot_even_send_its_error_ends() -> None:
    child = os.fork()
    if child == 0:
        worker_processes._send_error_instead(None, ValueError("no pickle"), (0, "what torch sends by itself"))  # type: ignore[arg-type]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_dead_worker_is_reported_with_its_sample(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Hostile(), SampleOrder(20, 4, shuffle=False), workers=2))
    with pytest.raises(LoaderDied, match="while it read sample 9") as caught:
        loader.take(2, (0, 4), lambda _: None)
    assert caught.value.why == "killed by SIGKILL"


def test_worker_that_died_between_steps_is_reported_at_the_next_one(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Counted(), ORDER, workers=2))
    loader.take(0, (0, 4), lambda _: None)
    os.kill(loader.pids[0], signal.SIGKILL)
    # Its main thread is a zombie before the others have ended, and before that no worker is told of its end.
    os.waitid(os.P_PID, loader.pids[0], os.WEXITED | os.WNOWAIT)
    with pytest.raises(LoaderDied, match="killed by SIGKILL"):
        loader.take(1, (0, 4), lambda _: None)


def test_sigterm_to_the_process_tree_does_not_end_the_workers(closing: Callable[[Any], Any]) -> None:
    loader = closing(share_loader(Counted(), ORDER, workers=1))
    loader.take(0, (0, 4), always_ahead((0, 4)))
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(loader.pids[0], number)
    for step in range(1, 6):
        loader.take(step, (0, 4), always_ahead((0, 4)))
    assert not gone(loader.pids[0], within_s=0.1)


def test_close_ends_the_workers() -> None:
    loader = share_loader(Counted(), ORDER, workers=2)
    loader.start()
    pids = loader.pids
    loader.close()
    assert all(gone(pid) for pid in pids)


SCRIPT = """
import sys, time, torch
from torch.utils.data import Dataset
from shoal.core.data.sample_order import SampleOrder
from shoal.torch.data.fetch import share_loader

class Slow(Dataset):
    def __getitem__(self, index):
        if index >= 4:
            time.sleep(600)
        return index

loader = share_loader(Slow(), SampleOrder(100, 4, shuffle=False), workers=2)
loader.take(0, (0, 4), lambda step: (0, 4))
print(*loader.pids, flush=True)
if sys.argv[1] == "stay":
    time.sleep(600)
"""


def started(how: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_workers_do_not_outlive_a_killed_member() -> None:
    member, workers = started("stay")
    assert len(workers) == 2
    member.kill()
    member.wait(180)
    assert all(gone(pid) for pid in workers)


def test_ending_member_does_not_wait_for_hanging_workers() -> None:
    member, workers = started("leave")
    assert member.wait(180) == 0
    assert all(gone(pid) for pid in workers)


def shard(number: int) -> Callable[[], Iterator[Any]]:
    def read() -> Iterator[Any]:
        for index in range(number * 3):
            yield number, index, random.random()

    return read


def test_stream_read_ahead_is_the_same_stream(closing: Callable[[Any], Any]) -> None:
    shards = [shard(number) for number in range(5)]
    layout = LaneLayout.of(5, 6, lanes=3, epochs=2)
    plain = lane_reader(shards, layout, collate=list)
    ahead = closing(lane_reader(shards, layout, collate=list, workers=1))
    assert len(ahead.placeholder_batch()) == len(plain.placeholder_batch()) == 2
    for step, epoch, lanes in [
        (0, 0, (0, 3)),
        (1, 0, (0, 3)),
        (1, 0, (0, 2)),
        (2, 0, (1, 3)),
        (5, 0, (0, 3)),
        (0, 1, (0, 3)),
    ]:
        assert ahead.take(step, epoch, lanes) == plain.take(step, epoch, lanes)
    assert len(ahead.pids) == 1
    assert set(ahead.state_dict()["shards"]) >= {0, 1}
