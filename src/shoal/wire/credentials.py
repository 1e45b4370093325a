"""Credentials file of a coordinator: its token, and the only certificate to trust.

The first line is the token. If the coordinator uses TLS, its self-signed certificate follows in PEM. Clients trust that
certificate and no other, whatever host name they connect to: the file itself proves who the coordinator is, so neither
a certificate authority nor DNS has to be trusted. Only the owner can read the file.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import BadCredentials

_MAX_BYTES = 64 << 10
_BEGIN = "-----BEGIN CERTIFICATE-----"
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token, which never appears in a repr, and a certificate in PEM, None without TLS."""

    token: str = field(repr=False)
    certificate_pem: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that authenticate a request."""
        return {"Authorization": f"Bearer {self.token}"}


def parse(text: str, where: str = "") -> Credentials:
    """Return the credentials in the text of such a file; raise BadCredentials if it is malformed."""
    token, _, rest = text.strip().partition("\n")
    token, rest = token.strip(), rest.strip()
    if not token or token.startswith("-----") or not token.isascii() or not token.isprintable() or " " in token:
        raise BadCredentials(
            "the first line of the token file is not a token", where=where, do="copy the coordinator's file again"
        )
    if rest and not (rest.startswith(_BEGIN) and rest.endswith(_END)):
        raise BadCredentials(
            "the text after the token is not a certificate", where=where, do="copy the coordinator's file again"
        )
    return Credentials(token, f"{rest}\n" if rest else None)


def read(path: str | Path, *urls: str) -> Credentials:
    """Return the credentials in a file, for requests to these URLs of a coordinator.

    Raises BadCredentials if the file is unreadable or malformed; and if it holds a certificate while a URL says http,
    since the token would travel in clear, to any machine that answers there.
    """
    access = _read(path)
    for url in urls:
        if access.certificate_pem is not None and url.partition("://")[0].lower() in ("http", "ws"):
            raise BadCredentials(
                f"{url} is not encrypted, but the coordinator of this token uses TLS",
                where=str(path),
                why="the token file holds a certificate, and the token would be sent in clear",
                do="write the URL with https://",
            )
    return access


def _read(path: str | Path) -> Credentials:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise BadCredentials(
            "the token file cannot be read",
            where=str(path),
            why=error.strerror or str(error),
            do="pass the coordinator's file with --token-file",
        ) from error
    if len(data) > _MAX_BYTES:
        raise BadCredentials(
            f"the token file is larger than {_MAX_BYTES} bytes",
            where=str(path),
            do="pass the coordinator's file with --token-file",
        )
    try:
        return parse(data.decode("ascii"), str(path))
    except UnicodeDecodeError as error:
        raise BadCredentials(
            "the token file is not text", where=str(path), do="pass the coordinator's file with --token-file"
        ) from error


def write(path: str | Path, credentials: Credentials) -> None:
    """Write the file atomically, readable by its owner only."""
    part = f"{path}.{os.getpid()}.part"
    text = f"{credentials.token}\n{credentials.certificate_pem or ''}"
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise BadCredentials(
            "the token file cannot be written", where=str(path), why=error.strerror or str(error)
        ) from error


def ssl_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Return a context that trusts this one certificate whatever name it carries, or None without a certificate."""
    if credentials.certificate_pem is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=credentials.certificate_pem)
    except ssl.SSLError as error:
        raise BadCredentials("the certificate in the token file is damaged", why=str(error)) from error
    return context
