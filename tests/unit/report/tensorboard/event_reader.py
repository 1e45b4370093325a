"""Reader of event files that shares no code with the writer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Event:
    at: float = 0.0
    step: int = 0
    version: str = ""
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert _masked(data[:8]) == struct.unpack_from("<I", data, 8)[0], "wrong checksum of a length"
        body = data[12 : 12 + length]
        assert _masked(body) == struct.unpack_from("<I", data, 12 + length)[0], "wrong checksum of a record"
        yield body
        data = data[16 + length :]


def read(data: bytes) -> list[Event]:
    return [_event(record) for record in records(data)]


def read_folder(folder: Path) -> list[Event]:
    return [event for path in sorted(folder.glob("events.out.tfevents.*")) for event in read(path.read_bytes())]


def series(events: list[Event], tag: str) -> dict[int, float]:
    return {event.step: event.scalars[tag] for event in events if tag in event.scalars}


def _event(data: bytes) -> Event:
    event = Event()
    for number, value in fields(data):
        if number == 1:
            (event.at,) = struct.unpack("<d", value)
        elif number == 2:
            event.step = value
        elif number == 3:
            event.version = value.decode()
        elif number == 5:
            for _, summary in fields(value):
                _put(event, dict(fields(summary)))
    return event


def _put(event: Event, value: dict[int, Any]) -> None:
    tag = value[1].decode()
    if 2 in value:
        (event.scalars[tag],) = struct.unpack("<f", value[2])
    else:
        tensor, metadata = dict(fields(value[8])), dict(fields(value[9]))
        assert dict(fields(metadata[1])) == {1: b"text"}
        event.texts[tag] = tensor[8].decode()


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value: Any
            value, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, position = _varint(data, position)
            value, position = data[position : position + size], position + size
        yield key >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _masked(data: bytes) -> int:
    """Return the masked CRC-32C of data, computed bit by bit from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
