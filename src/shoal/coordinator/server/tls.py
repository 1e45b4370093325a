"""TLS certificate of the coordinator, for when it listens for other machines.

It is self-signed. Clients need no certificate authority: they get the certificate with their token and trust only it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from asyncio import sslproto
from pathlib import Path

from shoal.errors import StorageError

CERTIFICATE, KEY = "certificate.pem", "key.pem"
YEARS = 10
BUFFER_BYTES = 8 << 10


def ensure(directory: Path, host: str) -> str:
    """Return the certificate of this directory in PEM, created on first use; members trust it across restarts."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    try:
        if not (certificate.exists() and key.exists()):
            certificate_pem, key_pem = _create(host)
            _write(key, key_pem)
            _write(certificate, certificate_pem)
        return certificate.read_text("ascii")
    except OSError as error:
        raise StorageError(
            "cannot write the coordinator's certificate", where=str(directory), why=error.strerror or str(error)
        ) from error


def use_small_buffers() -> None:
    """Give TLS connections small buffers: asyncio's default of 256 KiB adds up with a thousand members."""
    sslproto.SSLProtocol.max_size = BUFFER_BYTES


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    os.replace(part, path)


def _create(host: str) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key_pem
