"""The state of a step can be read while its owner goes on, and is never a mixture of two steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shoal.worker.transport.snapshot import CHUNK_BYTES, ChunkReleased, Snapshot


def memory(*sizes: int) -> list[np.ndarray]:
    return [np.full(size, 7, np.uint8) for size in sizes]


def read_all(snapshot: Snapshot, reader: str, chunk_bytes: int = 10) -> list[bytes]:
    found = []
    for index, size in enumerate(snapshot.sizes):
        chunks = [
            snapshot.chunk(reader, index, start, min(start + chunk_bytes, size))
            for start in range(0, size, chunk_bytes)
        ]
        found.append(b"".join(chunks))
    snapshot.done(reader)
    return found


def test_snapshot_reports_its_sizes():
    snapshot = Snapshot(3, b"header", memory(10, 0, 5), readers=1)
    assert (snapshot.step, snapshot.header, snapshot.sizes, snapshot.total_bytes) == (3, b"header", (10, 0, 5), 15)


def test_freeze_copies_nothing_if_all_readers_are_done():
    snapshot = Snapshot(0, b"", memory(100, 50), readers=2)
    read_all(snapshot, "a")
    read_all(snapshot, "b")
    assert snapshot.finished
    assert snapshot.freeze() == 0


def test_freeze_copies_everything_if_an_expected_reader_has_not_begun():
    snapshot = Snapshot(0, b"", memory(100, 50), readers=2)
    read_all(snapshot, "a")
    assert not snapshot.finished
    assert snapshot.freeze() == 150


def test_freeze_copies_only_what_the_slowest_reader_lacks():
    snapshot = Snapshot(0, b"", memory(100, 50, 30), readers=2)
    snapshot.chunk("fast", 2, 0, 10)
    snapshot.chunk("slow", 1, 0, 20)
    assert snapshot.freeze() == 30 + 30


def test_second_freeze_copies_nothing():
    snapshot = Snapshot(0, b"", memory(100), readers=1)
    assert snapshot.freeze() == 100
    assert snapshot.freeze() == 0


def test_late_reader_gets_the_frozen_state_after_the_owner_continued():
    live = memory(100, 50)
    snapshot = Snapshot(0, b"", live, readers=2)
    snapshot.chunk("a", 0, 0, 40)
    snapshot.freeze()
    for buffer in live:
        buffer[:] = 9
    assert read_all(snapshot, "b") == [b"\x07" * 100, b"\x07" * 50]


def test_reader_continues_across_a_freeze():
    live = memory(100)
    snapshot = Snapshot(0, b"", live, readers=1)
    first = snapshot.chunk("a", 0, 0, 40)
    assert snapshot.freeze() == 60
    live[0][:] = 9
    assert first + snapshot.chunk("a", 0, 40, 100) == b"\x07" * 100


def test_bytes_that_all_readers_have_are_released_by_a_freeze():
    snapshot = Snapshot(0, b"", memory(100), readers=1)
    snapshot.chunk("a", 0, 0, 40)
    snapshot.freeze()
    with pytest.raises(ChunkReleased):
        snapshot.chunk("a", 0, 0, 40)


def test_copies_are_released_when_all_readers_have_them():
    snapshot = Snapshot(0, b"", memory(100, 50), readers=2)
    snapshot.freeze()
    for reader in "ab":
        snapshot.chunk(reader, 0, 0, 100)
        snapshot.chunk(reader, 1, 0, 10)
    with pytest.raises(ChunkReleased):
        snapshot.chunk("a", 0, 0, 100)
    assert snapshot.chunk("a", 1, 10, 50) == b"\x07" * 40


def test_unexpected_reader_never_gets_memory_that_may_have_changed():
    live = memory(100)
    snapshot = Snapshot(0, b"", live, readers=1)
    read_all(snapshot, "a")
    snapshot.freeze()
    live[0][:] = 9
    with pytest.raises(ChunkReleased):
        snapshot.chunk("late", 0, 0, 10)


def test_dead_reader_keeps_nothing_in_memory():
    snapshot = Snapshot(0, b"", memory(100), readers=2)
    read_all(snapshot, "a")
    snapshot.done("dead")
    assert snapshot.finished
    assert snapshot.freeze() == 0


def test_abandoned_snapshot_is_released():
    snapshot = Snapshot(0, b"", memory(100), readers=3)
    snapshot.chunk("a", 0, 0, 10)
    snapshot.abandon()
    assert snapshot.finished
    assert snapshot.freeze() == 0
    with pytest.raises(ChunkReleased):
        snapshot.chunk("a", 0, 10, 20)


def test_snapshot_without_readers_is_finished_at_once():
    snapshot = Snapshot(0, b"", memory(100), readers=0)
    assert snapshot.finished
    assert snapshot.freeze() == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, 101), (6, 5)])
def test_chunk_outside_the_buffer_is_refused(start, stop):
    with pytest.raises(ValueError, match="invalid chunk"):
        Snapshot(0, b"", memory(100), readers=1).chunk("a", 0, start, stop)


def test_chunk_is_limited_to_four_mebibytes():
    with pytest.raises(ValueError, match="the limit is"):
        Snapshot(0, b"", memory(CHUNK_BYTES + 1), readers=1).chunk("a", 0, 0, CHUNK_BYTES + 1)


def test_buffers_of_other_types_are_read_as_bytes():
    numbers = np.arange(4, dtype=np.float32)
    assert Snapshot(0, b"", [numbers], readers=1).chunk("a", 0, 0, 16) == numbers.tobytes()


def test_threaded_readers_never_see_two_steps_mixed():
    live = [np.zeros(200_000, np.uint8) for _ in range(4)]
    for step in range(1, 15):
        for buffer in live:
            buffer[:] = step
        snapshot = Snapshot(step, b"", live, readers=3)
        got: dict[str, list[bytes]] = {}

        def reads(name: str, snapshot: Snapshot = snapshot, got: dict[str, list[bytes]] = got) -> None:
            got[name] = read_all(snapshot, name, 9_000)

        threads = [threading.Thread(target=reads, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        snapshot.freeze()
        for buffer in live:
            buffer[:] = 255
        for thread in threads:
            thread.join(timeout=30)
        assert set(got) == set("abc")
        for buffers in got.values():
            assert all(set(data) == {step} for data in buffers)
