"""Agents trust a coordinator by its pinned certificate alone."""

from __future__ import annotations

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.process.agent.agent_stage import until

pytestmark = pytest.mark.process


def certificate(directory, name):
    """Return a self-signed certificate for another host name, and the server's context for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somewhere.else")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = signed.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / name).write_bytes(pem + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / name)
    return pem.decode(), context


@pytest.fixture
def pem(coordinator, tmp_path):
    text, context = certificate(tmp_path, "server.pem")
    coordinator.close()
    coordinator.open(context)
    return text


def test_pinned_certificate_is_trusted_whatever_its_name(coordinator, pem, start_agent):
    start_agent(certificate=pem, scheme="https")
    until(lambda: coordinator.hellos, "a hello")


def test_another_certificate_is_not_trusted(coordinator, pem, start_agent, tmp_path):
    other, _ = certificate(tmp_path, "other.pem")
    agent = start_agent("--idle", "0.5", certificate=other, scheme="https")
    assert agent.process.wait(180) == 4
    assert "CERTIFICATE_VERIFY_FAILED" in agent.log.read_text()
    assert not coordinator.hellos
