"""Files of runs, uploaded by members on machines that do not share the coordinator's disk.

A file arrives in chunks, because a connection may break, or the coordinator restart, in the middle of a large one.
Chunks are appended to a part file and may be sent twice. The last one brings size and hash of the whole; only if both
match does the part file become the file, atomically, so a reader sees whole files only::

    runs/RUN/checkpoints/NAME    checkpoints that members restore from
    runs/RUN/outputs/NAME        files that members saved
    runs/RUN/uploads/ID.part     uploads in progress

Part files without a chunk for 15 minutes are removed. The last 128 MiB of the disk are never given to uploads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shoal.coordinator.storage import disk_reserve
from shoal.errors import BadRequest, CoordinatorFull, StorageError, UnknownFile, UploadCorrupt
from shoal.wire.api import FilePage, FileView

CHECKPOINTS, OUTPUTS, REPORTS = "checkpoints", "outputs", "tensorboard"
WRITABLE = (CHECKPOINTS, OUTPUTS)
READABLE = (*WRITABLE, REPORTS)
UPLOADS = "uploads"
MAX_FILE_BYTES = 256 << 30
MAX_CHUNK_BYTES = 8 << 20
MAX_NAME_BYTES = 1024
MAX_NAME_PART_BYTES = 255
STALE_S = 900.0
_READ_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{16,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """Size and SHA-256 of a complete upload."""

    size_bytes: int
    digest: str


class RunFiles:
    """The files of all runs of one coordinator; `directory_of` returns the directory of a run."""

    def __init__(self, directory_of: Callable[[str], str]) -> None:
        self._directory_of = directory_of

    def page(self, run: str, folder: str, prefix: str = "") -> FilePage:
        """Return the files in one folder of a run whose names start with `prefix`."""
        if folder not in READABLE:
            raise BadRequest(f"unknown folder {folder!r} of a run", do=f"use {', '.join(READABLE)}")
        directory = Path(self._directory_of(run))
        files = tuple(file for file in list_files(directory / folder) if file.name.startswith(prefix))
        return FilePage(files, max(0, disk_reserve.free_bytes(directory) - disk_reserve.RESERVED_BYTES))

    def path(self, run: str, name: str) -> Path:
        """Return the path of a file; raise UnknownFile."""
        path = self._path(run, name, READABLE)
        if path.is_symlink() or not path.is_file():
            raise UnknownFile(f"run {run} has no file {name}", do=f"shoal fetch {run} downloads all its files")
        return path

    def put(
        self, run: str, name: str, upload: str, offset: int, chunk: bytes, expected: ExpectedFile | None = None
    ) -> None:
        """Store a chunk of a file; the last one, with `expected`, completes it. Sending a chunk twice is harmless."""
        path, part = self._path(run, name, WRITABLE), self._part(run, upload)
        if offset < 0 or offset + len(chunk) > MAX_FILE_BYTES:
            raise BadRequest(f"{name} is too large", why=f"the limit is {MAX_FILE_BYTES} bytes")
        try:
            if expected is not None and not part.exists() and _mismatch(path, expected) == "":
                return  # the file was complete, only our reply was lost
            if chunk or not offset:
                _append(part, offset, chunk, name)
            if expected is not None:
                _complete(part, path, expected, name)
        except OSError as error:
            raise _storage_error(error, name, part) from error

    def delete(self, run: str, name: str) -> None:
        """Delete a file, if it exists."""
        try:
            self._path(run, name, WRITABLE).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{name} could not be deleted", why=str(error)) from error

    def abort(self, run: str, upload: str) -> None:
        """Discard the chunks of an upload."""
        self._part(run, upload).unlink(missing_ok=True)

    def sweep(self, run: str, now: float, stale_s: float = STALE_S) -> int:
        """Discard uploads without a chunk for `stale_s` seconds; return how many."""
        count = 0
        for part in (Path(self._directory_of(run)) / UPLOADS).glob("*.part"):
            with contextlib.suppress(OSError):
                if now - part.stat().st_mtime > stale_s:
                    part.unlink()
                    count += 1
        return count

    def _path(self, run: str, name: str, folders: tuple[str, ...]) -> Path:
        folder, parts = split_name(name)
        if folder not in folders:
            raise BadRequest(f"invalid folder {folder!r} for a file of a run", do=f"use {', '.join(folders)}")
        root = Path(self._directory_of(run)) / folder
        path = root.joinpath(*parts)
        # Shoal creates no links; a link that another program made must not lead out of the run's directory.
        if not path.parent.resolve().is_relative_to(root.resolve()):
            raise BadRequest(f"{name} is not below the run's directory")
        return path

    def _part(self, run: str, upload: str) -> Path:
        if not _ID.fullmatch(upload):
            raise BadRequest("invalid upload id", why=repr(upload[:80]))
        return Path(self._directory_of(run)) / UPLOADS / f"{upload}.part"


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the folder of a file and the parts of its name below; raise BadRequest if it could lead elsewhere."""
    parts = name.split("/")
    valid = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= MAX_NAME_PART_BYTES for part in parts)
    if not valid or len(parts) < 2 or "\0" in name or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise BadRequest("invalid file name", why=repr(name[:120]))
    return parts[0], tuple(parts[1:])


def parse_expected(size: str, digest: str) -> ExpectedFile:
    """Return the size and hash that the last chunk brings; raise BadRequest."""
    size_bytes = parse_size(size)
    if size_bytes is None or not _DIGEST.fullmatch(digest):
        raise BadRequest("the last chunk needs the file's size and SHA-256", why=repr((size[:20], digest[:80])))
    return ExpectedFile(size_bytes, digest)


def parse_size(text: str) -> int | None:
    """Return a number of bytes, None if the text is not a sensible one."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def list_files(root: Path) -> list[FileView]:
    """Return all files below a directory, by name; links are left out."""
    files = []
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if not path.is_symlink():
                    status = path.stat()
                    relative = PurePosixPath(path.relative_to(root)).as_posix()
                    files.append(FileView(relative, status.st_size, status.st_mtime))
    return sorted(files, key=lambda file: file.name)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _append(part: Path, offset: int, chunk: bytes, name: str) -> None:
    part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk_reserve.require(part.parent, len(chunk))
    size = part.stat().st_size if part.exists() else 0
    if offset > size:
        why = f"the chunk starts at byte {offset}, but only {size} bytes have arrived"
        raise UploadCorrupt(f"upload of {name} is incomplete", why=why)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.seek(offset)
        file.write(chunk)
        # An earlier attempt at this chunk may have left more bytes.
        file.truncate(offset + len(chunk))


def _complete(part: Path, path: Path, expected: ExpectedFile, name: str) -> None:
    try:
        if why := _mismatch(part, expected):
            raise UploadCorrupt(f"upload of {name} is corrupt", why=why)
        _sync(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _mismatch(path: Path, expected: ExpectedFile) -> str:
    """Return how a file differs from what is expected, empty if it does not."""
    if not path.is_file():
        return "nothing has arrived"
    size_bytes = path.stat().st_size
    if size_bytes != expected.size_bytes:
        return f"expected {expected.size_bytes} bytes, got {size_bytes}"
    digest = digest_of(path)
    return "" if digest == expected.digest else f"expected SHA-256 {expected.digest:.12}, got {digest:.12}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(error: OSError, name: str, part: Path) -> StorageError:
    """Return the error to reply with; on a full disk, free the space of the upload."""
    if error.errno in _DISK_FULL:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return CoordinatorFull(f"no space for {name} at the coordinator", why=str(error), do="free space on its disk")
    return StorageError(f"the coordinator cannot store {name}", why=str(error))


def sweep_every(files: RunFiles, runs: Callable[[], list[str]], every_s: float) -> Callable[[float], None]:
    """Return an action for every tick that sweeps stale uploads every `every_s` seconds."""
    swept_at = 0.0

    def on_tick(now: float) -> None:
        nonlocal swept_at
        if now - swept_at > every_s:
            swept_at = now
            for run in runs():
                files.sweep(run, time.time())

    return on_tick
