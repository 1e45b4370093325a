"""Check requests with odd values are refused before an agent sees them."""

from __future__ import annotations

import msgspec
import pytest

from shoal.wire.machine_check import MAX_LASTING_S, CheckRequest


@pytest.mark.parametrize("ports", ["\0", "x", "1-99999999999999999999", "9-1", "0-5", "70000-70001", "1-2-3", "²-³"])
def test_check_of_impossible_ports_is_refused(ports: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"ports": ports}), type=CheckRequest)


def test_check_without_end_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"lasting_s": 1e9}', type=CheckRequest)
    assert msgspec.json.decode(msgspec.json.encode({"lasting_s": MAX_LASTING_S}), type=CheckRequest).ports == ""


def test_check_of_a_range_of_ports_is_accepted() -> None:
    assert msgspec.json.decode(b'{"ports": "29400-29499"}', type=CheckRequest).ports == "29400-29499"
