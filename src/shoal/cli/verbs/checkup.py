"""`shoal doctor POOL`: machines of pools, examined by each other."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from shoal import exit_codes
from shoal.cli.options import OutputOptions
from shoal.cli.output import table
from shoal.cli.signals import CAUGHT
from shoal.cli.verbs import doctor
from shoal.core import addresses
from shoal.doctor.diagnosis import ConnectionReport, MachineReport, PoolReport
from shoal.doctor.pool_check import PoolCheck
from shoal.launch import launch_plan as render
from shoal.launch.coordinator_target import LOCAL, home
from shoal.launch.settings_layers import ResolvedSettings

UNWELL = 4
PACKAGES = ("torch", "tensorflow", "keras", "numpy")


def examine(frame: OutputOptions, choices: ResolvedSettings, machines: int | None, wait_s: float) -> int:
    """Hire, look, give back, show; the exit code."""
    names = render.checked_pools(choices) or (LOCAL,)
    count = machines if machines is not None else 2 if len(names) == 1 else 1
    checkup = PoolCheck(choices, names, count, render.new_directory(home()), wait_s, frame.say)
    try:
        with _interrupted_once():
            report = checkup.examine()
    except KeyboardInterrupt:
        _show_left(checkup)
        click.echo("interrupted: what was hired has been given back", err=True)
        return exit_codes.INTERRUPTED
    frame.answer(report, lambda: text(report))
    _show_left(checkup)
    return UNWELL if checkup.left or any(one.verdict == "bad" for one in report.verdicts) else 0


def text(report: PoolReport) -> str:
    """The report for people."""
    parts = []
    if report.machines:
        head = ("machine", "host", "python", "has", "cores", "devices", "disk free", "coordinator", "clock", "via")
        parts.append(table.columns(head, [_machine(one) for one in report.machines]))
    if report.pairs:
        ways = ("from", "to", "at", "latency", "bandwidth")
        parts.append(table.columns(ways, [_pair(one) for one in report.pairs]))
    troubles = [one for one in report.verdicts if one.verdict != "good"]
    parts.append(doctor.text(troubles) if troubles else "all machines reach each other, and nothing is wrong")
    return "\n\n".join(parts)


def _machine(one: MachineReport) -> tuple[str, ...]:
    facts = one.facts
    has = ", ".join(f"{name} {facts.versions[name]}" for name in PACKAGES if name in facts.versions)
    trip = _latency(statistics.median(facts.round_trips_s)) if facts.round_trips_s else "-"
    clock = f"{one.skew_s * 1000:+.0f} ms" if abs(one.skew_s) < 1 else f"{one.skew_s:+.1f} s"
    devices = ", ".join(facts.devices) or "-"
    free, via = table.size(facts.disk_free_bytes), one.via.partition("://")[2]
    return one.agent, facts.machine, facts.python, has or "-", str(facts.cores), devices, free, trip, clock, via


def _pair(one: ConnectionReport) -> tuple[str, ...]:
    taken = one.taken
    if taken is None:
        return one.here, one.there, "-", "-", "NOT REACHED"
    rate = f"{taken.bytes_per_s / 1e6:.0f} MB/s" if taken.bytes_per_s is not None else "-"
    latency = _latency(taken.round_trip_s) if taken.round_trip_s is not None else "-"
    return one.here, one.there, addresses.host_port(taken.host, taken.port), latency, rate


def _latency(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.001 else table.short(seconds)


def _show_left(checkup: PoolCheck) -> None:
    for one in checkup.left:
        click.echo(f"may be left: {one}; end it by the means of its engine", err=True)


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """The first signal ends what is going on, so that all is given back; that is not ended by any other."""
    told = False

    def caught(number: int, frame: FrameType | None) -> None:
        nonlocal told
        del number, frame
        if not told:
            told = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, caught) for number in CAUGHT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
