"""Project files of runs on this machine: fetched from the coordinator once, and laid out for each run.

A project is a manifest that lists files by their SHA-256, and both manifest and files are blobs under their digest. So
a file that several runs share is fetched once, a download is checked by its name, and agents of one machine can use one
cache without a lock: each writes to a file of its own and renames it when it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from shoal.errors import ProjectDeliveryFailed
from shoal.pack import project
from shoal.wire import credentials

TIMEOUT_S = 30.0
ATTEMPTS = 4
PARALLEL = 4
UNUSED_S = 30 * 86400.0
_CHUNK_BYTES = 1 << 20


class ProjectCache:
    """Projects of one agent. Blobs are kept in `cache`, which agents of one machine may share.

    Blobs that no run has used for a month are removed.
    """

    def __init__(self, url: str, token_file: str, cache: Path, directory: Path) -> None:
        self.url, self._token_file, self._cache, self._directory = url, token_file, cache, directory
        self._lock = threading.Lock()

    def lay_out(self, name: str, run: str) -> Path:
        """Return the directory of a project for a run, complete with all files; raise `ProjectDeliveryFailed`."""
        directory = self._directory / run / "project"
        with self._lock:
            if not directory.is_dir():
                manifest = project.decode(self._fetch(name).read_bytes(), where=name)
                with ThreadPoolExecutor(PARALLEL) as threads:
                    list(threads.map(self._fetch, sorted({entry.digest for entry in manifest.files})))
                try:
                    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    project.write_files(manifest, self._cache, directory)
                    self._remove_unused()
                except OSError as error:
                    raise ProjectDeliveryFailed(
                        "cannot write the project on this machine", where=str(directory), why=str(error)
                    ) from error
        return directory

    def _fetch(self, digest: str) -> Path:
        if not project.DIGEST.fullmatch(digest):
            raise ProjectDeliveryFailed("invalid name of a project", why=repr(digest[:80]))
        path = self._cache / digest
        for attempt in range(1, ATTEMPTS + 1):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return path
            try:
                self._download(digest, path)
            except (OSError, HTTPException) as error:
                if attempt == ATTEMPTS:
                    raise ProjectDeliveryFailed("cannot fetch the project", where=self.url, why=str(error)) from error
                time.sleep(0.2 * 2**attempt)
        return path

    def _remove_unused(self) -> None:
        """Remove blobs that no run has used for long, and partial downloads of agents that were killed."""
        for entry in os.scandir(self._cache):
            # Another agent may remove the same file, or own it: no reason for a run to fail.
            with contextlib.suppress(OSError):
                if time.time() - entry.stat().st_mtime > UNUSED_S:
                    os.unlink(entry.path)

    def _download(self, digest: str, path: Path) -> None:
        access = credentials.read(self._token_file, self.url)
        self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f"{digest}.{os.getpid()}.{threading.get_ident()}.part")
        checksum = hashlib.sha256()
        # No proxy: the agent reaches the coordinator at this address without one.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=credentials.ssl_context(access)))
        request = Request(f"{self.url.rstrip('/')}/v1/blobs/{digest}", headers=access.headers)
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response, part.open("wb") as file:
                while chunk := response.read(_CHUNK_BYTES):
                    checksum.update(chunk)
                    file.write(chunk)
            if checksum.hexdigest() != digest:
                raise OSError(f"checksum mismatch in blob {digest[:12]}…")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
