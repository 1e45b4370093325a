"""The first thing that runs on a machine that may have no Shoal: it fetches Shoal, which then makes the environment.

It is written into the script that becomes an agent, and needs Python 3.7 and nothing else.
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
PIECE_BYTES = 1 << 20

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class DownloadFailed(Exception):  # noqa: N818 - what could not be had
    """The coordinator does not give what it was asked for."""


class BootstrapClient:
    """What has the coordinator's token, and trusts its certificate and no other; proxies are not for it.

    `url` may name several, with commas: the first that answers as the coordinator is taken.
    """

    lost = DownloadFailed

    def __init__(self, url: str, token_file: str) -> None:
        with open(token_file) as file:
            token, _, certificate = file.read().strip().partition("\n")
        self._headers = {"Authorization": f"Bearer {token.strip()}"}
        trust: Any = []
        context = None
        if certificate.strip():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= getattr(ssl, "VERIFY_X509_PARTIAL_CHAIN", 0x80000)
            context.load_verify_locations(cadata=certificate)
            trust = [urllib.request.HTTPSHandler(context=context)]
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *trust)
        urls = [one.rstrip("/") for one in url.split(",")]
        self._url = urls[0] if len(urls) == 1 else _first_of(urls, context)

    def get(self, digest: str, path: str) -> None:
        """Fetch what has this hash into a file, which is whole when it is there."""
        for attempt in range(1, TRIES + 1):
            try:
                self._get(digest, path)
            except urllib.error.HTTPError as error:
                raise DownloadFailed(f"it says {error.code} for {digest[:12]}") from error
            except DownloadFailed as error:
                if attempt == TRIES:
                    raise DownloadFailed(f"{self._url}: {error}") from error
                time.sleep(0.1 * 2**attempt)
            else:
                return

    def _get(self, digest: str, path: str) -> None:
        found = hashlib.sha256()
        part = f"{path}.{os.getpid()}.part"
        request = urllib.request.Request(f"{self._url}/v1/blobs/{digest}", headers=self._headers)
        try:
            with open(part, "wb") as file:
                for piece in self._pieces(request):
                    found.update(piece)
                    file.write(piece)
            if found.hexdigest() != digest:
                raise DownloadFailed(f"{digest[:12]} arrived damaged")
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)

    def _pieces(self, request: urllib.request.Request) -> Iterator[bytes]:
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                piece = answer.read(PIECE_BYTES)
                while piece:
                    yield piece
                    piece = answer.read(PIECE_BYTES)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
            raise DownloadFailed(f"it says {error.code}") from error
        except (OSError, http.client.HTTPException) as error:
            raise DownloadFailed(str(getattr(error, "reason", error))) from error

    def tell(self, path: str, body: bytes, within_s: float) -> None:
        """Send it something; OSError if it does not take it."""
        headers = {**self._headers, "Content-Type": "application/json"}
        with self._opener.open(urllib.request.Request(self._url + path, body, headers), timeout=within_s):
            return


def _first_of(urls: list[str], context: ssl.SSLContext | None) -> str:
    """The first of these that answers with the right certificate."""
    answers: queue.Queue[tuple[str, str]] = queue.Queue()
    for url in urls:
        threading.Thread(target=_greet, args=(url, context, answers), daemon=True).start()
    problems = []
    for _ in urls:
        url, problem = answers.get()
        if not problem:
            return url
        problems.append(f"{url}: {problem}")
    raise DownloadFailed("; ".join(problems))


def _greet(url: str, context: ssl.SSLContext | None, answers: queue.Queue[tuple[str, str]]) -> None:
    where = urllib.parse.urlsplit(url)
    try:
        with socket.create_connection((where.hostname or "", where.port or 0), TIMEOUT_S) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=where.hostname).close()
    except (OSError, ValueError) as error:
        answers.put((url, str(error) or type(error).__name__))
    else:
        answers.put((url, ""))


def main() -> None:
    root, url, token_file, shoal = sys.argv[1:5]
    wheel = os.path.join(root, f"shoal-{shoal[:20]}.whl")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        coordinator = BootstrapClient(url, token_file)
        if not _is_there(wheel, shoal):
            coordinator.get(shoal, wheel)
        os.utime(wheel)
    except (DownloadFailed, OSError) as error:
        sys.exit(f"error[S444] Shoal could not be fetched\n  why    {error}")
    sys.path.insert(0, wheel)
    from shoal.pack.remote import env_main

    sys.exit(env_main.main(coordinator, sys.argv[1:]))


def _is_there(path: str, digest: str) -> bool:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest() == digest
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
