"""Event files as bytes: records with their checksums, and in each record one event, a protobuf message.

Only what TensorBoard needs of `tensorflow.Event` is here. The numbers of the fields are those of its `event.proto`,
`summary.proto` and `tensor.proto`, which have not changed since 2016 and cannot: files of that time are still read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import cache

VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_STRING = 7
_TENSOR_CLASS = 2


def record(data: bytes) -> bytes:
    """One record of a TFRecord file: length, its checksum, data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def opening(at: float) -> bytes:
    """The event that every file begins with."""
    return _fixed64(1, at) + _bytes(3, VERSION)


def scalars(at: float, step: int, values: Mapping[str, float]) -> bytes:
    """The event of numbers at a step, by tag."""
    return _event(at, step, [_bytes(1, _text(tag)) + _fixed32(2, value) for tag, value in values.items()])


def texts(at: float, step: int, values: Mapping[str, str]) -> bytes:
    """The event of texts at a step, by tag; TensorBoard takes them for Markdown."""
    return _event(at, step, [_bytes(1, _text(tag)) + _text_value(value) for tag, value in values.items()])


def _text_value(value: str) -> bytes:
    plugin = _bytes(1, b"text")
    metadata = _bytes(1, plugin) + _varint(4, _TENSOR_CLASS)
    shape = _bytes(2, _varint(1, 1))
    tensor = _varint(1, _STRING) + _bytes(2, shape) + _bytes(8, _text(value))
    return _bytes(8, tensor) + _bytes(9, metadata)


def _event(at: float, step: int, values: list[bytes]) -> bytes:
    return _fixed64(1, at) + _varint(2, max(step, 0)) + _bytes(5, b"".join(_bytes(1, value) for value in values))


# --- the fields of protobuf


def _varint(field: int, value: int) -> bytes:
    return _plain(field << 3 | _VARINT) + _plain(value)


def _fixed64(field: int, value: float) -> bytes:
    return _plain(field << 3 | _FIXED64) + struct.pack("<d", value)


def _fixed32(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _plain(field << 3 | _FIXED32) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _plain(field << 3 | _BYTES) + _plain(len(value)) + value


def _plain(value: int) -> bytes:
    """A number that is not negative, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "replace")


# --- the checksum


def masked_crc32c(data: bytes) -> int:
    """The checksum of a record: rotated and shifted, so that the checksum of what contains checksums is a good one."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli, as iSCSI has it (RFC 3720)."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        found.append(crc)
    return tuple(found)
