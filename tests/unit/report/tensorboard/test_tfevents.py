"""Encoding of event files."""

from __future__ import annotations

import math

import pytest
from tests.unit.report.tensorboard.event_reader import read

from shoal.report.tensorboard import tfevents


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_crc32c_equals_the_examples_of_rfc_3720(data: bytes, crc: int) -> None:
    assert tfevents.crc32c(data) == crc


def test_first_record_equals_that_of_tensorflow() -> None:
    assert tfevents.record(tfevents.opening(1.0)).hex() == (
        "1800000000000000"
        "a37f4b22"  # length and its checksum
        "09000000000000f03f"  # wall_time
        "1a0d" + b"brain.Event:2".hex() + "86bf577a"
    )


def test_scalar_event_equals_that_of_tensorboard() -> None:
    assert tfevents.scalars(1.5, 300, {"a/b": 0.5}).hex() == (
        "09000000000000f83f"  # wall_time
        "10ac02"  # step
        "2a0c" + "0a0a" + "0a03" + b"a/b".hex() + "150000003f"
    )


def test_encoded_events_are_read_back() -> None:
    data = tfevents.record(tfevents.opening(1.0))
    data += tfevents.record(tfevents.scalars(2.0, 2**40, {"loss": 0.25, "shares/m/0": 51.0, "ä": -1.0}))
    data += tfevents.record(tfevents.texts(3.0, 0, {"worlds": "world 1 → 3 members\n\nand more"}))
    first, second, third = read(data)
    assert first.version == "brain.Event:2"
    assert (second.at, second.step) == (2.0, 2**40)
    assert second.scalars == {"loss": 0.25, "shares/m/0": 51.0, "ä": -1.0}
    assert third.texts == {"worlds": "world 1 → 3 members\n\nand more"}


def test_nan_and_overflow_are_encoded() -> None:
    (event,) = read(tfevents.record(tfevents.scalars(0.0, 1, {"a": math.nan, "b": 1e300, "c": -1e300, "d": math.inf})))
    assert math.isnan(event.scalars["a"])
    assert (event.scalars["b"], event.scalars["c"], event.scalars["d"]) == (math.inf, -math.inf, math.inf)
