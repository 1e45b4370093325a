"""Stores of named blobs: a local directory, or any file system that fsspec can open.

A store promises little, so that buckets qualify: a blob is written once from start to end, and a directory listing
shows it when it is complete. A local store also guarantees that an incomplete blob is never visible under its name (it
is written under another, synced and renamed). Remote stores have no rename, so a format that needs atomicity must write
the blob that makes the others count last, as `checkpoint` does.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from shoal.errors import ShoalError, StoreUnusable

PARTIAL = ".partial"
READ_BYTES = 1 << 20
SCHEME = "coordinator://"


@dataclass(frozen=True, slots=True)
class Blob:
    """One blob in a store; a name that ends in `.partial` is an unfinished write."""

    name: str
    size_bytes: int


class Store(Protocol):
    """A flat set of named blobs. Every method raises OSError if the storage fails."""

    @property
    def where(self) -> str:
        """The path or URL, for messages."""

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        """Write a blob, replacing one of the same name, and make it durable; return its size."""

    def open(self, name: str) -> BinaryIO:
        """Open a blob for reading."""

    def list(self, prefix: str = "") -> list[Blob]:
        """Return the blobs whose names start with the prefix, in the order of their names."""

    def delete(self, prefix: str) -> None:
        """Delete every blob whose name starts with the prefix."""

    def free_bytes(self) -> int | None:
        """Return how many bytes can still be written, or None if that is unknown."""


@dataclass(frozen=True, slots=True)
class CoordinatorAccess:
    """URL and token file of a coordinator."""

    url: str
    token_file: str


def open_store(where: str, access: CoordinatorAccess | None = None) -> Store:
    """Return the store at a path, an fsspec URL, or ``coordinator://RUN/FOLDER`` at the coordinator of `access`."""
    if where.startswith("file://"):
        return LocalStore(Path(where.removeprefix("file://")))
    if where.startswith(SCHEME):
        return _at_coordinator(where, access)
    if "://" in where:
        return RemoteStore(where)
    return LocalStore(Path(where))


class LocalStore:
    """Blobs as files of one directory, each written under a temporary name, synced and renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser()

    @property
    def where(self) -> str:
        return str(self._root)

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        self._root.mkdir(parents=True, exist_ok=True)
        partial = self._root / f"{name}.{secrets.token_hex(4)}{PARTIAL}"
        try:
            with partial.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                size_bytes = file.tell()
            partial.replace(self._root / name)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        self._sync()
        return size_bytes

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")

    def list(self, prefix: str = "") -> list[Blob]:
        try:
            with os.scandir(self._root) as files:
                entries = [file for file in files if file.name.startswith(prefix) and file.is_file()]
        except FileNotFoundError:
            return []
        blobs = []
        for file in entries:
            with contextlib.suppress(FileNotFoundError):  # another process may be pruning
                blobs.append(Blob(file.name, file.stat().st_size))
        return sorted(blobs, key=lambda blob: blob.name)

    def delete(self, prefix: str) -> None:
        for blob in self.list(prefix):
            (self._root / blob.name).unlink(missing_ok=True)
        if self._root.exists():
            self._sync()

    def free_bytes(self) -> int | None:
        place = self._root
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free

    def _sync(self) -> None:
        directory = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class RemoteStore:
    """Blobs behind an fsspec URL; there is no rename, so an interrupted write may leave a partial blob."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, self._root = _file_system(self._url)

    @property
    def where(self) -> str:
        return self._url

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        size_bytes = 0
        with _failures_as_os_errors():
            file = self._begin(name)
            try:
                for chunk in chunks:
                    size_bytes += file.write(chunk)
            except BaseException:
                self._abort(file, name)
                raise
            file.close()
        return size_bytes

    def open(self, name: str) -> BinaryIO:
        with _failures_as_os_errors():
            file = self._files.open(self._path(name), "rb")
        return cast(BinaryIO, io.BufferedReader(_OsErrorFile(file), READ_BYTES))

    def list(self, prefix: str = "") -> list[Blob]:
        with _failures_as_os_errors():
            self._files.invalidate_cache()
            try:
                listed = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            blobs = [
                Blob(entry["name"].rsplit("/", 1)[-1], entry["size"]) for entry in listed if entry["type"] == "file"
            ]
        return sorted((blob for blob in blobs if blob.name.startswith(prefix)), key=lambda blob: blob.name)

    def delete(self, prefix: str) -> None:
        for blob in self.list(prefix):
            with _failures_as_os_errors(), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._path(blob.name))

    def free_bytes(self) -> int | None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _begin(self, name: str) -> Any:
        """Open a blob for writing; create the directory only if the driver asks for it, since S3 would create a
        bucket."""
        try:
            return self._files.open(self._path(name), "wb")
        except FileNotFoundError:
            self._files.makedirs(self._root, exist_ok=True)
            return self._files.open(self._path(name), "wb")

    def _abort(self, file: Any, name: str) -> None:
        """Discard an unfinished upload; closing the file would complete it."""
        with contextlib.suppress(Exception):
            discard = getattr(file, "discard", None)
            if discard is not None:
                discard()
                file.closed = True
        with contextlib.suppress(Exception):
            file.close()
        with contextlib.suppress(Exception):
            self._files.rm_file(self._path(name))


class _OsErrorFile(io.RawIOBase):
    """File of an fsspec driver, whose read failures are OSErrors."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        with _failures_as_os_errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _at_coordinator(where: str, access: CoordinatorAccess | None) -> Store:
    run, _, folder = where.removeprefix(SCHEME).partition("/")
    if access is None or not run or not folder or "/" in folder:
        raise StoreUnusable(
            f"{where} cannot be used",
            why="it is a location at the coordinator of a run, and this process has none or the path is invalid",
            do=f"write checkpoint.to={SCHEME}",
        )
    from shoal.store.coordinator_store import CoordinatorStore

    return CoordinatorStore(access, run, folder)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
    except ModuleNotFoundError as error:
        raise StoreUnusable(
            f"{url} cannot be used: the package fsspec is not installed", do='pip install "shoal-train[remote]"'
        ) from error
    try:
        files, root = core.url_to_fs(url)
    except ImportError as error:
        raise StoreUnusable(
            f"{url} cannot be used: its package is not installed", why=str(error), do=f"pip install {_driver_of(url)}"
        ) from error
    except ValueError as error:
        raise StoreUnusable(
            f"unknown kind of location: {url}", why=str(error), do="use a path, or a URL such as s3://bucket/dir"
        ) from error
    return files, root.rstrip("/")


def _driver_of(url: str) -> str:
    scheme = url.split("://")[0]
    known = {
        "s3": "s3fs",
        "s3a": "s3fs",
        "gs": "gcsfs",
        "gcs": "gcsfs",
        "abfs": "adlfs",
        "az": "adlfs",
        "hdfs": "pyarrow",
    }
    return known.get(scheme, f"the fsspec driver of {scheme}")


@contextlib.contextmanager
def _failures_as_os_errors() -> Iterator[None]:
    """Turn whatever a driver's client library raises into OSError."""
    try:
        yield
    except (OSError, ShoalError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
