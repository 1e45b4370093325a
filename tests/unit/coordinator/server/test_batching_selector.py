"""The event loop polls later when it has many connections, and at once when it has few."""

from __future__ import annotations

import os
import selectors

import pytest

from shoal.coordinator.server import batching_selector
from shoal.coordinator.server.batching_selector import DELAY_S_PER_CONNECTION, BatchingSelector, new_loop


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(batching_selector.time, "sleep", slept.append)
    return slept


def test_few_connections_are_polled_at_once(slept: list[float]) -> None:
    read, write = os.pipe()
    with BatchingSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        os.write(write, b"x")
        assert [key.fd for key, _ in selector.select(10.0)] == [read]
    os.close(read), os.close(write)
    assert slept == []


def test_many_connections_are_polled_after_a_delay_within_the_timeout(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_selector, "MANY", 1)
    pipes = [os.pipe() for _ in range(2)]
    with BatchingSelector() as selector:
        for read, _ in pipes:
            selector.register(read, selectors.EVENT_READ)
        assert selector.select(0.001) == []
        assert selector.select(0.0) == []  # something is due: no delay
    for pipe in pipes:
        os.close(pipe[0]), os.close(pipe[1])
    assert slept == [2 * DELAY_S_PER_CONNECTION]


def test_loop_uses_it() -> None:
    loop = new_loop()
    assert isinstance(loop._selector, BatchingSelector)  # type: ignore[attr-defined]
    loop.close()
