"""Blobs at the coordinator, for members on machines that do not share a disk with it.

A blob is sent in pieces, and each is sent again until it is answered: so a coordinator that is started again in the
middle costs a moment, not the blob. Only one piece is in memory.
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

PIECE_BYTES = 4 << 20
TIMEOUT_S = 30.0
RETRY_S = 90.0
SAY_AFTER_S = 5.0
PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0)
_RETRIED = (500, 502, 503, 504)
_MEANING = {404: errno.ENOENT, 401: errno.EACCES, 403: errno.EACCES, 507: errno.ENOSPC}

Connect = Callable[[], http.client.HTTPConnection]


class CoordinatorStore:
    """Blobs in one folder of a run's directory at its coordinator; names may have folders of their own."""

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
        say: Callable[[str], object] = lambda text: sys.stderr.write(text),
    ) -> None:
        self._access, self._run, self._folder = access, run, folder
        self._connect = connect or (lambda: _connected(access))
        self._retry_s, self._clock, self._sleep, self._say = retry_s, clock, sleep, say
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
            self._give_up(name, upload)
            raise
        return size_bytes

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_ResumableBlob(lambda at, tag: self._begin(name, at, tag)), 1 << 20))

    def page(self, prefix: str = "") -> FilePage:
        """What is there, and how much room there is."""
        query = urlencode({"folder": self._folder, "prefix": prefix})
        data = self._ask("GET", f"{self._at}?{query}").read()
        try:
            return msgspec.json.decode(data, type=FilePage)
        except msgspec.DecodeError as error:
            raise OSError(errno.EIO, f"an answer of the coordinator cannot be read: {error}") from error

    def list(self, prefix: str = "") -> list[Blob]:
        return [Blob(one.name, one.size_bytes) for one in self.page(prefix).files]

    def delete(self, prefix: str) -> None:
        for blob in self.list(prefix):
            self._ask("DELETE", self._target(blob.name)).read()

    def free_bytes(self) -> int | None:
        return self.page().free_bytes

    @property
    def _at(self) -> str:
        return f"/v1/runs/{quote(self._run, safe='')}/files"

    def _target(self, name: str, query: Mapping[str, object] | None = None) -> str:
        return f"{self._at}/{self._folder}/{quote(name)}" + (f"?{urlencode(query)}" if query else "")

    def _send(self, name: str, piece: bytes, query: Mapping[str, object]) -> None:
        self._ask("PUT", self._target(name, query), piece).read()

    def _give_up(self, name: str, upload: str) -> None:
        """Let the coordinator forget what it has, if it answers; it does so by itself after a while."""
        try:
            self._once("DELETE", self._target(name, {"upload": upload}), None, {}).read()
        except (OSError, http.client.HTTPException, _NoConnection):
            self._close()

    def _begin(self, name: str, at: int, tag: str) -> http.client.HTTPResponse:
        """Read on from a byte, of what had this tag."""
        headers = {"Range": f"bytes={at}-", "If-Range": tag} if tag else {}
        answer = self._ask("GET", self._target(name), headers=headers)
        # It reads at its own pace, beside other requests.
        self._connection = None
        return answer

    def _ask(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """The answer to a request, which is made again for as long as nobody gives one."""
        since, said, tries = self._clock(), False, 0
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
            if waited > SAY_AFTER_S and not said:
                said = True
                until = f"for {self._retry_s - waited:.0f} s more"
                self._say(f"shoal: waiting for the coordinator at {self._access.url} {until} ({why})\n")
            self._sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
            tries += 1

    def _once(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._connect()
        token = credentials.read(self._access.token_file)
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
    """There is no way to the coordinator now: no route, no name, no certificate."""


class _ResumableBlob(io.RawIOBase):
    """A blob that is read from its start to its end, over as many connections as it takes."""

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
                    raise OSError(errno.ESTALE, "the blob was changed while it was read")
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
    """The same bytes in pieces of one size: a request for every small tensor would be many."""
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= PIECE_BYTES:
            yield bytes(held[:PIECE_BYTES])
            del held[:PIECE_BYTES]
    if held:
        yield bytes(held)


def _refusal(status: int, data: bytes) -> OSError:
    """What a refusal means for who reads and writes files; what the coordinator itself said is its cause."""
    said: ShoalError | None = None
    try:
        problem = msgspec.json.decode(data, type=ErrorView)
        text = f"{problem.what}: {problem.why}" if problem.why else problem.what
        said = from_code(**msgspec.structs.asdict(problem))
    except msgspec.DecodeError:
        text = f"the coordinator answered {status}: {data[:200].decode(errors='replace')}"
    refusal = OSError(_MEANING.get(status, errno.EIO), text)
    refusal.__cause__ = said
    return refusal
