"""`shoal doctor`: checks of this machine, or of the machines of pools."""

from __future__ import annotations

import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from shoal import exit_codes
from shoal.cli.options import OutputOptions, with_output_options
from shoal.cli.output import table
from shoal.cli.signals import CAUGHT
from shoal.core import addresses
from shoal.core.nouns import counted
from shoal.doctor.diagnosis import CheckVerdict, ConnectionReport, MachineReport, PoolReport
from shoal.launch import launch_plan, pool_selection, settings_layers
from shoal.launch.coordinator_target import LOCAL, home
from shoal.launch.settings_layers import ResolvedSettings

if TYPE_CHECKING:
    from shoal.doctor.pool_check import PoolCheck
    from shoal.store.journal_repair import SkippedLine

MARKS = {"good": "ok  ", "warning": "warn", "bad": "BAD "}
PACKAGES = ("torch", "tensorflow", "keras", "numpy")


@click.command()
@click.argument("pools", nargs=-1, metavar="[POOL]...")
@click.option("--on", metavar="POOLS", help="Pools to check, separated by commas, such as spot,lab.")
@click.option(
    "-n", "--machines", type=click.IntRange(min=1), help="Machines per pool.  [default: 1, or 2 of a single pool]"
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=1),
    help="Seconds to wait for the machines.  [default: 90, or 900 if they build an environment]",
)
@click.option("--end-leftovers", is_flag=True, help="Kill leftover processes of dead runs without asking.")
@click.option(
    "--repair",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Step past what is unreadable in the journal of this coordinator directory (S521), and list it.",
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Check with this setting.")
@with_output_options
def command(
    output: OutputOptions,
    pools: tuple[str, ...],
    on: str | None,
    machines: int | None,
    wait_s: float | None,
    end_leftovers: bool,
    repair: Path | None,
    assignments: tuple[str, ...],
) -> None:
    """Check this machine, or the machines of pools, for problems.

    With POOL, a few machines of each pool are allocated for a moment. Each describes itself and tries to reach every
    other machine, as members would; then all are released. The exit code is 4 if a problem was found.
    """
    if repair is not None:
        repair_journal(output, repair)
        return
    names = ",".join((*pools, *((on,) if on else ())))
    options = {"on": ("--on", names)} if names else {}
    settings = settings_layers.resolve(Path.cwd(), os.environ, assignments, options)
    code = check_pools(output, settings, machines, wait_s) if names else check_local(output, settings, end_leftovers)
    click.get_current_context().exit(code)


def check_local(output: OutputOptions, settings: ResolvedSettings, end_leftovers: bool) -> int:
    """Check this machine, show the verdicts, and offer to kill leftover processes; return the exit code."""
    from shoal.doctor import leftovers
    from shoal.doctor.local_check import check_machine

    verdicts = list(check_machine(home(), settings.text("ports")))
    processes = leftovers.find(home())
    if processes:
        listing = ", ".join(f"{process.pid} ({process.kind} of {process.coordinator})" for process in processes)
        do = f"shoal doctor --end-leftovers, or kill {' '.join(str(process.pid) for process in processes)}"
        verdicts.append(CheckVerdict("warning", "leftovers", f"processes of dead runs: {listing}", do))
    else:
        verdicts.append(CheckVerdict("good", "leftovers", "no processes of dead runs"))
    output.result(verdicts, lambda: verdict_lines(verdicts))
    may_ask = not (end_leftovers or output.json) and sys.stdin.isatty()
    if processes and (end_leftovers or (may_ask and click.confirm(f"kill {counted(len(processes), 'process')}?"))):
        for process in processes:
            leftovers.kill(process)
        output.note(f"killed {counted(len(processes), 'process')}")
    return exit_codes.UNAVAILABLE if any(verdict.verdict == "bad" for verdict in verdicts) else exit_codes.OK


def repair_journal(output: OutputOptions, directory: Path) -> None:
    """Step past what is unreadable in a coordinator's journal, and show what that was."""
    from shoal.coordinator.rebuild_views import repair

    skipped = repair(directory)
    output.result(skipped, lambda: "\n".join(map(_skipped_text, skipped)) or "the journal is readable: nothing to do")
    if skipped:
        output.note(f"skipped {len(skipped)}; the damaged file is kept in {directory}")


def _skipped_text(skipped: SkippedLine) -> str:
    where = f"line {skipped.line}" if skipped.line else skipped.text or "a missing line"
    number = f" (event {skipped.seq})" if skipped.seq else ""
    return f"skipped {where}{number}: {skipped.why}" + (f"\n  {skipped.text}" if skipped.line else "")


def check_pools(output: OutputOptions, settings: ResolvedSettings, machines: int | None, wait_s: float | None) -> int:
    """Allocate machines, check them, release them and show the report; return the exit code."""
    from shoal.doctor.pool_check import PoolCheck

    names = pool_selection.configured_pools(settings) or (LOCAL,)
    count = machines if machines is not None else 2 if len(names) == 1 else 1
    directory = launch_plan.new_coordinator_directory(home())
    check = PoolCheck(settings, names, count, directory, wait_s, output.note)
    try:
        with _one_interrupt():
            report = check.run()
    except KeyboardInterrupt:
        _show_unreleased(check)
        click.echo("interrupted; all other machines are released", err=True)
        return exit_codes.INTERRUPTED
    output.result(report, lambda: report_text(report))
    _show_unreleased(check)
    is_bad = check.unreleased or any(verdict.verdict == "bad" for verdict in report.verdicts)
    return exit_codes.UNAVAILABLE if is_bad else exit_codes.OK


def verdict_lines(verdicts: Sequence[CheckVerdict]) -> str:
    """Return verdicts as text, each with its remedy."""
    lines = []
    for verdict in verdicts:
        lines.append(f"{MARKS[verdict.verdict]}  {verdict.what:<14} {verdict.finding}")
        if verdict.do and verdict.verdict != "good":
            lines.append(f"{'':<21}do: {verdict.do}")
    return "\n".join(lines)


def report_text(report: PoolReport) -> str:
    """Return the report of a pool check as tables, followed by the problems."""
    parts = []
    if report.machines:
        head = ("machine", "host", "python", "has", "cores", "devices", "disk free", "coordinator", "clock", "via")
        parts.append(table.columns(head, [_machine_row(machine) for machine in report.machines]))
    if report.pairs:
        rows = [_connection_row(pair) for pair in report.pairs]
        parts.append(table.columns(("from", "to", "at", "latency", "bandwidth"), rows))
    problems = [verdict for verdict in report.verdicts if verdict.verdict != "good"]
    parts.append(verdict_lines(problems) if problems else "no problems: all machines reach each other")
    return "\n\n".join(parts)


def _machine_row(machine: MachineReport) -> tuple[str, ...]:
    facts = machine.facts
    has = ", ".join(f"{name} {facts.versions[name]}" for name in PACKAGES if name in facts.versions)
    trip = _latency(statistics.median(facts.round_trips_s)) if facts.round_trips_s else "-"
    clock = f"{machine.skew_s * 1000:+.0f} ms" if abs(machine.skew_s) < 1 else f"{machine.skew_s:+.1f} s"
    devices = ", ".join(facts.devices) or "-"
    free, via = table.size(facts.disk_free_bytes), machine.via.partition("://")[2]
    return machine.agent, facts.machine, facts.python, has or "-", str(facts.cores), devices, free, trip, clock, via


def _connection_row(pair: ConnectionReport) -> tuple[str, ...]:
    attempt = pair.successful
    if attempt is None:
        return pair.source, pair.target, "-", "-", "NOT REACHED"
    rate = f"{attempt.bytes_per_s / 1e6:.0f} MB/s" if attempt.bytes_per_s is not None else "-"
    latency = _latency(attempt.round_trip_s) if attempt.round_trip_s is not None else "-"
    return pair.source, pair.target, addresses.host_port(attempt.host, attempt.port), latency, rate


def _latency(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.001 else table.short(seconds)


def _show_unreleased(check: PoolCheck) -> None:
    for allocation in check.unreleased:
        click.echo(f"may still be running: {allocation}; cancel it with the tools of its engine", err=True)


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first signal only, so that later ones cannot interrupt the release of machines."""
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        del number, frame
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, handle) for number in CAUGHT}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
