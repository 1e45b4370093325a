"""What members on machines without our disk write: whole files in the directories of their runs, or nothing.

A file comes in pieces, because a connection breaks, and a coordinator is started again, in the middle of a large one.
They gather beside the run's folders, and become a file of them when the last has come and the hash of all is right::

    runs/RUN/checkpoints/NAME    what members restore from
    runs/RUN/outputs/NAME        what they saved
    runs/RUN/uploads/ID.part     what is still on its way
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shoal.errors import BadRequest, CoordinatorFull, StorageError, UnknownFile, UploadCorrupt
from shoal.wire.api import FilePage, FileView

CHECKPOINTS, OUTPUTS, REPORTS = "checkpoints", "outputs", "tensorboard"
WRITABLE = (CHECKPOINTS, OUTPUTS)
READABLE = (*WRITABLE, REPORTS)
UPLOADS = "uploads"
MAX_FILE_BYTES = 256 << 30
MAX_PIECE_BYTES = 8 << 20
MAX_NAME_BYTES = 1024
MAX_PART_BYTES = 255
# The journal is on the same disk, and no run goes on without it.
RESERVED_BYTES = 128 << 20
STALE_S = 900.0
_PIECE_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{16,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """What a file has to be when all its pieces are there."""

    size_bytes: int
    digest: str


class RunFiles:
    """The files of all runs of one coordinator; `directory_of` is where a run has its own."""

    def __init__(self, directory_of: Callable[[str], str]) -> None:
        self._directory_of = directory_of

    def page(self, run: str, folder: str, prefix: str = "") -> FilePage:
        """What is in one folder of a run."""
        if folder not in READABLE:
            raise BadRequest(f"a run has no folder {folder!r}", do=f"there are: {', '.join(READABLE)}")
        directory = Path(self._directory_of(run))
        found = tuple(one for one in listed(directory / folder) if one.name.startswith(prefix))
        return FilePage(found, max(0, _free_bytes(directory) - RESERVED_BYTES))

    def path(self, run: str, name: str) -> Path:
        """Where a file is; UnknownFile if it is not."""
        path = self._path(run, name, READABLE)
        if path.is_symlink() or not path.is_file():
            raise UnknownFile(f"the run {run} has no file {name}", do=f"shoal fetch {run} brings what there is")
        return path

    def take(
        self, run: str, name: str, upload: str, offset: int, piece: bytes, whole: ExpectedFile | None = None
    ) -> None:
        """Keep a piece of a file; with the last one comes what the whole has to be. Said twice, it is the same."""
        path, part = self._path(run, name, WRITABLE), self._part(run, upload)
        if offset < 0 or offset + len(piece) > MAX_FILE_BYTES:
            raise BadRequest(f"{name} is too large", why=f"the limit is {MAX_FILE_BYTES} bytes")
        try:
            if whole is not None and not part.exists() and _is(path, whole):
                return  # an answer was lost, not the file
            if piece or not offset:
                _put(part, offset, piece, name)
            if whole is not None:
                _finish(part, path, whole, name)
        except OSError as error:
            raise _refusal(error, name, part) from error

    def delete(self, run: str, name: str) -> None:
        """Take a file away; one that is not there is as good as gone."""
        try:
            self._path(run, name, WRITABLE).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{name} could not be deleted", why=str(error)) from error

    def give_up(self, run: str, upload: str) -> None:
        """Forget the pieces of a file that will not come."""
        self._part(run, upload).unlink(missing_ok=True)

    def sweep(self, run: str, now: float, stale_s: float = STALE_S) -> int:
        """Forget what nobody has sent a piece of for so long: who sent it is gone. How many there were."""
        count = 0
        for part in (Path(self._directory_of(run)) / UPLOADS).glob("*.part"):
            with contextlib.suppress(OSError):
                if now - part.stat().st_mtime > stale_s:
                    part.unlink()
                    count += 1
        return count

    def _path(self, run: str, name: str, folders: tuple[str, ...]) -> Path:
        folder, parts = checked(name)
        if folder not in folders:
            raise BadRequest(f"a file of a run cannot be in {folder!r}", do=f"there are: {', '.join(folders)}")
        root = Path(self._directory_of(run)) / folder
        path = root.joinpath(*parts)
        # Nothing that we make is a link; one that somebody else made leads nowhere from here.
        if not path.parent.resolve().is_relative_to(root.resolve()):
            raise BadRequest(f"{name} is not below the run's directory")
        return path

    def _part(self, run: str, upload: str) -> Path:
        if not _ID.fullmatch(upload):
            raise BadRequest("that is no name of an upload", why=repr(upload[:80]))
        return Path(self._directory_of(run)) / UPLOADS / f"{upload}.part"


def checked(name: str) -> tuple[str, tuple[str, ...]]:
    """The folder of a file and the parts of its name below it; BadRequest if it could lead anywhere else."""
    parts = name.split("/")
    fine = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= MAX_PART_BYTES for part in parts)
    if not fine or len(parts) < 2 or "\0" in name or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise BadRequest("that is no name of a file of a run", why=repr(name[:120]))
    return parts[0], tuple(parts[1:])


def whole_of(size: str, digest: str) -> ExpectedFile:
    """What the last piece of a file says of all of it."""
    size_bytes = number_of(size)
    if size_bytes is None or not _DIGEST.fullmatch(digest):
        raise BadRequest("the end of a file needs its size and its SHA-256", why=repr((size[:20], digest[:80])))
    return ExpectedFile(size_bytes, digest)


def number_of(text: str) -> int | None:
    """A number of bytes as a request has it, None if it is none that could be."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def listed(root: Path) -> list[FileView]:
    """All files below a directory, by name; links are not followed."""
    found = []
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in names:
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                if not path.is_symlink():
                    status = path.stat()
                    below = PurePosixPath(path.relative_to(root)).as_posix()
                    found.append(FileView(below, status.st_size, status.st_mtime))
    return sorted(found, key=lambda one: one.name)


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _put(part: Path, offset: int, piece: bytes, name: str) -> None:
    part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if _free_bytes(part.parent) - len(piece) < RESERVED_BYTES:
        raise OSError(errno.ENOSPC, f"the last {RESERVED_BYTES >> 20} MiB are the journal's")
    has = part.stat().st_size if part.exists() else 0
    if offset > has:
        raise UploadCorrupt(f"{name} did not arrive whole", why=f"{has} bytes are here, and the next were {offset}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.seek(offset)
        file.write(piece)
        # Of a piece whose line broke a part may have come; what it was is written over, and nothing is after it.
        file.truncate(offset + len(piece))


def _finish(part: Path, path: Path, whole: ExpectedFile, name: str) -> None:
    try:
        if not _is(part, whole):
            raise UploadCorrupt(f"{name} did not arrive whole", why="what came is not what was sent")
        _sync(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _is(path: Path, whole: ExpectedFile) -> bool:
    return path.is_file() and path.stat().st_size == whole.size_bytes and digest_of(path) == whole.digest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _refusal(error: OSError, name: str, part: Path) -> StorageError:
    """What to answer; what does not fit must not go on taking room either."""
    if error.errno in _FULL:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return CoordinatorFull(f"the coordinator has no room for {name}", why=str(error), do="make room on its disk")
    return StorageError(f"the coordinator cannot keep {name}", why=str(error))


def sweep_every(files: RunFiles, runs: Callable[[], list[str]], every_s: float) -> Callable[[float], None]:
    """What to call at every tick, so that leftovers are swept now and then."""
    swept = 0.0

    def at_tick(now: float) -> None:
        nonlocal swept
        if now - swept > every_s:
            swept = now
            for run in runs():
                files.sweep(run, time.time())

    return at_tick
