"""Bytes to messages and back, with a limit on size and a strict schema."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from shoal.errors import BadMessage
from shoal.wire import messages

MAX_MESSAGE_BYTES = 1 << 20

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes any message, decodes one union of them."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: messages.Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | str) -> M:
        if isinstance(data, str):
            raise BadMessage("a text frame where a binary one was expected", do="use Shoal's own client")
        if len(data) > MAX_MESSAGE_BYTES:
            raise BadMessage(f"a message of {len(data)} bytes", why=f"the limit is {MAX_MESSAGE_BYTES}")
        try:
            decoded: M = self._decoder.decode(data)
        except (ValueError, RecursionError) as error:  # msgspec lets UnicodeDecodeError through
            raise BadMessage("a message that does not fit the protocol", why=str(error)) from error
        return decoded


from_member: Codec[messages.FromMember] = Codec(messages.FromMember)
to_member: Codec[messages.ToMember] = Codec(messages.ToMember)
from_agent: Codec[messages.FromAgent] = Codec(messages.FromAgent)
to_agent: Codec[messages.ToAgent] = Codec(messages.ToAgent)
