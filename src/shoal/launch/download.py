"""Download of a run's files from its coordinator: only what is missing, each file completely or not at all.

A file is up to date if its size and modification time are those that the coordinator lists; contents are not compared.
A new version is written to a hidden `.part` file beside the target and renamed, so an interrupted download never leaves
half a file under the real name. The names come from another machine and are therefore checked before use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from shoal.coordinator.storage.run_files import OUTPUTS, list_files, split_name
from shoal.errors import BadRequest, FetchFailed, PermissionDenied, WrongToken
from shoal.launch.run_lookup import CoordinatorRef
from shoal.store.blob_store import CoordinatorAccess
from shoal.store.coordinator_store import CoordinatorStore
from shoal.wire.api import FileView

RETRY_S = 20.0
_CHUNK_BYTES = 1 << 20
# A modification time loses some digits on its way as a floating-point number.
_SAME_TIME_S = 0.001


class RunFolder(Protocol):
    """A readable folder of a run."""

    def files(self) -> Sequence[FileView]: ...
    def open(self, name: str) -> BinaryIO: ...


class DownloadResult(msgspec.Struct, frozen=True):
    """The names of the downloaded files, their total size, and the number of files that were up to date."""

    names: tuple[str, ...]
    size_bytes: int
    present: int


class LocalRunFolder:
    """A folder in the directory of a coordinator on this machine, live or ended."""

    def __init__(self, directory: Path, run: str, folder: str = OUTPUTS) -> None:
        self._root = directory / "runs" / run / folder

    def files(self) -> Sequence[FileView]:
        return list_files(self._root)

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")


class RemoteRunFolder:
    """A folder of a run, read through its coordinator's HTTP API."""

    def __init__(self, url: str, token_file: str, run: str, folder: str = OUTPUTS) -> None:
        self._store = CoordinatorStore(CoordinatorAccess(url, token_file), run, folder, retry_s=RETRY_S)

    def files(self) -> Sequence[FileView]:
        return self._store.page().files

    def open(self, name: str) -> BinaryIO:
        return self._store.open(name)


def run_folder(coordinator: CoordinatorRef, run: str, folder: str = OUTPUTS) -> RunFolder:
    """Return a folder of a run: from the coordinator if it is live, else from its directory."""
    if coordinator.client is None:
        assert coordinator.directory is not None
        return LocalRunFolder(coordinator.directory, run, folder)
    return RemoteRunFolder(coordinator.url, coordinator.token_file, run, folder)


def download(source: RunFolder, to: Path) -> DownloadResult:
    """Copy the files that are missing or differ in size or time; raise FetchFailed if one cannot be copied."""
    names, size_bytes, present = [], 0, 0
    try:
        for file in source.files():
            target = _target_path(to, file.name)
            if _is_current(target, file):
                present += 1
                continue
            _copy(source, file, target)
            names.append(file.name)
            size_bytes += file.size_bytes
    except OSError as error:
        if isinstance(error.__cause__, PermissionDenied | WrongToken):
            raise error.__cause__ from None
        raise FetchFailed(
            f"the run's files could not be downloaded to {to}",
            why=str(error),
            do="try again: files that arrived are not downloaded twice",
        ) from error
    return DownloadResult(tuple(names), size_bytes, present)


def _target_path(to: Path, name: str) -> Path:
    """Return where a file goes; raise FetchFailed for a name that would lead out of the directory."""
    try:
        _, parts = split_name(f"{OUTPUTS}/{name}")
    except BadRequest as error:
        raise FetchFailed(
            f"the coordinator lists a file {name!r}", why="that path leads out of the target directory"
        ) from error
    return to.joinpath(*parts)


def _is_current(target: Path, file: FileView) -> bool:
    try:
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return status.st_size == file.size_bytes and abs(status.st_mtime - file.modified) < _SAME_TIME_S


def _copy(source: RunFolder, file: FileView, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with source.open(file.name) as reader, part.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                writer.write(chunk)
        # The listed time, not the present one: if the file changed while we copied, the next download sees it.
        os.utime(part, (file.modified, file.modified))
        os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
