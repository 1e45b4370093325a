from __future__ import annotations

import signal

import pytest

from shoal.cli.signals import SignalCounter


def test_signals_are_counted_and_end_a_sleep() -> None:
    with SignalCounter() as signals:
        assert signals.count == 0
        signal.raise_signal(signal.SIGHUP)
        signals.sleep(60.0)
        assert (signals.count, signals.name) == (1, "SIGHUP")
    assert signal.getsignal(signal.SIGHUP) != signals._handle


def test_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalCounter() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.count == 0
            signal.raise_signal(signal.SIGTERM)
            assert signals.count == 1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_of_one_moment_are_one_request() -> None:
    now = 100.0
    with SignalCounter(lambda: now) as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        now += 0.9
        signal.raise_signal(signal.SIGHUP)
        assert signals.count == 1
        now += 0.2
        signal.raise_signal(signal.SIGTERM)
        assert signals.count == 2


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_last_signal_is_called_what_users_call_it(number: signal.Signals, name: str) -> None:
    with SignalCounter() as signals:
        assert signals.name == "Ctrl-C", "a stop that was requested otherwise"
        signal.raise_signal(number)
        assert signals.name == name


def test_earlier_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with SignalCounter():
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


def test_one_wake_up_is_consumed_by_one_sleep() -> None:
    with SignalCounter() as signals:
        signal.raise_signal(signal.SIGTERM)
        signals.sleep(60.0)
        signals.sleep(0.0)
        assert signals.count == 1
