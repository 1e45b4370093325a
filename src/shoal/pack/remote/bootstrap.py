"""Bootstrap on a machine that may have no Shoal: download Shoal's wheel, then let it build the environment.

The source of this module is part of the agent's script. It needs Python 3.7 and the standard library.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

TRIES = 6
TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 20

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class DownloadFailed(Exception):  # noqa: N818 - named like the errors of Shoal
    """Failed download from the coordinator."""


class BootstrapClient:
    """HTTP client of the coordinator: sends its token, trusts only its certificate, and uses no proxy.

    `url` may hold several URLs, separated by commas; the first one that accepts a connection is used. The credentials
    file holds the token and, under TLS, the certificate after it.
    """

    # Code that was imported from the wheel cannot import this class from the running script.
    download_failed = DownloadFailed

    def __init__(self, url: str, token_file: str) -> None:
        with open(token_file) as file:
            token, _, certificate = file.read().strip().partition("\n")
        self._headers = {"Authorization": f"Bearer {token.strip()}"}
        handlers: Any = []
        context = None
        if certificate.strip():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)
            context.load_verify_locations(cadata=certificate)
            handlers = [urllib.request.HTTPSHandler(context=context)]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
        urls = [part.rstrip("/") for part in url.split(",")]
        if context is not None and any(not part.startswith("https://") for part in urls):
            raise DownloadFailed(f"{url} is not encrypted, but the token file holds a certificate")
        self._url = urls[0] if len(urls) == 1 else _first_reachable(urls, context)

    def get(self, digest: str, path: str) -> None:
        """Download the blob with this hash to `path`, which appears when complete; raise DownloadFailed or OSError."""
        for attempt in range(1, TRIES + 1):
            try:
                self._get(digest, path)
            except urllib.error.HTTPError as error:
                raise DownloadFailed(f"HTTP status {error.code} for blob {digest[:12]}") from error
            except DownloadFailed as error:
                if attempt == TRIES:
                    raise DownloadFailed(f"{self._url}: {error}") from error
                time.sleep(0.1 * 2**attempt)
            else:
                return

    def _get(self, digest: str, path: str) -> None:
        actual = hashlib.sha256()
        part = f"{path}.{os.getpid()}.part"
        request = urllib.request.Request(f"{self._url}/v1/blobs/{digest}", headers=self._headers)
        try:
            with open(part, "wb") as file:
                for chunk in self._chunks(request):
                    actual.update(chunk)
                    file.write(chunk)
            if actual.hexdigest() != digest:
                raise DownloadFailed(f"SHA-256 mismatch: expected {digest[:12]}, got {actual.hexdigest()[:12]}")
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)

    def _chunks(self, request: urllib.request.Request) -> Iterator[bytes]:
        """Yield the body of the reply; raise HTTPError for a status that a retry would not change."""
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as reply:
                chunk = reply.read(CHUNK_BYTES)
                while chunk:
                    yield chunk
                    chunk = reply.read(CHUNK_BYTES)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
            raise DownloadFailed(f"HTTP status {error.code}") from error
        except (OSError, http.client.HTTPException) as error:
            raise DownloadFailed(str(getattr(error, "reason", error))) from error

    def post(self, path: str, body: bytes, timeout_s: float) -> None:
        """Send a JSON body; raise OSError if the coordinator does not accept it."""
        headers = {**self._headers, "Content-Type": "application/json"}
        with self._opener.open(urllib.request.Request(self._url + path, body, headers), timeout=timeout_s):
            return


def _first_reachable(urls: list[str], context: ssl.SSLContext | None) -> str:
    """Return the first URL that accepts a connection, with the right certificate if TLS is used."""
    results: queue.Queue[tuple[str, str]] = queue.Queue()
    for url in urls:
        threading.Thread(target=_try_connect, args=(url, context, results), daemon=True).start()
    problems = {}
    for _ in urls:
        url, problem = results.get()
        if not problem:
            return url
        problems[url] = problem
    raise DownloadFailed("; ".join(f"{url}: {problems[url]}" for url in urls))


def _try_connect(url: str, context: ssl.SSLContext | None, results: queue.Queue[tuple[str, str]]) -> None:
    """Put the URL into `results`, with an empty string or the reason why it cannot be reached."""
    address = urllib.parse.urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 0), TIMEOUT_S) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=address.hostname).close()
    except (OSError, ValueError) as error:
        results.put((url, str(error) or type(error).__name__))
    else:
        results.put((url, ""))


def main() -> None:
    """Download Shoal's wheel unless it is cached, and run `env_main` from it; exit with its code."""
    root, url, token_file, shoal = sys.argv[1:5]
    wheel = os.path.join(root, f"shoal-{shoal[:20]}.whl")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        coordinator = BootstrapClient(url, token_file)
        if not _is_cached(wheel, shoal):
            coordinator.get(shoal, wheel)
        os.utime(wheel)
    except (DownloadFailed, OSError) as error:
        sys.exit(f"error[S444] Shoal could not be downloaded\n  why    {error}")
    sys.path.insert(0, wheel)
    from shoal.pack.remote import env_main

    sys.exit(env_main.main(coordinator, sys.argv[1:]))


def _is_cached(path: str, digest: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() == digest
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
