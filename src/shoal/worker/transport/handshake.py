"""Mutual authentication of two members by the run's token, without sending it.

::

    connector → listener   length, hello (who, to whom, what for, a nonce)
    listener → connector   nonce, proof
    connector → listener   proof

Each proof is an HMAC over the hello, the listener's nonce and the side that proves, with a key derived from the token
and the run. The nonces of both sides make a recorded handshake worthless. Naming the side keeps a proof from being
reflected, and naming the listener keeps a hello from being relayed to another member.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

from shoal.wire.malformed import MALFORMED

MAGIC = b"shoal1"
PREFIX = struct.Struct("!6sH")
# Five names of the longest kind that the wire allows, in any script.
HELLO_LIMIT_BYTES = 6 << 10
NONCE_BYTES = 32
PROOF_BYTES = 32
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES

LISTENER = b"listener"
CONNECTOR = b"connector"

RING = "ring"
STATE = "state"
CALL = "call"
COPY = "copy"


class HandshakeFailed(Exception):  # noqa: N818 - the peer's fault, not ours
    """The peer is not the expected member, or does not speak this protocol."""


class PeerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """First message of a connection: its purpose, its sender and its addressee."""

    kind: str
    run: str
    world: int
    member: str
    incarnation: str
    to_member: str
    to_incarnation: str
    nonce: bytes


def make_key(token: bytes, run: str) -> bytes:
    """Return the key for the connections of one run."""
    return hmac.digest(token, b"shoal data plane 1\0" + run.encode(), hashlib.sha256)


def pack(hello: PeerHello) -> bytes:
    """Encode a hello with its length; raise HandshakeFailed if it is too long."""
    body = msgspec.msgpack.encode(hello)
    if len(body) > HELLO_LIMIT_BYTES:
        raise HandshakeFailed(
            f"hello of {len(body)} bytes exceeds {HELLO_LIMIT_BYTES}: shorten the names of the run and its members"
        )
    return PREFIX.pack(MAGIC, len(body)) + body


def hello_bytes(prefix: bytes) -> int:
    """Return the length of the hello that follows this prefix; raise HandshakeFailed if the prefix is invalid."""
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise HandshakeFailed("not a Shoal member, or another version of the protocol")
    if not 0 < length <= HELLO_LIMIT_BYTES:
        raise HandshakeFailed(f"announced a hello of {length} bytes")
    return int(length)


def unpack(body: bytes) -> PeerHello:
    """Decode a hello; what it claims is not proven yet."""
    try:
        hello = msgspec.msgpack.decode(body, type=PeerHello)
    except MALFORMED as error:
        raise HandshakeFailed(f"malformed hello: {error}") from error
    if hello.kind not in (RING, STATE, CALL, COPY) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeFailed("malformed hello")
    return hello


def prove(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """Return the proof of one side, LISTENER or CONNECTOR, over the packed hello and the listener's nonce."""
    return hmac.digest(key, b"\0".join((side, hashlib.sha256(hello).digest(), nonce)), hashlib.sha256)


def is_same_proof(proof: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(proof, expected)
