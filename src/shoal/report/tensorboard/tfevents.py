"""Encoding of event files: TFRecords with checksums, each of which holds one `tensorflow.Event` in protobuf.

Only the fields that TensorBoard needs are here; the folder's docstring shows the layout. The field numbers are those of
`event.proto`, `summary.proto` and `tensor.proto`. They have not changed since 2016 and cannot, because old files must
stay readable.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import cache

VERSION = b"brain.Event:2"
# Castagnoli's polynomial, with its bits reversed.
_POLYNOMIAL = 0x82F63B78
# Wire types of protobuf.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# DataType.DT_STRING and DataClass.DATA_CLASS_TENSOR of TensorFlow.
_DT_STRING = 7
_TENSOR_CLASS = 2


def record(data: bytes) -> bytes:
    """Return a record of a TFRecord file: length, checksum of the length, data, checksum of the data."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def opening(at: float) -> bytes:
    """Return the event with the format version, which must be the first of a file."""
    return _fixed64(1, at) + _bytes(3, VERSION)


def scalars(at: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return an event with scalars by tag."""
    return _event(at, step, [_bytes(1, _text(tag)) + _fixed32(2, value) for tag, value in values.items()])


def texts(at: float, step: int, values: Mapping[str, str]) -> bytes:
    """Return an event with texts by tag; TensorBoard renders them as Markdown."""
    return _event(at, step, [_bytes(1, _text(tag)) + _text_value(value) for tag, value in values.items()])


def _text_value(value: str) -> bytes:
    """Return the fields that make a value a text: a string tensor of shape [1], and the name of the text plugin."""
    plugin = _bytes(1, b"text")
    metadata = _bytes(1, plugin) + _varint(4, _TENSOR_CLASS)
    shape = _bytes(2, _varint(1, 1))
    tensor = _varint(1, _DT_STRING) + _bytes(2, shape) + _bytes(8, _text(value))
    return _bytes(8, tensor) + _bytes(9, metadata)


def _event(at: float, step: int, values: list[bytes]) -> bytes:
    return _fixed64(1, at) + _varint(2, max(step, 0)) + _bytes(5, b"".join(_bytes(1, value) for value in values))


# --- protobuf fields


def _varint(field: int, value: int) -> bytes:
    return _encode_varint(field << 3 | _VARINT) + _encode_varint(value)


def _fixed64(field: int, value: float) -> bytes:
    return _encode_varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def _fixed32(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # too large for a float of 32 bits
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _encode_varint(field << 3 | _FIXED32) + packed


def _bytes(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | _BYTES) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    """Return a non-negative number in base 128: seven bits a byte, lowest first, high bit set on all but the last."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "replace")


# --- checksums


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a record: a CRC of data that contains CRCs is weak, so TFRecord rotates it and adds."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of data, as iSCSI defines it (RFC 3720)."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)
