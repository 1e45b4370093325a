"""How two members prove to each other that they know the run's token, without sending it.

::

    dialler → listener   length, Hello (who, to whom, what for, a nonce)
    listener → dialler   nonce, proof
    dialler → listener   proof

Each proof is an HMAC over the whole conversation so far and the prover's side, with a key made from the token and the
run. Nonces of both sides make a recorded conversation worthless; naming the listener keeps a hello from being passed
on to another member.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import msgspec

MAGIC = b"shoal1"
PREFIX = struct.Struct("!6sH")
HELLO_LIMIT_BYTES = 1024
NONCE_BYTES = 32
PROOF_BYTES = 32
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES

RING = "ring"
STATE = "state"
CALL = "call"
COPY = "copy"


class HandshakeFailed(Exception):  # noqa: N818 - the peer's fault, not ours
    """The peer is not who it should be, or does not speak our language."""


class PeerHello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a dialler wants, from whom."""

    kind: str
    run: str
    world: int
    member: str
    incarnation: str
    to_member: str
    to_incarnation: str
    nonce: bytes


def make_key(token: bytes, run: str) -> bytes:
    """The key of one run's data plane."""
    return hmac.digest(token, b"shoal data plane 1\0" + run.encode(), hashlib.sha256)


def pack(hello: PeerHello) -> bytes:
    """A hello as it travels, with its length."""
    body = msgspec.msgpack.encode(hello)
    if len(body) > HELLO_LIMIT_BYTES:
        raise HandshakeFailed(f"a hello of {len(body)} bytes is too long: member and run names must be shorter")
    return PREFIX.pack(MAGIC, len(body)) + body


def body_bytes(prefix: bytes) -> int:
    """How long the hello is that this prefix announces."""
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise HandshakeFailed("not a member of this protocol")
    if not 0 < length <= HELLO_LIMIT_BYTES:
        raise HandshakeFailed(f"announces a hello of {length} bytes")
    return int(length)


def unpack(body: bytes) -> PeerHello:
    """The hello in these bytes; its claims are not proven yet."""
    try:
        hello = msgspec.msgpack.decode(body, type=PeerHello)
    except msgspec.MsgspecError as error:
        raise HandshakeFailed(f"malformed hello: {error}") from error
    if hello.kind not in (RING, STATE, CALL, COPY) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeFailed("malformed hello")
    return hello


def prove(key: bytes, side: bytes, hello: bytes, nonce: bytes) -> bytes:
    """The proof of one side (b"listener" or b"dialler") over the packed hello and the listener's nonce."""
    return hmac.digest(key, b"\0".join((side, hashlib.sha256(hello).digest(), nonce)), hashlib.sha256)


def same(proof: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(proof, expected)
