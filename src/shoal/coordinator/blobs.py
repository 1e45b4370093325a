"""What runs take along, by the hash of what it is: sent once, and given to every agent that asks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from shoal.errors import BadRequest, JournalUnwritable, UnknownBlob

FOLDER = "blobs"
MAX_BLOB_BYTES = 4 << 30
_PIECE_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Blobs:
    """The blobs of one coordinator."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def missing(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in digests if not self._path(digest).exists()]

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

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise BadRequest("that is no SHA-256 hash", why=repr(digest[:80]))
        return self._directory / digest
