"""A crash at any byte of a write or at any deletion never costs the newest complete checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import CheckpointDamaged, NoCheckpoint
from shoal.store import checkpoint
from shoal.store.blob_store import Blob
from shoal.worker.transport.snapshot import Snapshot


class Crash(BaseException):
    """The process is gone; BaseException, so that nothing tidies up."""


class FragileStore:
    """A store in memory whose process dies after so many bytes, renames and deletions.

    `renames` tells a directory (a blob appears whole) from an object store whose partial uploads may be visible.
    """

    where = "memory"

    def __init__(self, renames: bool) -> None:
        self.renames = renames
        self.blobs: dict[str, bytes] = {}
        self.left = 1 << 60

    def spend(self, cost: int) -> int:
        allowed = min(cost, self.left)
        self.left -= allowed
        return allowed

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        place = f"{name}.x.partial" if self.renames else name
        self.blobs[place] = b""
        for chunk in chunks:
            allowed = self.spend(len(chunk))
            self.blobs[place] += chunk[:allowed]
            if allowed < len(chunk):
                raise Crash
        if not self.spend(1):
            raise Crash
        if self.renames:
            self.blobs[name] = self.blobs.pop(place)
        if not self.spend(1):
            raise Crash
        return len(self.blobs[name])

    def open(self, name: str) -> io.BytesIO:
        return io.BytesIO(self.blobs[name])

    def list(self, prefix: str = "") -> list[Blob]:
        return [Blob(name, len(data)) for name, data in sorted(self.blobs.items()) if name.startswith(prefix)]

    def delete(self, prefix: str) -> None:
        for blob in self.list(prefix):
            if not self.spend(1):
                raise Crash
            del self.blobs[blob.name]

    def free_bytes(self) -> None:
        return None


def content(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 256, 60, np.uint8)


def write(store: FragileStore, step: int, world: int) -> None:
    source = Snapshot(step, f"h{step}".encode(), [content(step)[:50], content(step)[50:]], readers=1)
    checkpoint.write(store, source, "checkpoint", run="r", world=world, meta={})


def newest_step(store: FragileStore) -> int:
    try:
        loaded = checkpoint.read(store)
    except NoCheckpoint:
        return 0
    except CheckpointDamaged:
        if store.renames:
            raise
        return 0
    step = loaded.entry.step
    assert np.concatenate(loaded.buffers).tobytes() == content(step).tobytes()
    assert loaded.header == f"h{step}".encode()
    assert not store.renames or loaded.passed_over == ()
    return step


@given(renames=st.booleans(), keep=st.integers(1, 3), crashes=st.lists(st.integers(0, 1500), min_size=1, max_size=4))
def test_a_crash_never_costs_the_newest_complete_checkpoint(renames, keep, crashes):
    store = FragileStore(renames)
    step = complete = 0
    for world, crash in enumerate(crashes, start=1):
        store.left = crash
        try:
            for _ in range(3):
                step += 1
                write(store, step, world)
                complete = step
                checkpoint.prune(store, keep)
        except Crash:
            pass
        store.left = 1 << 60
        newest = newest_step(store)
        assert newest in (complete, step)
        step = complete = newest
    write(store, step + 1, world=99)
    checkpoint.prune(store, keep)
    assert newest_step(store) == step + 1
    kept = checkpoint.entries(store)
    assert len(kept) <= keep
    assert {name.split(".world")[0] for name in store.blobs} == {entry.name.split(".world")[0] for entry in kept}


@given(renames=st.booleans(), at=st.integers(0, 2000), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_never_loaded(renames, at, flip):
    store = FragileStore(renames)
    write(store, 1, world=1)
    write(store, 2, world=1)
    names = [name for name in store.blobs if "step-000000000002" in name]
    everything = sum(len(store.blobs[name]) for name in names)
    at %= everything
    for name in names:
        data = bytearray(store.blobs[name])
        if at < len(data):
            data[at] ^= flip
            store.blobs[name] = bytes(data)
            break
        at -= len(data)
    loaded = checkpoint.read(store)
    assert np.concatenate(loaded.buffers).tobytes() == content(loaded.entry.step).tobytes()
    assert loaded.header == f"h{loaded.entry.step}".encode()
