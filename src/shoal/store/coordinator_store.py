"""Store of blobs at the coordinator, for members on machines that do not share its disk.

A blob is uploaded in pieces of 4 MiB. Each request is repeated until it is answered or `retry_s` has passed, so a
restart of the coordinator costs a pause and not the upload. The last piece carries the size and SHA-256 of the whole
blob; only then does the blob appear. Downloads continue at the byte where a connection broke, guarded by the ETag. At
most one piece is in memory.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import io
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import BinaryIO, cast
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from shoal.errors import ShoalError, from_code
from shoal.store.blob_store import SCHEME, Blob, CoordinatorAccess
from shoal.wire import credentials
from shoal.wire.api import ErrorView, FilePage
from shoal.wire.malformed import MALFORMED

PIECE_BYTES = 4 << 20
TIMEOUT_S = 30.0
RETRY_S = 90.0
WARN_AFTER_S = 5.0
PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0)
_RETRIED = (500, 502, 503, 504)
_MEANING = {404: errno.ENOENT, 401: errno.EACCES, 403: errno.EACCES, 507: errno.ENOSPC}

Connect = Callable[[], http.client.HTTPConnection]


class CoordinatorStore:
    """Blobs in one folder of a run's directory at its coordinator; names may contain subfolders."""

    def __init__(
        self,
        access: CoordinatorAccess,
        run: str,
        folder: str,
        *,
        connect: Connect | None = None,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        warn: Callable[[str], object] = lambda text: sys.stderr.write(text),
    ) -> None:
        self._access, self._run, self._folder = access, run, folder
        self._connect = connect or (lambda: _connected(access))
        self._retry_s, self._clock, self._sleep, self._warn = retry_s, clock, sleep, warn
        self._connection: http.client.HTTPConnection | None = None

    @property
    def where(self) -> str:
        return f"{SCHEME}{self._run}/{self._folder}"

    def put(self, name: str, chunks: Iterable[bytes]) -> int:
        upload, digest, sent, piece = secrets.token_hex(8), hashlib.sha256(), 0, b""
        try:
            for following in _pieces(chunks):
                if piece:
                    self._send(name, piece, {"upload": upload, "offset": sent})
                    sent += len(piece)
                piece = following
                digest.update(piece)
            size_bytes = sent + len(piece)
            end = {"size": size_bytes, "digest": digest.hexdigest()}
            self._send(name, piece, {"upload": upload, "offset": sent} | end)
        except BaseException:
            self._cancel_upload(name, upload)
            raise
        return size_bytes

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_ResumableBlob(lambda at, tag: self._begin(name, at, tag)), 1 << 20))

    def page(self, prefix: str = "") -> FilePage:
        """Return the files whose names start with the prefix, and the free space."""
        query = urlencode({"folder": self._folder, "prefix": prefix})
        data = self._request("GET", f"{self._at}?{query}").read()
        try:
            return msgspec.json.decode(data, type=FilePage)
        except MALFORMED as error:
            raise OSError(errno.EIO, f"malformed reply of the coordinator: {error}") from error

    def list(self, prefix: str = "") -> list[Blob]:
        return [Blob(file.name, file.size_bytes) for file in self.page(prefix).files]

    def delete(self, prefix: str) -> None:
        for blob in self.list(prefix):
            self._request("DELETE", self._target(blob.name)).read()

    def free_bytes(self) -> int | None:
        return self.page().free_bytes

    @property
    def _at(self) -> str:
        return f"/v1/runs/{quote(self._run, safe='')}/files"

    def _target(self, name: str, query: Mapping[str, object] | None = None) -> str:
        return f"{self._at}/{self._folder}/{quote(name)}" + (f"?{urlencode(query)}" if query else "")

    def _send(self, name: str, piece: bytes, query: Mapping[str, object]) -> None:
        self._request("PUT", self._target(name, query), piece).read()

    def _cancel_upload(self, name: str, upload: str) -> None:
        """Ask the coordinator once to discard a partial upload; otherwise it does so itself after a while."""
        try:
            self._once("DELETE", self._target(name, {"upload": upload}), None, {}).read()
        except (OSError, http.client.HTTPException, _NoConnection):
            self._close()

    def _begin(self, name: str, at: int, tag: str) -> http.client.HTTPResponse:
        """Open a blob at byte `at`; with a tag, only if the blob still has it."""
        headers = {"Range": f"bytes={at}-", "If-Range": tag} if tag else {}
        answer = self._request("GET", self._target(name), headers=headers)
        # The reader keeps this connection; other requests open a new one.
        self._connection = None
        return answer

    def _request(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Return the reply to a request, repeated until it is answered or `retry_s` has passed; raise OSError."""
        since, warned, tries = self._clock(), False, 0
        while True:
            try:
                answer = self._once(method, target, body, headers or {})
                if answer.status < 400:
                    return answer
                if answer.status not in _RETRIED:
                    raise _refusal(answer.status, answer.read())
                why = f"it answered {answer.status}: {answer.read(200)!r}"
            except (TimeoutError, ConnectionError, http.client.HTTPException, _NoConnection) as error:
                why = f"{type(error).__name__}: {error}"
            self._close()
            waited = self._clock() - since
            if waited > self._retry_s:
                raise OSError(
                    errno.EIO, f"the coordinator at {self._access.url} has not answered for {waited:.0f} s: {why}"
                )
            if waited > WARN_AFTER_S and not warned:
                warned = True
                until = f"for {self._retry_s - waited:.0f} s more"
                self._warn(f"shoal: waiting for the coordinator at {self._access.url} {until} ({why})\n")
            self._sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def _once(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._connect()
        token = credentials.read(self._access.token_file, self._access.url)
        try:
            self._connection.request(method, target, body=body, headers={**token.headers, **headers})
            return self._connection.getresponse()
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:
            raise _NoConnection(str(error)) from error

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _NoConnection(Exception):  # noqa: N818
    """The coordinator cannot be reached now: no route, unknown name, wrong certificate."""


class _ResumableBlob(io.RawIOBase):
    """A blob read from start to end, over as many connections as it takes."""

    def __init__(self, begin: Callable[[int, str], http.client.HTTPResponse]) -> None:
        super().__init__()
        self._begin, self._at = begin, 0
        self._answer: http.client.HTTPResponse | None = begin(0, "")
        self._tag = self._answer.headers.get("etag", "")
        self._size = int(self._answer.headers.get("content-length", "0"))

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._at < self._size:
            if self._answer is None:
                self._answer = self._begin(self._at, self._tag)
                if self._answer.status != 206:
                    raise OSError(errno.ESTALE, "the blob changed while it was being read")
            try:
                count = self._answer.readinto(buffer)
            except (OSError, http.client.HTTPException):
                count = 0
            if count:
                self._at += count
                return count
            self._answer = None
        return 0

    def close(self) -> None:
        if not self.closed and self._answer is not None:
            self._answer.close()
        super().close()


def _connected(access: CoordinatorAccess) -> http.client.HTTPConnection:
    parts = urlsplit(access.url)
    host, port = parts.hostname or "127.0.0.1", parts.port
    if parts.scheme == "https":
        context = credentials.ssl_context(credentials.read(access.token_file))
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of one size; one request per small tensor would be too many."""
    pending = bytearray()
    for chunk in chunks:
        pending += chunk
        while len(pending) >= PIECE_BYTES:
            yield bytes(pending[:PIECE_BYTES])
            del pending[:PIECE_BYTES]
    if pending:
        yield bytes(pending)


def _refusal(status: int, data: bytes) -> OSError:
    """Return an error response as an OSError; its cause is the coordinator's own error."""
    cause: ShoalError | None = None
    try:
        problem = msgspec.json.decode(data, type=ErrorView)
        text = f"{problem.what}: {problem.why}" if problem.why else problem.what
        cause = from_code(**msgspec.structs.asdict(problem))
    except MALFORMED:
        text = f"the coordinator answered {status}: {data[:200].decode(errors='replace')}"
    refusal = OSError(_MEANING.get(status, errno.EIO), text)
    refusal.__cause__ = cause
    return refusal
