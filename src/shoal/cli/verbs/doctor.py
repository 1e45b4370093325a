"""`shoal doctor`: looks for what could go wrong on this machine, or on those of pools."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import click

from shoal import exit_codes
from shoal.cli.options import OutputOptions, with_frame
from shoal.cli.output import table
from shoal.doctor.diagnosis import CheckVerdict as Finding
from shoal.launch import settings_layers
from shoal.launch.coordinator_target import home

FREE_BYTES = 2 << 30
MARKS = {"good": "ok  ", "warning": "warn", "bad": "BAD "}


@click.command()
@click.argument("pools", nargs=-1, metavar="[POOL]...")
@click.option("--on", metavar="POOLS", help="The pools, with commas, such as spot,lab.")
@click.option("-n", "--machines", type=click.IntRange(min=1), help="Machines of each.  [default: 1, or 2 of one pool]")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(min=1), default=90.0, show_default=True, help="Seconds for them."
)
@click.option("--end-leftovers", is_flag=True, help="End processes of dead runs without asking.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Look with this setting.")
@with_frame
def command(
    frame: OutputOptions,
    pools: tuple[str, ...],
    on: str | None,
    machines: int | None,
    wait_s: float,
    end_leftovers: bool,
    assignments: tuple[str, ...],
) -> None:
    """Look for what could go wrong, on this machine or on those of pools.

    Machines of the pools that are named are hired for a moment: each tries to reach every other one as members would,
    and says what it has. Then all are given back.
    """
    named = ",".join((*pools, *((on,) if on else ())))
    options = {"on": ("--on", named)} if named else {}
    choices = settings_layers.choose(Path.cwd(), os.environ, assignments, options)
    if named:
        from shoal.cli.verbs import checkup

        click.get_current_context().exit(checkup.examine(frame, choices, machines, wait_s))
    here(frame, choices, end_leftovers)


def here(frame: OutputOptions, choices: settings_layers.ResolvedSettings, end_leftovers: bool) -> None:
    """Look at this machine."""
    from shoal.doctor import leftovers

    findings = list(examine(home(), choices.text("ports")))
    old = leftovers.find(home())
    if old:
        found = ", ".join(f"{one.pid} ({one.what} of {one.coordinator})" for one in old)
        do = f"shoal doctor --end-leftovers, or kill {' '.join(str(one.pid) for one in old)}"
        findings.append(Finding("warning", "leftovers", f"processes of dead runs: {found}", do))
    else:
        findings.append(Finding("good", "leftovers", "no processes of dead runs"))
    frame.answer(findings, lambda: text(findings))
    asked = not (end_leftovers or frame.json) and sys.stdin.isatty()
    if old and (end_leftovers or (asked and click.confirm(f"end these {len(old)} processes?"))):
        for one in old:
            leftovers.end(one)
        frame.say(f"ended {len(old)} processes")
    if any(one.verdict == "bad" for one in findings):
        click.get_current_context().exit(exit_codes.UNAVAILABLE)


def examine(home: Path, ports: str) -> Iterator[Finding]:
    """Everything that can be looked at without starting anything."""
    looks: tuple[Callable[[], Finding], ...] = (
        _python,
        _torch,
        _loopback,
        lambda: _ports(ports),
        lambda: _writable(home),
        lambda: _disk(home),
        _clock,
        _names,
        _shared_memory,
    )
    for look in looks:
        yield look()


def text(findings: Sequence[Finding]) -> str:
    """The findings for people."""
    lines = []
    for one in findings:
        lines.append(f"{MARKS[one.verdict]}  {one.what:<14} {one.found}")
        if one.do and one.verdict != "good":
            lines.append(f"{'':<21}do: {one.do}")
    return "\n".join(lines)


def _python() -> Finding:
    return Finding("good", "python", f"{sys.version.split()[0]}, {sys.executable}")


def _torch() -> Finding:
    import importlib.metadata

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("warning", "torch", "not installed here", "pip install 'shoal-train[torch]'")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    limited = f", OMP_NUM_THREADS={threads}" if threads else ""
    cores = len(os.sched_getaffinity(0))
    return Finding("good", "torch", f"{version}, {cores} usable cores{limited}")


def _loopback() -> Finding:
    import socket

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0) as here:
                there, _ = server.accept()
                with there:
                    here.sendall(b"shoal")
                    there.settimeout(2.0)
                    arrived = there.recv(5)
    except OSError as error:
        return Finding("bad", "loopback", str(error), "see that the lo interface is up: ip link set lo up")
    if arrived != b"shoal":
        return Finding("bad", "loopback", "bytes did not arrive", "look for a firewall on lo")
    return Finding("good", "loopback", "sockets work")


def _ports(text: str) -> Finding:
    import socket

    from shoal.settings import port_range

    span = port_range(text)
    if span is None:
        return Finding("good", "ports", "any free port (set ports=29400-29499 for firewalls)")
    free = 0
    for port in span:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            free += 1
    verdict: Literal["good", "bad"] = "good" if free else "bad"
    return Finding(verdict, "ports", f"{free} of {len(span)} free in {text}", "choose another range")


def _writable(home: Path) -> Finding:
    import tempfile

    # Nothing is made here: the nearest directory that exists tells whether it could be.
    nearest = next(path for path in (home, *home.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return Finding("good", "SHOAL_HOME", f"{home} can be written")
    except OSError as error:
        return Finding("bad", "SHOAL_HOME", f"{home}: {error.strerror}", "set SHOAL_HOME to a directory of yours")


def _disk(home: Path) -> Finding:
    import shutil

    nearest = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    shown = f"{table.size(free)} free for {home}"
    if free < FREE_BYTES:
        return Finding("warning", "disk", shown, "make room: logs and checkpoints are written there")
    return Finding("good", "disk", shown)


def _clock() -> Finding:
    import time

    year = time.gmtime().tm_year
    if year < 2025:
        return Finding("bad", "clock", f"it is set to {year}", "set the clock: times in journals would lie")
    before = time.monotonic()
    if time.monotonic() < before:
        return Finding("bad", "clock", "the monotonic clock runs backwards", "look at the machine's clock source")
    return Finding("good", "clock", time.strftime("%F %T %Z"))


def _names() -> Finding:
    import socket

    name = socket.gethostname()
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return Finding(
            "warning", "name", f"{name} does not resolve", "add it to /etc/hosts if others join this machine"
        )
    shown = f"{name} is {', '.join(found)}"
    if all(address.startswith("127.") or address == "::1" for address in found):
        return Finding(
            "warning",
            "name",
            f"{shown}: loopback",
            "others are given addresses instead; mend /etc/hosts if scripts use the name",
        )
    return Finding("good", "name", shown)


def _shared_memory() -> Finding:
    import shutil

    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("warning", "/dev/shm", "there is none", "DataLoader workers need it; use workers=0")
    free = shutil.disk_usage(path).free
    if free < 64 << 20:
        return Finding("warning", "/dev/shm", f"{table.size(free)} free", "DataLoader workers need more; use workers=0")
    return Finding("good", "/dev/shm", f"{table.size(free)} free")
