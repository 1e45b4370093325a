"""The file that lets a process talk to a coordinator: its token, and the certificate to trust.

The first line is the token. When the coordinator speaks TLS, its certificate in PEM follows, and no other is trusted.
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
    token: str = field(repr=False)
    certificate_pem: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def parse(text: str, where: str = "") -> Credentials:
    """Read what such a file holds."""
    token, _, rest = text.strip().partition("\n")
    token, rest = token.strip(), rest.strip()
    if not token or token.startswith("-----") or not token.isascii() or not token.isprintable() or " " in token:
        raise BadCredentials("there is no token in the first line", where=where, do="copy the coordinator's file again")
    if rest and not (rest.startswith(_BEGIN) and rest.endswith(_END)):
        raise BadCredentials(
            "what follows the token is not a certificate", where=where, do="copy the coordinator's file again"
        )
    return Credentials(token, f"{rest}\n" if rest else None)


def read(path: str | Path) -> Credentials:
    """The credentials in a file."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise BadCredentials(
            "the token file cannot be read", where=str(path), why=error.strerror or str(error), do="give --token-file"
        ) from error
    if len(data) > _MAX_BYTES:
        raise BadCredentials("the token file is far too large to be one", where=str(path), do="give --token-file")
    try:
        return parse(data.decode("ascii"), str(path))
    except UnicodeDecodeError as error:
        raise BadCredentials("the token file is not text", where=str(path), do="give --token-file") from error


def write(path: str | Path, credentials: Credentials) -> None:
    """Write them so that only the owner can read them, and nobody ever sees half a file."""
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
    """Trusts this one certificate whatever name it carries; None if there is none to trust."""
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
        raise BadCredentials("the certificate after the token is damaged", why=str(error)) from error
    return context
