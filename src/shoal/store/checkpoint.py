"""Checkpoints: a data blob, and a manifest that is written last and makes the checkpoint exist.

Names order them by step, then by world, so a writer of an older world never hides what a newer one wrote::

    step-000000001200.world-00000007.5f0c2a91.data             the buffers, end to end
    step-000000001200.world-00000007.5f0c2a91.manifest.json    the header, sizes, checksums, the name of the data

No blob is ever overwritten: every write has a random part in its names.
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

from shoal.errors import CheckpointDamaged, CheckpointFailed, NoCheckpoint, ShoalError, StoreUnusable
from shoal.store.blob_store import Blob, Store

Bytes: TypeAlias = NDArray[np.uint8]

FORMAT = 1
PIECE_BYTES = 4 << 20
_NAME = re.compile(r"step-(\d{12,})\.world-(\d{8,})\.")
_MANIFEST = ".manifest.json"
_MARGIN_BYTES = 1 << 20


class CheckpointSource(Protocol):
    """What a checkpoint is written from: a snapshot of the state, read forward in pieces (see worker.snapshot)."""

    step: int
    header: bytes
    sizes: tuple[int, ...]
    total_bytes: int

    def chunk(self, reader: str, index: int, start: int, stop: int) -> bytes:
        """Return a copy of some bytes of one buffer, or raise LookupError if they are gone."""

    def done(self, reader: str) -> None:
        """Say that the reader needs nothing more."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint consists of; `meta` is the caller's: the cursor, the seed, and the like."""

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
    """A checkpoint that is complete in a store, as far as can be told without reading its data."""

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
    """The content of a checkpoint, and the newer ones that were passed over because they are damaged."""

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
    """Write one checkpoint, a piece at a time; raise CheckpointFailed or StoreUnusable if that is not possible.

    `fence` says whether this member may still write; it is asked before every piece and before the manifest.
    """
    name = f"{_prefix(snapshot.step, world)}.{secrets.token_hex(4)}"
    data = f"{name}.data"
    checksums: list[int] = []
    try:
        _check_space(store, snapshot)
        total_bytes = store.put(data, _pieces(snapshot, reader, checksums, fence))
        header = base64.b64encode(snapshot.header).decode()
        manifest = CheckpointManifest(
            FORMAT, run, snapshot.step, world, meta, data, header, snapshot.sizes, tuple(checksums), total_bytes
        )
        try:
            _check_fence(fence)
            store.put(f"{name}{_MANIFEST}", [_seal(manifest)])
        except (OSError, ShoalError):
            _take_back(store, name)
            raise
    except OSError as error:
        raise _failure(store, snapshot, error) from error
    except LookupError as error:
        raise CheckpointFailed(f"the checkpoint of step {snapshot.step} was given up", why=str(error)) from error
    finally:
        snapshot.done(reader)
    return CheckpointInfo(snapshot.step, world, manifest)


def entries(store: Store) -> list[CheckpointInfo]:
    """Return the complete checkpoints of a store, newest first."""
    blobs = _listed(store)
    found = [_entry(store, blob, blobs) for blob in blobs.values() if blob.name.endswith(_MANIFEST)]
    return sorted((each for each in found if isinstance(each, CheckpointInfo)), key=lambda each: each.key, reverse=True)


def newest(store: Store) -> CheckpointInfo | None:
    """Return the newest complete checkpoint, or None."""
    return next(iter(entries(store)), None)


def read(store: Store, entry: CheckpointInfo | None = None) -> LoadedCheckpoint:
    """Return the content of a checkpoint (the newest by default), or of the newest good one before it."""
    blobs = _listed(store)
    names = sorted((name for name in blobs if name.endswith(_MANIFEST)), key=_key, reverse=True)
    passed_over: list[ShoalError] = []
    for name in names:
        if entry is not None and _key(name) > entry.key:
            continue
        found = _entry(store, blobs[name], blobs)
        try:
            if not isinstance(found, CheckpointInfo):
                raise found
            header, buffers = _content(store, found)
        except CheckpointDamaged as error:
            passed_over.append(error)
            continue
        return LoadedCheckpoint(found, header, buffers, tuple(passed_over))
    if passed_over:
        raise CheckpointDamaged(
            f"none of the {len(passed_over)} checkpoints in {store.where} is good",
            why="; ".join(f"{error.what} ({error.why})" for error in passed_over),
            do="restore one from a copy, or start the run anew",
        )
    raise NoCheckpoint(f"there is no complete checkpoint in {store.where}", do="check checkpoint.to, or start anew")


def prune(store: Store, keep: int, written: CheckpointInfo | None = None) -> list[str]:
    """Delete all but the newest complete checkpoints, and leftovers of writes older than these; return the names.

    One that was just `written` is the newest that counts: if there are any beyond it, who restored could not read them.
    """
    good = [each for each in entries(store) if written is None or each.key <= written.key]
    if not good:
        return []
    kept = list(dict.fromkeys(each.name for each in good))[: max(1, keep)]
    older = sorted({key for key in map(_key, _listed(store)) if key < good[0].key})
    gone = [name for key in older if (name := _prefix(*key)) not in kept]
    try:
        for name in gone:
            # The manifest goes first: what is left, if we are interrupted, is a leftover and not a damaged checkpoint.
            for blob in store.list(f"{name}."):
                if blob.name.endswith(_MANIFEST):
                    store.delete(blob.name)
            store.delete(f"{name}.")
    except OSError as error:
        raise StoreUnusable(
            f"old checkpoints in {store.where} could not be deleted", why=str(error), do="delete them by hand"
        ) from error
    return gone


def _take_back(store: Store, name: str) -> None:
    """Delete data that will not count; a manifest that got there after all goes first."""
    with contextlib.suppress(OSError):
        store.delete(f"{name}{_MANIFEST}")
        store.delete(f"{name}.")


def _prefix(step: int, world: int) -> str:
    return f"step-{step:012d}.world-{world:08d}"


def _key(name: str) -> tuple[int, int]:
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _pieces(
    snapshot: CheckpointSource, reader: str, checksums: list[int], fence: Callable[[], bool]
) -> Iterator[bytes]:
    for index, size in enumerate(snapshot.sizes):
        for start in range(0, size, PIECE_BYTES):
            _check_fence(fence)
            data = snapshot.chunk(reader, index, start, min(start + PIECE_BYTES, size))
            checksums.append(zlib.crc32(data))
            yield data


def _check_fence(fence: Callable[[], bool]) -> None:
    if not fence():
        raise CheckpointFailed(
            "a checkpoint was given up half-way", why="this member may no longer write it: its world is over"
        )


def _check_space(store: Store, snapshot: CheckpointSource) -> None:
    free = store.free_bytes()
    needed = snapshot.total_bytes + len(snapshot.header) * 2 + _MARGIN_BYTES
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free")


def _failure(store: Store, snapshot: CheckpointSource, error: OSError) -> ShoalError:
    what = f"the checkpoint of step {snapshot.step} could not be written to {store.where}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
        return StoreUnusable(what, why=str(error), do="make it writable, or set checkpoint.to to another place")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointFailed(what, why=str(error), do="free some space, or set checkpoint.to or checkpoint.keep")
    return CheckpointFailed(what, why=str(error), do="it is tried again when the next one is due")


def _seal(manifest: CheckpointManifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_ChecksummedManifest(zlib.crc32(body), msgspec.Raw(body)))


def _listed(store: Store) -> dict[str, Blob]:
    """Return the blobs that belong to checkpoints, by name; other files in the same place are not ours."""
    try:
        return {blob.name: blob for blob in store.list("step-") if _NAME.match(blob.name)}
    except OSError as error:
        raise StoreUnusable(f"{store.where} cannot be read", why=str(error), do="check checkpoint.to") from error


def _entry(store: Store, blob: Blob, blobs: dict[str, Blob]) -> CheckpointInfo | CheckpointDamaged:
    """Return the checkpoint that a manifest describes, or what is wrong with it."""
    try:
        with store.open(blob.name) as file:
            sealed = msgspec.json.decode(file.read(), type=_ChecksummedManifest)
        if zlib.crc32(sealed.manifest) != sealed.crc32:
            raise ValueError("its checksum is wrong")
        manifest = msgspec.json.decode(sealed.manifest, type=CheckpointManifest)
    except (OSError, ValueError) as error:
        return CheckpointDamaged(f"{blob.name} cannot be read", why=str(error))
    data = blobs.get(manifest.data)
    if manifest.format != FORMAT:
        return CheckpointDamaged(f"{blob.name} cannot be read", why=f"it has format {manifest.format}, not {FORMAT}")
    if (manifest.step, manifest.world) != _key(blob.name):
        return CheckpointDamaged(f"{blob.name} cannot be read", why=f"it describes step {manifest.step}")
    if data is None or data.size_bytes != manifest.total_bytes or sum(manifest.sizes) != manifest.total_bytes:
        has = "missing" if data is None else f"{data.size_bytes} bytes long"
        return CheckpointDamaged(f"{manifest.data} is {has}", why=f"it should have {manifest.total_bytes} bytes")
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
    for start in range(0, size, PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        _fill(file, piece)
        if zlib.crc32(piece) != next(checksums, None):
            raise ValueError(f"the checksum of {len(piece)} bytes before byte {file.tell()} is wrong")
    return buffer


def _fill(file: BinaryIO, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        data = file.read(len(piece) - done)
        if not data:
            raise ValueError(f"it ends after {file.tell()} bytes")
        piece[done : done + len(data)] = data
        done += len(data)
