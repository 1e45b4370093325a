"""A checkpoint exists only when it is complete, and a damaged one does not affect the one before it."""

from __future__ import annotations

import contextlib
import errno
import secrets

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from shoal.errors import CheckpointDamaged, CheckpointFailed, NoCheckpoint, ShoalError, StoreUnusable
from shoal.store import checkpoint
from shoal.store.blob_store import LocalStore, RemoteStore
from shoal.store.checkpoint_writer import CheckpointWriter
from shoal.worker.transport.snapshot import CHUNK_BYTES, Snapshot


def snapshot(step: int, sizes: tuple[int, ...] = (1000, 0, 77)) -> Snapshot:
    buffers = [np.random.default_rng((step, size)).integers(0, 256, size, np.uint8) for size in sizes]
    return Snapshot(step, f"header {step}".encode(), buffers, readers=1)


def write(
    store, step: int, world: int = 1, sizes: tuple[int, ...] = (1000, 0, 77), **options
) -> checkpoint.CheckpointInfo:
    options = {"run": "r", "meta": {"cursor": [0, step]}} | options
    return checkpoint.write(store, snapshot(step, sizes), "checkpoint", world=world, **options)


def names(store) -> list[str]:
    return [blob.name for blob in store.list()]


def steps(store) -> list[int]:
    return [entry.step for entry in checkpoint.entries(store)]


def is_step(loaded: checkpoint.LoadedCheckpoint, step: int, sizes: tuple[int, ...] = (1000, 0, 77)) -> bool:
    truth = snapshot(step, sizes)
    same = all(
        got.tobytes() == b"".join(truth.chunk("t", i, at, min(at + CHUNK_BYTES, s)) for at in range(0, s, CHUNK_BYTES))
        for i, (got, s) in enumerate(zip(loaded.buffers, truth.sizes, strict=True))
    )
    return same and loaded.entry.step == step and loaded.header == truth.header


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "checkpoints")


@pytest.fixture(params=["local", "memory", "file"])
def any_store(request, tmp_path):
    if request.param == "local":
        return LocalStore(tmp_path / "checkpoints")
    if request.param == "memory":
        return RemoteStore(f"memory://{secrets.token_hex(4)}/dir")
    return RemoteStore(f"file://{tmp_path}/checkpoints")


def test_what_was_written_is_read(any_store):
    write(any_store, 5, world=3)
    loaded = checkpoint.read(any_store)
    assert is_step(loaded, 5)
    assert loaded.entry.world == 3
    assert loaded.entry.manifest.run == "r"
    assert loaded.entry.manifest.meta == {"cursor": [0, 5]}
    assert loaded.passed_over == ()


def test_large_buffers_go_in_pieces(any_store):
    sizes = (CHUNK_BYTES * 2 + 5, 3)
    entry = write(any_store, 1, sizes=sizes)
    assert len(entry.manifest.checksums) == 4
    assert is_step(checkpoint.read(any_store), 1, sizes)


def test_what_was_read_may_be_changed(store):
    write(store, 1)
    checkpoint.read(store).buffers[0][:] = 0


def test_the_newest_is_the_one_with_the_highest_step_then_world(any_store):
    write(any_store, 9, world=9)
    write(any_store, 10, world=2)
    write(any_store, 10, world=1)
    newest = checkpoint.newest(any_store)
    assert newest is not None
    assert newest.key == (10, 2)


def test_a_writer_of_an_older_world_does_not_hide_what_a_newer_one_wrote(store):
    write(store, 20, world=5)
    write(store, 20, world=4)
    write(store, 19, world=4)
    assert checkpoint.read(store).entry.key == (20, 5)


def test_an_empty_place_has_no_checkpoint(any_store):
    assert checkpoint.newest(any_store) is None
    with pytest.raises(NoCheckpoint):
        checkpoint.read(any_store)


def damage_data(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "a flipped bit": damage_data,
    "truncated": truncate,
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", ["data", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(store, tmp_path, which, damage):
    write(store, 1)
    write(store, 2)
    [path] = [path for path in (tmp_path / "checkpoints").glob("step-000000000002.*") if path.name.endswith(which)]
    DAMAGES[damage](path)
    loaded = checkpoint.read(store)
    assert is_step(loaded, 1)
    assert len(loaded.passed_over) == (0 if (which, damage) == ("manifest.json", "gone") else 1)


def test_any_flipped_bit_of_a_manifest_is_noticed(store, tmp_path):
    write(store, 1, sizes=(10,))
    write(store, 2, sizes=(10,))
    [path] = (tmp_path / "checkpoints").glob("step-000000000002.*.json")
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        loaded = checkpoint.read(store)
        assert is_step(loaded, loaded.entry.step, (10,))
        assert loaded.entry.manifest.meta == {"cursor": [0, loaded.entry.step]}


def test_if_none_is_good_the_error_lists_what_was_tried(store, tmp_path):
    write(store, 1)
    write(store, 2)
    for path in (tmp_path / "checkpoints").glob("*.data"):
        damage_data(path)
    with pytest.raises(CheckpointDamaged) as caught:
        checkpoint.read(store)
    assert "step-000000000001" in caught.value.why
    assert "step-000000000002" in caught.value.why
    assert caught.value.do


def test_an_older_checkpoint_can_be_asked_for(store):
    old = write(store, 1)
    write(store, 2)
    assert is_step(checkpoint.read(store, old), 1)


def test_pruning_keeps_the_newest(any_store):
    for step in range(1, 6):
        write(any_store, step)
    assert len(checkpoint.prune(any_store, keep=2)) == 3
    assert steps(any_store) == [5, 4]
    assert len(names(any_store)) == 4


def test_pruning_never_deletes_the_last_good_one(store):
    write(store, 1)
    checkpoint.prune(store, keep=0)
    assert steps(store) == [1]


def test_damaged_ones_do_not_count_as_kept(store, tmp_path):
    for step in range(1, 5):
        write(store, step)
    for step in (3, 4):
        [path] = (tmp_path / "checkpoints").glob(f"step-00000000000{step}.*.data")
        truncate(path)
    checkpoint.prune(store, keep=1)
    assert steps(store) == [2]


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_just_written_outlives_a_newer_one_that_cannot_be_restored(store, tmp_path, keep):
    """A manifest does not show that the disk has lost a bit of the data: only who restores it finds out."""
    write(store, 8)
    for damaged in [write(store, 10), write(store, 11)]:
        path = tmp_path / "checkpoints" / damaged.manifest.data
        path.write_bytes(b"\xff" + path.read_bytes()[1:])
    restored = checkpoint.read(store).entry
    assert restored.step == 8
    errors: list[ShoalError] = []
    writer = CheckpointWriter(store, "r", keep, on_done=lambda *_: None, on_error=errors.append)
    assert writer.submit(snapshot(9), restored.world + 1, {})
    assert writer.close(20)
    assert errors == []
    assert is_step(checkpoint.read(store), 9)


def test_leftovers_of_torn_writes_are_cleaned_up_once_a_newer_one_is_whole(store, tmp_path):
    write(store, 1)
    root = tmp_path / "checkpoints"
    torn = ["step-000000000002.world-00000001.aa.data.bb.partial", "step-000000000002.world-00000001.cc.data"]
    ahead = "step-000000000009.world-00000001.dd.data.ee.partial"
    for name in [*torn, ahead, "notes.txt", "step-by-step.md"]:
        (root / name).write_bytes(b"x")
    checkpoint.prune(store, keep=2)
    assert set(torn) <= set(names(store))
    write(store, 3)
    checkpoint.prune(store, keep=2)
    assert not set(torn) & set(names(store))
    assert {ahead, "notes.txt", "step-by-step.md"} <= set(names(store))
    assert steps(store) == [3, 1]


def test_a_write_into_the_same_name_keeps_the_old_data_until_it_is_whole(store):
    write(store, 1)
    with pytest.raises(CheckpointFailed):
        write(store, 1, fence=iter([True, True, False]).__next__)
    assert is_step(checkpoint.read(store), 1)


def test_writing_the_same_step_again_is_harmless(any_store):
    write(any_store, 1)
    write(any_store, 1)
    assert is_step(checkpoint.read(any_store), 1)
    write(any_store, 2)
    checkpoint.prune(any_store, keep=1)
    assert len(names(any_store)) == 2


def test_a_writer_whose_world_is_over_gives_up(store):
    write(store, 1)
    with pytest.raises(CheckpointFailed, match="checkpoint aborted"):
        write(store, 2, fence=lambda: False)
    assert steps(store) == [1]
    assert len(names(store)) == 2


def test_data_whose_manifest_cannot_be_written_takes_no_room(any_store):
    write(any_store, 1)
    with pytest.raises(CheckpointFailed):
        write(any_store, 2, fence=iter([True, True, False]).__next__)
    assert steps(any_store) == [1]
    assert len(names(any_store)) == 2


def test_data_whose_manifest_the_disk_refuses_takes_no_room(tmp_path):
    class NearlyFull(LocalStore):
        def put(self, name, chunks):
            if name.endswith(".json"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().put(name, chunks)

    with pytest.raises(CheckpointFailed):
        write(NearlyFull(tmp_path), 2)
    assert list(tmp_path.iterdir()) == []


def test_the_snapshot_is_released_whether_or_not_the_write_succeeds(store):
    for fence in (lambda: True, lambda: False):
        source = snapshot(1)
        with contextlib.suppress(CheckpointFailed):
            checkpoint.write(store, source, "checkpoint", run="r", world=1, meta={}, fence=fence)
        assert source.finished


class Full(LocalStore):
    def free_bytes(self) -> int:
        return 100


def test_a_disk_that_is_too_full_is_not_filled_up(tmp_path):
    with pytest.raises(CheckpointFailed) as caught:
        write(Full(tmp_path), 1)
    assert "100 are free" in caught.value.why
    assert "checkpoint.to" in caught.value.do
    assert list(tmp_path.iterdir()) == []


class Refusing(LocalStore):
    def __init__(self, root, number: int) -> None:
        super().__init__(root)
        self.number = number

    def put(self, name, chunks):
        raise OSError(self.number, "no")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EROFS, StoreUnusable),
        (errno.EACCES, StoreUnusable),
        (errno.ENOSPC, CheckpointFailed),
        (errno.EIO, CheckpointFailed),
    ],
)
def test_every_failure_has_a_code_a_cause_and_a_remedy(tmp_path, number, kind):
    with pytest.raises(kind) as caught:
        write(Refusing(tmp_path, number), 1)
    assert caught.value.why
    assert caught.value.do


class Unkind(Exception):  # noqa: N818
    """What some client libraries raise: not an OSError."""


class UnkindFile(MemoryFile):
    def read(self, *_size):
        raise Unkind("503, slow down")


@pytest.mark.parametrize("what", [".data", ".manifest.json"])
def test_whatever_a_driver_raises_while_it_reads_is_a_checkpoint_that_cannot_be_read(what, monkeypatch):
    store = RemoteStore(f"memory://{secrets.token_hex(4)}/dir")
    write(store, 1)
    entry = write(store, 2)
    stem = entry.manifest.data.removesuffix(".data")
    for path, file in MemoryFileSystem.store.items():
        if path.endswith(f"{stem}{what}"):
            monkeypatch.setitem(MemoryFileSystem.store, path, UnkindFile(file.fs, path, file.getvalue()))
    loaded = checkpoint.read(store)
    assert is_step(loaded, 1)
    assert "Unkind: 503, slow down" in loaded.passed_over[0].why
