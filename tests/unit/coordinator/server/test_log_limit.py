"""A message that a client provokes again and again is written a few times."""

from __future__ import annotations

import logging

from shoal.coordinator.server.log_limit import PER_WINDOW, WINDOW_S, LogLimit


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "", 0, text, arguments, None)


def test_repeated_message_is_left_out_and_counted() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)
    assert sum(limit.filter(record("bad request from %s", client)) for client in range(1000)) == PER_WINDOW
    assert limit.filter(record("something else"))
    now = WINDOW_S
    later = record("bad request from %s", 7)
    assert limit.filter(later)
    assert later.getMessage() == f"bad request from 7 ({1000 - PER_WINDOW} more like this were left out)"


def test_number_of_kinds_is_bounded() -> None:
    limit = LogLimit(lambda: 0.0)
    for number in range(5000):
        assert limit.filter(record(f"kind {number}"))
    assert len(limit._kinds) <= 1000
