"""What a run sends along, on this machine: fetched once from the coordinator, and laid out for each run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from shoal.errors import ProjectDeliveryFailed
from shoal.pack import project
from shoal.wire import credentials

TIMEOUT_S = 30.0
TRIES = 4
AT_ONCE = 4
UNUSED_S = 30 * 86400.0
_PIECE_BYTES = 1 << 20


class ProjectCache:
    """The projects under one agent. Blobs are kept in `cache`, which agents of one machine may share.

    What no run has needed for a month is removed from there.
    """

    def __init__(self, url: str, token_file: str, cache: Path, directory: Path) -> None:
        self.url, self._token_file, self._cache, self._directory = url, token_file, cache, directory
        self._lock = threading.Lock()

    def lay_out(self, name: str, run: str) -> Path:
        """The directory of a project for a run; it is there, whole, when this returns."""
        where = self._directory / run / "project"
        with self._lock:
            if not where.is_dir():
                found = project.decode(self._fetch(name).read_bytes(), where=name)
                with ThreadPoolExecutor(AT_ONCE) as threads:
                    list(threads.map(self._fetch, sorted({entry.digest for entry in found.files})))
                try:
                    where.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    project.lay_out(found, self._cache, where)
                    self._sweep()
                except OSError as error:
                    raise ProjectDeliveryFailed(
                        "the project could not be laid out here", where=str(where), why=str(error)
                    ) from error
        return where

    def _fetch(self, digest: str) -> Path:
        path = self._cache / digest
        for attempt in range(1, TRIES + 1):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return path
            try:
                self._get(digest, path)
            except OSError as error:
                if attempt == TRIES:
                    raise ProjectDeliveryFailed(
                        "what the run sends along could not be fetched", where=self.url, why=str(error)
                    ) from error
                time.sleep(0.2 * 2**attempt)
        return path

    def _sweep(self) -> None:
        """Forget what no run has needed for long, and what somebody who was killed has left half fetched."""
        for one in os.scandir(self._cache):
            # Somebody else's sweep, or somebody else's file: no reason for a run to fail.
            with contextlib.suppress(OSError):
                if time.time() - one.stat().st_mtime > UNUSED_S:
                    os.unlink(one.path)

    def _get(self, digest: str, path: Path) -> None:
        access = credentials.read(self._token_file)
        self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = path.with_name(f"{digest}.{os.getpid()}.{threading.get_ident()}.part")
        found = hashlib.sha256()
        # No proxy: it is the address that we talk to the coordinator at anyway.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=credentials.ssl_context(access)))
        request = Request(f"{self.url.rstrip('/')}/v1/blobs/{digest}", headers=access.headers)
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer, part.open("wb") as file:
                while piece := answer.read(_PIECE_BYTES):
                    found.update(piece)
                    file.write(piece)
            if found.hexdigest() != digest:
                raise OSError(f"{digest[:12]}… arrived damaged")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
