"""Checkpoints: the training state of one step, as blobs in a store.

Theory of operation
-------------------
A checkpoint is two blobs::

    step-000000001200.world-00000007.5f0c2a91.data             the buffers, end to end
    step-000000001200.world-00000007.5f0c2a91.manifest.json    header, sizes, checksums, and the name of the data

Atomicity. The data is written first and the manifest last; a checkpoint exists if and only if its manifest does. This
needs nothing from the store but that a blob, once complete, is whole: no rename, no lock. A writer that dies leaves
data without a manifest, which readers ignore and a later `prune` deletes. Deletion goes the other way: manifest first.

No overwriting. Each write has a random part in its names, so two writers never touch the same blob. Names sort by step,
then by world. If a member of an older world is still writing when a newer world has formed, its checkpoint of the same
step sorts below the newer one and cannot hide it. `fence` tells the writer that its world has ended; it is asked before
every chunk and before the manifest.

Integrity. The manifest has a CRC-32 of itself and one of every 4 MiB chunk of data. `entries` checks manifests and the
size of the data, which is cheap; `read` checks every chunk.

Damaged checkpoints. A truncated or changed checkpoint is never loaded. `read` goes to the next older one and returns
the errors of those that it passed over. It raises CheckpointDamaged only if all are damaged, NoCheckpoint if there are
none.

Memory. Writing and reading go chunk by chunk. The state is read from a snapshot that members share, while training
continues; a chunk that is no longer available raises LookupError, and the checkpoint is abandoned.

Sharded state. With parameter servers no process holds the whole state. The servers send their parts to one writer, and
the parts become the buffers of one ordinary checkpoint (`worker/parameter_server/sharded_checkpoint`), so that any
number of servers can restore it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.core.nouns import counted
from shoal.errors import CheckpointDamaged, CheckpointFailed, NoCheckpoint, ShoalError, StoreUnusable
from shoal.store.blob_store import Blob, Store

Bytes: TypeAlias = NDArray[np.uint8]

FORMAT = 1
CHUNK_BYTES = 4 << 20
_NAME = re.compile(r"step-(\d{12,})\.world-(\d{8,})\.")
_MANIFEST = ".manifest.json"
_MARGIN_BYTES = 1 << 20


class CheckpointSource(Protocol):
    """Snapshot that a checkpoint is written from, read forward in chunks (`worker/transport/snapshot`)."""

    step: int
    header: bytes
    sizes: tuple[int, ...]
    total_bytes: int

    def chunk(self, reader: str, index: int, start: int, stop: int) -> bytes:
        """Return a copy of some bytes of one buffer, or raise LookupError if they are gone."""

    def done(self, reader: str) -> None:
        """Release the snapshot for this reader."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a manifest; `meta` is the caller's own data, such as the cursor and the seed."""

    format: int
    run: str
    step: int
    world: int
    meta: dict[str, Any]
    data: str
    header: str
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]
    total_bytes: int


class _ChecksummedManifest(msgspec.Struct, forbid_unknown_fields=True):
    crc32: int
    manifest: msgspec.Raw


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint whose manifest and data size are valid; its data has not been checked."""

    step: int
    world: int
    manifest: CheckpointManifest

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.world

    @property
    def name(self) -> str:
        return _prefix(*self.key)


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Content of a checkpoint, and the errors of newer ones that were skipped because they are damaged."""

    entry: CheckpointInfo
    header: bytes
    buffers: list[Bytes]
    passed_over: tuple[ShoalError, ...] = ()


def write(
    store: Store,
    snapshot: CheckpointSource,
    reader: str,
    *,
    run: str,
    world: int,
    meta: dict[str, Any],
    fence: Callable[[], bool] = lambda: True,
) -> CheckpointInfo:
    """Write one checkpoint, a chunk at a time; raise CheckpointFailed or StoreUnusable if it fails.

    `fence` returns whether this member may still write; it is called before every chunk and before the manifest.
    """
    name = f"{_prefix(snapshot.step, world)}.{secrets.token_hex(4)}"
    data = f"{name}.data"
    checksums: list[int] = []
    try:
        _check_space(store, snapshot)
        total_bytes = store.put(data, _chunks(snapshot, reader, checksums, fence))
        header = base64.b64encode(snapshot.header).decode()
        manifest = CheckpointManifest(
            FORMAT, run, snapshot.step, world, meta, data, header, snapshot.sizes, tuple(checksums), total_bytes
        )
        try:
            _check_fence(fence)
            store.put(f"{name}{_MANIFEST}", [_seal(manifest)])
        except (OSError, ShoalError):
            _discard(store, name)
            raise
    except OSError as error:
        raise _failure(store, snapshot, error) from error
    except LookupError as error:
        raise CheckpointFailed(f"the checkpoint of step {snapshot.step} was abandoned", why=str(error)) from error
    finally:
        snapshot.done(reader)
    return CheckpointInfo(snapshot.step, world, manifest)


def entries(store: Store) -> list[CheckpointInfo]:
    """Return the complete checkpoints of a store, newest first."""
    blobs = _listed(store)
    checked = [_entry(store, blob, blobs) for blob in blobs.values() if blob.name.endswith(_MANIFEST)]
    return sorted(
        (info for info in checked if isinstance(info, CheckpointInfo)), key=lambda info: info.key, reverse=True
    )


def newest(store: Store) -> CheckpointInfo | None:
    """Return the newest complete checkpoint, or None."""
    return next(iter(entries(store)), None)


def read(store: Store, entry: CheckpointInfo | None = None) -> LoadedCheckpoint:
    """Return the content of a checkpoint (the newest by default), or of the newest good one before it.

    Raise CheckpointDamaged if none is good, NoCheckpoint if there is none.
    """
    blobs = _listed(store)
    names = sorted((name for name in blobs if name.endswith(_MANIFEST)), key=_key, reverse=True)
    passed_over: list[ShoalError] = []
    for name in names:
        if entry is not None and _key(name) > entry.key:
            continue
        info = _entry(store, blobs[name], blobs)
        try:
            if not isinstance(info, CheckpointInfo):
                raise info
            header, buffers = _content(store, info)
        except CheckpointDamaged as error:
            passed_over.append(error)
            continue
        return LoadedCheckpoint(info, header, buffers, tuple(passed_over))
    if passed_over:
        raise CheckpointDamaged(
            f"every checkpoint in {store.where} is damaged ({counted(len(passed_over), 'checkpoint')})",
            why="; ".join(f"{error.what} ({error.why})" for error in passed_over),
            do="restore one from a backup, or start a new run",
        )
    raise NoCheckpoint(f"no complete checkpoint in {store.where}", do="check checkpoint.to, or start a new run")


def prune(store: Store, keep: int, written: CheckpointInfo | None = None) -> list[str]:
    """Keep the newest `keep` complete checkpoints; delete older ones and leftovers of older writes; return their names.

    If `written` is given, newer checkpoints do not count as kept: this run restored an older one, so they were damaged.
    """
    good = [info for info in entries(store) if written is None or info.key <= written.key]
    if not good:
        return []
    kept = list(dict.fromkeys(info.name for info in good))[: max(1, keep)]
    older = sorted({key for key in map(_key, _listed(store)) if key < good[0].key})
    deleted = [name for key in older if (name := _prefix(*key)) not in kept]
    try:
        for name in deleted:
            # Manifest first: if this is interrupted, leftover data remains and not a damaged checkpoint.
            for blob in store.list(f"{name}."):
                if blob.name.endswith(_MANIFEST):
                    store.delete(blob.name)
            store.delete(f"{name}.")
    except OSError as error:
        raise StoreUnusable(
            f"cannot delete old checkpoints in {store.where}", why=str(error), do="delete them by hand"
        ) from error
    return deleted


def _discard(store: Store, name: str) -> None:
    """Delete a failed write; its manifest first, in case that was stored after all."""
    with contextlib.suppress(OSError):
        store.delete(f"{name}{_MANIFEST}")
        store.delete(f"{name}.")


def _prefix(step: int, world: int) -> str:
    return f"step-{step:012d}.world-{world:08d}"


def _key(name: str) -> tuple[int, int]:
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _chunks(
    snapshot: CheckpointSource, reader: str, checksums: list[int], fence: Callable[[], bool]
) -> Iterator[bytes]:
    for index, size in enumerate(snapshot.sizes):
        for start in range(0, size, CHUNK_BYTES):
            _check_fence(fence)
            data = snapshot.chunk(reader, index, start, min(start + CHUNK_BYTES, size))
            checksums.append(zlib.crc32(data))
            yield data


def _check_fence(fence: Callable[[], bool]) -> None:
    if not fence():
        raise CheckpointFailed(
            "checkpoint aborted", why="the world was dissolved or the member is closing, so it may no longer write"
        )


def _check_space(store: Store, snapshot: CheckpointSource) -> None:
    free = store.free_bytes()
    needed = snapshot.total_bytes + len(snapshot.header) * 2 + _MARGIN_BYTES
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, f"need {needed} bytes, {free} are free")


def _failure(store: Store, snapshot: CheckpointSource, error: OSError) -> ShoalError:
    what = f"cannot write the checkpoint of step {snapshot.step} to {store.where}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
        return StoreUnusable(what, why=str(error), do="make it writable, or set checkpoint.to to another location")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointFailed(what, why=str(error), do="free some space, or set checkpoint.to or checkpoint.keep")
    return CheckpointFailed(what, why=str(error), do="nothing: Shoal tries again when the next checkpoint is due")


def _seal(manifest: CheckpointManifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_ChecksummedManifest(zlib.crc32(body), msgspec.Raw(body)))


def _listed(store: Store) -> dict[str, Blob]:
    """Return the blobs that belong to checkpoints, by name, and no other files of the same directory."""
    try:
        return {blob.name: blob for blob in store.list("step-") if _NAME.match(blob.name)}
    except OSError as error:
        raise StoreUnusable(f"cannot list {store.where}", why=str(error), do="check checkpoint.to") from error


def _entry(store: Store, blob: Blob, blobs: dict[str, Blob]) -> CheckpointInfo | CheckpointDamaged:
    """Return the checkpoint that a manifest describes, or what is wrong with it."""
    try:
        with store.open(blob.name) as file:
            sealed = msgspec.json.decode(file.read(), type=_ChecksummedManifest)
        if zlib.crc32(sealed.manifest) != sealed.crc32:
            raise ValueError("checksum mismatch")
        manifest = msgspec.json.decode(sealed.manifest, type=CheckpointManifest)
    except (OSError, ValueError) as error:
        return CheckpointDamaged(f"{blob.name} cannot be read", why=str(error))
    data = blobs.get(manifest.data)
    if manifest.format != FORMAT:
        return CheckpointDamaged(f"{blob.name} cannot be read", why=f"format {manifest.format}, expected {FORMAT}")
    if (manifest.step, manifest.world) != _key(blob.name):
        return CheckpointDamaged(f"{blob.name} cannot be read", why=f"its content is of step {manifest.step}")
    if data is None or data.size_bytes != manifest.total_bytes or sum(manifest.sizes) != manifest.total_bytes:
        has = "missing" if data is None else f"{data.size_bytes} bytes long"
        return CheckpointDamaged(f"{manifest.data} is {has}", why=f"expected {manifest.total_bytes} bytes")
    return CheckpointInfo(manifest.step, manifest.world, manifest)


def _content(store: Store, entry: CheckpointInfo) -> tuple[bytes, list[Bytes]]:
    manifest = entry.manifest
    checksums = iter(manifest.checksums)
    try:
        with store.open(manifest.data) as file:
            buffers = [_buffer(file, size, checksums) for size in manifest.sizes]
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{manifest.data} cannot be read", why=str(error)) from error
    return base64.b64decode(manifest.header), buffers


def _buffer(file: BinaryIO, size: int, checksums: Iterator[int]) -> Bytes:
    buffer = np.empty(size, np.uint8)
    view = buffer.data
    for start in range(0, size, CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        _fill(file, chunk)
        if zlib.crc32(chunk) != next(checksums, None):
            raise ValueError(f"checksum mismatch in the {len(chunk)} bytes before byte {file.tell()}")
    return buffer


def _fill(file: BinaryIO, chunk: memoryview) -> None:
    done = 0
    while done < len(chunk):
        data = file.read(len(chunk) - done)
        if not data:
            raise ValueError(f"it ends after {file.tell()} bytes")
        chunk[done : done + len(data)] = data
        done += len(data)
