"""Blob store of the coordinator: files of projects and environments by their hash.

A client uploads each file once, whichever runs need it; agents download what they lack. Blobs that no active or
resumable run needs are removed a day after they were last uploaded or asked for. All blobs together have a quota, and
none may use the space that is reserved for the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from shoal.coordinator.storage import disk_reserve
from shoal.errors import BadRequest, CoordinatorFull, PackDamaged, UnknownBlob
from shoal.pack import project

FOLDER = "blobs"
# Not "environments": local pools use the same directory, and agents cache their built environments under that name.
ENVIRONMENT_BLOBS = "environment_blobs"
KEEP_S = 24 * 3600.0
MAX_BLOB_BYTES = 4 << 30
QUOTA_BYTES = 64 << 30
CHECK_DISK_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """The blobs in one folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._size_bytes: int | None = None

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the hashes that are not stored; keep the others for another day, as the caller relies on them."""
        return [digest for digest in digests if not _touch(self._path(digest))]

    def add(self, source: Path | bytes) -> str:
        """Store a local file, or bytes, and return its hash; raise OSError."""
        self._directory.mkdir(exist_ok=True, mode=0o700)
        part = self._directory / f"{secrets.token_hex(8)}.part"
        digest = hashlib.sha256()
        try:
            with (
                io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as reader,
                part.open("wb") as writer,
            ):
                while chunk := reader.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    writer.write(chunk)
            os.replace(part, self._path(digest.hexdigest()))
        finally:
            part.unlink(missing_ok=True)
        return digest.hexdigest()

    def path(self, digest: str) -> Path:
        """Return the path of a blob; raise UnknownBlob if it is not stored."""
        path = self._path(digest)
        if not path.exists():
            raise UnknownBlob(f"unknown blob {digest[:12]}…", do="start the run again to upload it")
        return path

    async def put(self, digest: str, chunks: AsyncIterator[bytes]) -> None:
        """Store a blob; raise BadRequest if it does not match its hash."""
        path = self._path(digest)
        part = path.with_name(f"{digest}.{secrets.token_hex(4)}.part")
        received, size_bytes = hashlib.sha256(), 0
        try:
            self._directory.mkdir(exist_ok=True, mode=0o700)
            with part.open("wb") as file:
                checked_bytes = 0
                async for chunk in chunks:
                    size_bytes += len(chunk)
                    if size_bytes > checked_bytes:
                        checked_bytes += CHECK_DISK_BYTES
                        self._require_space(size_bytes)
                    received.update(chunk)
                    file.write(chunk)
            if received.hexdigest() != digest:
                raise BadRequest("the blob does not match its hash", why="SHA-256 mismatch", do="upload it again")
            os.replace(part, path)
            self._size_bytes = self._stored_bytes() + size_bytes
        except OSError as error:
            raise CoordinatorFull("the coordinator cannot store the blob", why=str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def _require_space(self, size_bytes: int) -> None:
        """Raise if a blob that has grown to this size may grow no further."""
        if size_bytes > MAX_BLOB_BYTES:
            raise BadRequest("the blob is too large", why=f"the limit is {MAX_BLOB_BYTES} bytes")
        if self._stored_bytes() + size_bytes > QUOTA_BYTES:
            why = f"files of projects use {QUOTA_BYTES >> 30} GiB, which is all they may"
            do = "unneeded ones are removed after a day; until then run without sending the project (ship=never)"
            raise CoordinatorFull("no space for the project at the coordinator", why=why, do=do)
        disk_reserve.require(self._directory, CHECK_DISK_BYTES)

    def _stored_bytes(self) -> int:
        """Return the size of all blobs; they are counted once, and again after a sweep."""
        if self._size_bytes is None:
            self._size_bytes = sum(entry.stat().st_size for entry in os.scandir(self._directory))
        return self._size_bytes

    async def sweep(self, projects: Iterable[str]) -> int:
        """Remove old blobs that none of these projects needs; return how many."""
        removed = 0
        for path in await asyncio.to_thread(self._unneeded, frozenset(projects)):
            # On the event loop, like `missing`: no client can come to rely on a blob between the check and the removal.
            with contextlib.suppress(OSError):
                if _is_old(path):
                    path.unlink()
                    removed += 1
            await asyncio.sleep(0)
        self._size_bytes = None
        return removed

    def _unneeded(self, projects: Iterable[str]) -> list[Path]:
        needed = {digest for name in projects for digest in (name, *self._contents(name))}
        stored = self._directory.iterdir() if self._directory.is_dir() else ()
        return [path for path in stored if path.name not in needed and _is_old(path)]

    def _contents(self, name: str) -> list[str]:
        try:
            return [entry.digest for entry in project.decode(self._path(name).read_bytes()).files]
        except (OSError, BadRequest, PackDamaged):
            return []  # no agent could use it either

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise BadRequest("invalid SHA-256 hash", why=repr(digest[:80]))
        return self._directory / digest


def sweep_every(blobs: Blobs, projects: Callable[[], list[str]], every_s: float) -> Callable[[float], None]:
    """Return an action for every tick that sweeps the blobs every `every_s` seconds."""
    swept_at = 0.0
    sweeping: asyncio.Task[int] | None = None

    def on_tick(now: float) -> None:
        nonlocal swept_at, sweeping
        if now - swept_at > every_s and (sweeping is None or sweeping.done()):
            swept_at, sweeping = now, asyncio.get_running_loop().create_task(blobs.sweep(projects()))

    return on_tick


def _touch(path: Path) -> bool:
    """Return whether a file exists, and make it as young as if it had just been uploaded."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > KEEP_S
    except FileNotFoundError:
        return False
