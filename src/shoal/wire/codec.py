"""Bytes to messages and back, with a limit on size and a strict schema."""

from __future__ import annotations

import zlib
from typing import Any, Generic, TypeVar

import msgspec

from shoal.errors import BadMessage
from shoal.wire import agent_messages, member_messages
from shoal.wire.protocol import Message

MAX_MESSAGE_BYTES = 1 << 20
# A world of a thousand is nearly the same words a thousand times, and all of its members are told of it.
PACK_ABOVE_BYTES = 16 << 10
# No message of MessagePack begins like this.
PACKED = b"\xc1"

M = TypeVar("M")


class MessageCodec(Generic[M]):
    """Encodes any message, decodes one union of them."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message) -> bytes:
        data = self._encoder.encode(message)
        return PACKED + zlib.compress(data, 1) if len(data) > PACK_ABOVE_BYTES else data

    def decode(self, data: bytes | str) -> M:
        if isinstance(data, str):
            raise BadMessage("a text frame where a binary one was expected", do="use Shoal's own client")
        if len(data) > MAX_MESSAGE_BYTES:
            raise _too_large(len(data))
        try:
            decoded: M = self._decoder.decode(_unpacked(data) if data[:1] == PACKED else data)
        except (ValueError, RecursionError) as error:  # msgspec lets UnicodeDecodeError through
            raise BadMessage("a message that does not fit the protocol", why=str(error)) from error
        return decoded


def _unpacked(data: bytes) -> bytes:
    """What was packed; of a message that would grow beyond all limits, no more is unpacked than shows it."""
    opened = zlib.decompressobj()
    try:
        found = opened.decompress(data[len(PACKED) :], MAX_MESSAGE_BYTES + 1)
    except zlib.error as error:
        raise BadMessage("a message that cannot be unpacked", why=str(error)) from error
    if len(found) > MAX_MESSAGE_BYTES:
        raise _too_large(len(found))
    if not opened.eof:
        raise BadMessage("a message that cannot be unpacked", why="its end is missing")
    return found


def _too_large(size_bytes: int) -> BadMessage:
    return BadMessage(f"a message of {size_bytes} bytes", why=f"the limit is {MAX_MESSAGE_BYTES}")


from_member: MessageCodec[member_messages.FromMember] = MessageCodec(member_messages.FromMember)
to_member: MessageCodec[member_messages.ToMember] = MessageCodec(member_messages.ToMember)
from_agent: MessageCodec[agent_messages.FromAgent] = MessageCodec(agent_messages.FromAgent)
to_agent: MessageCodec[agent_messages.ToAgent] = MessageCodec(agent_messages.ToAgent)
