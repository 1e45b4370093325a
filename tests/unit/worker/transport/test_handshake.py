from __future__ import annotations

import msgspec
import pytest

from shoal.worker.transport import handshake
from shoal.worker.transport.handshake import CONNECTOR, LISTENER, HandshakeFailed, PeerHello

HELLO = PeerHello(handshake.RING, "run", 3, "m1", "first", "m0", "first", b"n" * handshake.NONCE_BYTES)


def body(hello: PeerHello) -> bytes:
    return handshake.pack(hello)[handshake.PREFIX.size :]


def test_hello_arrives_as_it_was_packed() -> None:
    packed = handshake.pack(HELLO)
    assert handshake.hello_bytes(packed[: handshake.PREFIX.size]) == len(packed) - handshake.PREFIX.size
    assert handshake.unpack(body(HELLO)) == HELLO


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x98\xa4\xff\xff\xff\xff",  # a string that is not UTF-8
        b"\x98\xa4ring\xa3run" + b"\x91" * 1000,  # nested deeper than the stack
        b"\xdd\xff\xff\xff\xff",  # an array that says it has 4 billion entries
        b"\xc6\xff\xff\xff\xff",
        msgspec.msgpack.encode({"kind": "ring"}),
        msgspec.msgpack.encode(["admin", "run", 1, "m1", "first", "m0", "first", b"n" * 32]),
        msgspec.msgpack.encode(["ring", "run", 1, "m1", "first", "m0", "first", b"short"]),
        msgspec.msgpack.encode(["ring", "run", "1", "m1", "first", "m0", "first", b"n" * 32]),
    ],
)
def test_any_other_bytes_fail_the_handshake_and_nothing_else(data: bytes) -> None:
    with pytest.raises(HandshakeFailed):
        handshake.unpack(data)


@pytest.mark.parametrize("length", [0, handshake.HELLO_LIMIT_BYTES + 1])
def test_announced_length_is_bounded(length: int) -> None:
    with pytest.raises(HandshakeFailed, match="announced a hello"):
        handshake.hello_bytes(handshake.PREFIX.pack(handshake.MAGIC, length))


def test_other_protocol_is_named() -> None:
    with pytest.raises(HandshakeFailed, match="not a Shoal member"):
        handshake.hello_bytes(b"GET / HT")


def test_hello_with_too_long_names_is_not_sent() -> None:
    with pytest.raises(HandshakeFailed, match="shorten the names"):
        handshake.pack(msgspec.structs.replace(HELLO, member="m" * handshake.HELLO_LIMIT_BYTES))


def test_proof_depends_on_side_hello_nonce_token_and_run() -> None:
    key = handshake.make_key(b"token", "run")
    proofs = {
        handshake.prove(key, LISTENER, b"hello", b"nonce"),
        handshake.prove(key, CONNECTOR, b"hello", b"nonce"),
        handshake.prove(key, LISTENER, b"other", b"nonce"),
        handshake.prove(key, LISTENER, b"hello", b"other"),
        handshake.prove(handshake.make_key(b"other", "run"), LISTENER, b"hello", b"nonce"),
        handshake.prove(handshake.make_key(b"token", "other"), LISTENER, b"hello", b"nonce"),
    }
    assert len(proofs) == 6
    assert all(handshake.is_same_proof(proof, proof) for proof in proofs)
    assert not handshake.is_same_proof(*sorted(proofs)[:2])
