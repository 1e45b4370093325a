"""Brings what a run has at its coordinator to a directory here: only what is missing, each file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from shoal.coordinator.storage.run_files import OUTPUTS, checked, listed
from shoal.errors import BadRequest, FetchFailed, PermissionDenied, WrongToken
from shoal.launch.run_lookup import CoordinatorRef
from shoal.store.blob_store import CoordinatorAccess
from shoal.store.coordinator_store import CoordinatorStore
from shoal.wire.api import FileView

PATIENCE_S = 20.0
_PIECE_BYTES = 1 << 20
# Seconds as numbers lose a little of what file systems keep.
_SAME_TIME_S = 0.001


class RunFolder(Protocol):
    """Where a folder of a run is read."""

    def files(self) -> Sequence[FileView]: ...
    def open(self, name: str) -> BinaryIO: ...


class DownloadResult(msgspec.Struct, frozen=True):
    """What was brought, by name, and how many files were there already."""

    names: tuple[str, ...]
    size_bytes: int
    present: int


class LocalRunFolder:
    """A folder in the directory of a coordinator on this machine, whether or not it still lives."""

    def __init__(self, directory: Path, run: str, folder: str = OUTPUTS) -> None:
        self._root = directory / "runs" / run / folder

    def files(self) -> Sequence[FileView]:
        return listed(self._root)

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")


class RemoteRunFolder:
    """A folder of a run, as its coordinator gives it to whoever has a token."""

    def __init__(self, url: str, token_file: str, run: str, folder: str = OUTPUTS) -> None:
        self._store = CoordinatorStore(CoordinatorAccess(url, token_file), run, folder, patience_s=PATIENCE_S)

    def files(self) -> Sequence[FileView]:
        return self._store.page().files

    def open(self, name: str) -> BinaryIO:
        return self._store.open(name)


def source_of(coordinator: CoordinatorRef, run: str, folder: str = OUTPUTS) -> RunFolder:
    """Where a folder of a run can be read: at its coordinator, or in what that left."""
    if coordinator.client is None:
        assert coordinator.directory is not None
        return LocalRunFolder(coordinator.directory, run, folder)
    return RemoteRunFolder(coordinator.url, coordinator.token_file, run, folder)


def bring(source: RunFolder, to: Path) -> DownloadResult:
    """Copy what is missing or differs in size or time; FetchFailed if that cannot be read or written."""
    names, size_bytes, present = [], 0, 0
    try:
        for file in source.files():
            target = _below(to, file.name)
            if _is_there(target, file):
                present += 1
                continue
            _copy(source, file, target)
            names.append(file.name)
            size_bytes += file.size_bytes
    except OSError as error:
        if isinstance(error.__cause__, PermissionDenied | WrongToken):
            raise error.__cause__ from None
        raise FetchFailed(
            f"what the run has saved could not all be brought to {to}",
            why=str(error),
            do="ask again: what is there already is not brought twice",
        ) from error
    return DownloadResult(tuple(names), size_bytes, present)


def _below(to: Path, name: str) -> Path:
    """Where a file of that name goes; whatever a coordinator says, it is below the directory."""
    try:
        _, parts = checked(f"{OUTPUTS}/{name}")
    except BadRequest as error:
        raise FetchFailed(
            f"the coordinator has a file called {name!r}", why="it would not be below the directory"
        ) from (error)
    return to.joinpath(*parts)


def _is_there(target: Path, file: FileView) -> bool:
    try:
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return status.st_size == file.size_bytes and abs(status.st_mtime - file.modified) < _SAME_TIME_S


def _copy(source: RunFolder, file: FileView, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with source.open(file.name) as there, part.open("wb") as here:
            while piece := there.read(_PIECE_BYTES):
                here.write(piece)
        # The time that it had when we began: if it has changed since, it is brought again the next time.
        os.utime(part, (file.modified, file.modified))
        os.replace(part, target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
