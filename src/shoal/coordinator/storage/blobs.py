"""What runs take along, by the hash of what it is: sent once, and given to every agent that asks."""

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

from shoal.errors import BadRequest, JournalUnwritable, PackDamaged, UnknownBlob
from shoal.pack import project

FOLDER = "blobs"
STOWED = "stowed"
KEEP_S = 24 * 3600.0
MAX_BLOB_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """The blobs of one coordinator."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those that are not here; whoever asks counts on the others, so that they stay for a while."""
        return [digest for digest in digests if not _touch(self._path(digest))]

    def add(self, source: Path | bytes) -> str:
        """Keep a file of this machine, or these bytes; the hash that finds it. Raises OSError."""
        self._directory.mkdir(exist_ok=True, mode=0o700)
        part = self._directory / f"{secrets.token_hex(8)}.part"
        found = hashlib.sha256()
        try:
            with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as given, part.open("wb") as to:
                while piece := given.read(_PIECE_BYTES):
                    found.update(piece)
                    to.write(piece)
            os.replace(part, self._path(found.hexdigest()))
        finally:
            part.unlink(missing_ok=True)
        return found.hexdigest()

    def path(self, digest: str) -> Path:
        """Where it is; UnknownBlob if it was never sent."""
        found = self._path(digest)
        if not found.exists():
            raise UnknownBlob(f"nobody has sent {digest[:12]}…", do="start the run again, so that it is sent")
        return found

    async def put(self, digest: str, pieces: AsyncIterator[bytes]) -> None:
        """Keep what has this hash, and nothing else."""
        path = self._path(digest)
        part = path.with_name(f"{digest}.{secrets.token_hex(4)}.part")
        found, count = hashlib.sha256(), 0
        try:
            self._directory.mkdir(exist_ok=True, mode=0o700)
            with part.open("wb") as file:
                async for piece in pieces:
                    count += len(piece)
                    if count > MAX_BLOB_BYTES:
                        raise BadRequest("this is too large to be sent along", why=f"more than {MAX_BLOB_BYTES} bytes")
                    found.update(piece)
                    file.write(piece)
            if found.hexdigest() != digest:
                raise BadRequest("what was sent is not what it was said to be", do="send it again")
            os.replace(part, path)
        except OSError as error:
            raise JournalUnwritable("the coordinator cannot keep what is sent along", why=str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    async def sweep(self, projects: Iterable[str]) -> int:
        """Remove what none of these projects needs, and nobody has sent or asked for lately; how many."""
        removed = 0
        for path in await asyncio.to_thread(self._unneeded, frozenset(projects)):
            # Here, where `missing` is answered: nobody can come to count on it between the look and the removal.
            with contextlib.suppress(OSError):
                if _is_old(path):
                    path.unlink()
                    removed += 1
            await asyncio.sleep(0)
        return removed

    def _unneeded(self, projects: Iterable[str]) -> list[Path]:
        needed = {digest for name in projects for digest in (name, *self._contents(name))}
        found = self._directory.iterdir() if self._directory.is_dir() else ()
        return [path for path in found if path.name not in needed and _is_old(path)]

    def _contents(self, name: str) -> list[str]:
        try:
            return [entry.digest for entry in project.decode(self._path(name).read_bytes()).files]
        except (OSError, BadRequest, PackDamaged):
            return []  # nobody can lay it out

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise BadRequest("that is no SHA-256 hash", why=repr(digest[:80]))
        return self._directory / digest


def sweep_every(blobs: Blobs, projects: Callable[[], list[str]], every_s: float) -> Callable[[float], None]:
    """What to call at every tick, so that what no run needs any more is swept now and then."""
    swept = 0.0
    sweeping: asyncio.Task[int] | None = None

    def at_tick(now: float) -> None:
        nonlocal swept, sweeping
        if now - swept > every_s and (sweeping is None or sweeping.done()):
            swept, sweeping = now, asyncio.get_running_loop().create_task(blobs.sweep(projects()))

    return at_tick


def _touch(path: Path) -> bool:
    """Whether it is there, and from now on as if it had just come."""
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
