"""Encoder and decoder of WebSocket messages: MessagePack, strict schema, bounded size, compressed if large."""

from __future__ import annotations

import zlib
from typing import Any, Generic, TypeVar

import msgspec

from shoal.errors import BadMessage
from shoal.wire import agent_messages, limits, member_messages
from shoal.wire.malformed import MALFORMED
from shoal.wire.protocol import Message

MAX_MESSAGE_BYTES = 1 << 20
# A world of a thousand members repeats nearly the same text a thousand times, and every member gets a copy.
COMPRESS_ABOVE_BYTES = 16 << 10
# MessagePack never uses this byte, so no uncompressed message begins with it.
COMPRESSED = b"\xc1"

M = TypeVar("M")


class MessageCodec(Generic[M]):
    """Codec of one connection's direction: encodes any message, decodes the members of one union."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message, fitted to the bounds of its fields."""
        data = self._encoder.encode(limits.fit(message))
        return COMPRESSED + zlib.compress(data, 1) if len(data) > COMPRESS_ABOVE_BYTES else data

    def decode(self, data: bytes | str) -> M:
        """Return the message in a frame; raise BadMessage if it is too large or does not match the schema."""
        if isinstance(data, str):
            raise BadMessage("received a text frame instead of a binary one", do="use Shoal's own client")
        if len(data) > MAX_MESSAGE_BYTES:
            raise _too_large(len(data))
        try:
            decoded: M = self._decoder.decode(_decompress(data) if data[:1] == COMPRESSED else data)
        except MALFORMED as error:
            raise BadMessage("received a message that does not match the protocol", why=str(error)) from error
        return decoded


def _decompress(data: bytes) -> bytes:
    """Return the decompressed message, but never expand more than the limit: the sender may be hostile."""
    decompressor = zlib.decompressobj()
    try:
        message = decompressor.decompress(data[len(COMPRESSED) :], MAX_MESSAGE_BYTES + 1)
    except zlib.error as error:
        raise BadMessage("received a message that cannot be decompressed", why=str(error)) from error
    if len(message) > MAX_MESSAGE_BYTES:
        raise _too_large(len(message))
    if not decompressor.eof:
        raise BadMessage("received a message that cannot be decompressed", why="its end is missing")
    return message


def _too_large(size_bytes: int) -> BadMessage:
    return BadMessage(f"received a message of {size_bytes} bytes", why=f"the limit is {MAX_MESSAGE_BYTES}")


from_member: MessageCodec[member_messages.FromMember] = MessageCodec(member_messages.FromMember)
to_member: MessageCodec[member_messages.ToMember] = MessageCodec(member_messages.ToMember)
from_agent: MessageCodec[agent_messages.FromAgent] = MessageCodec(agent_messages.FromAgent)
to_agent: MessageCodec[agent_messages.ToAgent] = MessageCodec(agent_messages.ToAgent)
