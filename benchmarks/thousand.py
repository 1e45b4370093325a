"""Cost of a coordinator with 1,000 agents and 1,000 members, in its own CPU time and memory.

python -m benchmarks.thousand [--quick] [--agents N] [--out FILE]     about four minutes; results/thousand.{json,md}

A real `shoal coordinator` serves agents and members that are tasks of two other processes (`crowd.py`), each with a
WebSocket of its own, as on 1,000 machines: with TLS, as it is used off loopback, and without. Nothing here depends on
how busy the machine is: the figures are the coordinator's own CPU time, its memory, and bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import machine
from shoal.core.membership import leases
from shoal.launch.api_client import ApiClient, open_client
from shoal.wire.api import RunSpec, ScaleRequest

RESULTS = Path(__file__).parent / "results"
READY_S = 60.0
CROWDS = 2
WITHIN_S = 300.0
# If heartbeats are sent too rarely, their cost says nothing.
KEPT, TRIES = 0.97, 3
# The default settings of members, which send a ping with every second heartbeat.
HEARTBEAT_S, LEASE_S = 0.5, 3.0
# Not a loopback address by its looks, so TLS is used; it is one all the same.
HOSTS = {"TLS": "127.1", "plain": "127.0.0.1"}
Found = dict[str, Any]


class Coordinator:
    """A `shoal coordinator` process and its resource use."""

    def __init__(self, directory: Path, host: str) -> None:
        self.directory = directory
        self._command = [sys.executable, "-m", "shoal.cli.main", "coordinator", "--host", host, "--dir", str(directory)]
        self.start()
        self.url, self.token_file = (directory / "url").read_text().strip(), str(directory / "token")

    def start(self) -> None:
        pid = self.directory / "pid"
        pid.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        ends = time.monotonic() + READY_S
        # A new coordinator writes its url after its pid.
        while not (pid.exists() and (self.directory / "url").exists()):
            if self._process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("the coordinator did not start")
            time.sleep(0.02)
        self._seen = psutil.Process(self._process.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        used = self._seen.cpu_times()
        return float(used.user + used.system)

    def rss_bytes(self) -> int:
        return int(self._seen.memory_info().rss)

    def peak_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def journal_bytes(self) -> int:
        return (self.directory / "journal.jsonl").stat().st_size

    def client(self) -> ApiClient:
        return open_client(self.url, self.token_file, WITHIN_S)

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Crowds:
    """The processes that hold the agents and members."""

    def __init__(self, coordinator: Coordinator) -> None:
        command = [sys.executable, "-m", "benchmarks.crowd", coordinator.url, coordinator.token_file]
        self._all = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(CROWDS)
        ]

    def each(self, *commands: Found) -> list[Found]:
        """Send one command to each process and return their replies."""
        for process, command in zip(self._all, commands, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._all]

    def all(self, **command: Any) -> list[Found]:
        return self.each(*[command] * len(self._all))

    def counted(self) -> dict[str, int]:
        """Return the messages sent and received so far, by kind."""
        return _summed(reply["counts"] for reply in self.all(do="count"))

    def bytes_told(self, *kinds: str) -> int:
        sizes = _summed(reply["sizes"] for reply in self.all(do="count"))
        return sum(sizes.get(kind, 0) for kind in kinds)

    def _answer(self, process: subprocess.Popen[str]) -> Found:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a process of agents and members ended")
        reply: Found = json.loads(line)
        return reply

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@contextlib.contextmanager
def stage(host: str) -> Iterator[tuple[Coordinator, Crowds]]:
    """Run a coordinator and the processes of its agents and members; end all of them afterwards."""
    with tempfile.TemporaryDirectory(prefix="shoal-thousand-") as folder:
        coordinator = Coordinator(Path(folder) / "coordinator", host)
        try:
            crowds = Crowds(coordinator)
            try:
                yield coordinator, crowds
            finally:
                crowds.end()
        finally:
            coordinator.end()


def measure(host: str, agents: int, joins: int, steady_s: float, watch_s: float) -> Iterator[tuple[str, Found]]:
    """Yield the figures of one coordinator, part by part, in order of time."""
    with stage(host) as (coordinator, crowds):
        yield "begin", {"rss_bytes": coordinator.rss_bytes()}
        yield "form", _form(coordinator, crowds, agents)
        yield "steady", _steady(coordinator, crowds, agents, steady_s)
        yield "ask", _ask(coordinator)
        yield "lose", _lose(coordinator, crowds, agents)
        yield "join", _join(coordinator, crowds, agents, joins)
        peak_bytes = coordinator.peak_bytes()
        yield "restart", _restart(coordinator, crowds, watch_s)
        yield (
            "end",
            {"peak_bytes": peak_bytes, "journal_bytes": coordinator.journal_bytes()},
        )


def _form(coordinator: Coordinator, crowds: Crowds, agents: int) -> Found:
    """Connect agents, submit a run, connect its members; the last of them completes the world."""
    names = [f"node-{number:04}" for number in range(agents)]
    parts = [names[part::CROWDS] for part in range(CROWDS)]
    began = coordinator.cpu_s()
    # The last member is held back, so that the cost of its arrival can be measured.
    crowds.each(*({"do": "agents", "names": part, "hold": int(not at)} for at, part in enumerate(parts)))
    linked = coordinator.cpu_s()
    spec = RunSpec("thousand", ("train.py",), "/", (agents, agents))
    coordinator.client().submit(spec)
    crowds.each(*(_hello(len(part) - int(not at), len(part)) for at, part in enumerate(parts)))
    time.sleep(1.0)
    last, rss = coordinator.cpu_s(), coordinator.rss_bytes()
    crowds.each({"do": "release"}, *[{"do": "count"}] * (CROWDS - 1))
    crowds.all(do="world", size=agents)
    told = coordinator.cpu_s()
    return {
        "agents_cpu_s": linked - began,
        "all_cpu_s": told - began,
        "last_cpu_s": told - last,
        "rss_bytes": rss,
        "journal_bytes": coordinator.journal_bytes(),
        "told_bytes": crowds.bytes_told("EnterWorldMsg"),
    }


def _steady(coordinator: Coordinator, crowds: Crowds, agents: int, seconds: float) -> Found:
    """Measure while only heartbeats are sent; repeat a few times if the machine is too busy to send them in time."""
    time.sleep(2.0)
    attempts = [_watched(coordinator, crowds, agents, seconds)]
    while attempts[-1]["kept"] < KEPT and len(attempts) < TRIES:
        attempts.append(_watched(coordinator, crowds, agents, seconds))
    return max(attempts, key=lambda attempt: float(attempt["kept"]))


def _watched(coordinator: Coordinator, crowds: Crowds, agents: int, seconds: float) -> Found:
    before, cpu_s, at = crowds.counted(), coordinator.cpu_s(), time.monotonic()
    time.sleep(seconds)
    cpu_s, took_s = coordinator.cpu_s() - cpu_s, time.monotonic() - at
    after = crowds.counted()
    sent = {kind: after[kind] - before[kind] for kind in ("HeartbeatMsg", "pings", "pongs")}
    changed = [
        kind
        for kind in ("DissolveWorldMsg", "EvictedMsg", "RejectedMsg", "hung up")
        if after.get(kind) != before.get(kind)
    ]
    if changed:
        raise RuntimeError(f"the world did not hold: {', '.join(changed)}")
    heartbeats = agents * took_s / leases.heartbeat_s(HEARTBEAT_S, agents, LEASE_S)
    expected = {"HeartbeatMsg": heartbeats, "pings": heartbeats / 2, "pongs": heartbeats / 2}
    return {
        "cores": cpu_s / took_s,
        "heartbeats_per_s": sent["HeartbeatMsg"] / took_s,
        "kept": min(sent[kind] / expected[kind] for kind in sent),
        "rss_bytes": coordinator.rss_bytes(),
    }


def _ask(coordinator: Coordinator) -> Found:
    """Measure the cost of queries: one run, all agents, and the commands that users type."""
    found: Found = {}
    client = coordinator.client()
    run = client.runs()[0].run
    for name, ask in (("run", lambda: client.run(run)), ("agents", client.agents)):
        before = coordinator.cpu_s()
        for _ in range(10):
            ask()
        found[f"{name}_cpu_s"] = (coordinator.cpu_s() - before) / 10
    where = ("--url", coordinator.url, "--token-file", coordinator.token_file)
    for verb in (("status", run), ("ps",)):
        times = []
        for _ in range(3):
            began = time.monotonic()
            command = [sys.executable, "-m", "shoal.cli.main", *verb, *where]
            environ = {**os.environ, "SHOAL_HOME": str(coordinator.directory.parent / "home")}
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ, timeout=WITHIN_S)
            times.append(time.monotonic() - began)
        found[f"{verb[0]}_s"] = median(times)
    return found


def _lose(coordinator: Coordinator, crowds: Crowds, agents: int) -> Found:
    """Kill one member: all others leave the world and form one without it; later another member replaces it."""
    journal, before, heard = (
        coordinator.journal_bytes(),
        coordinator.cpu_s(),
        crowds.bytes_told("EnterWorldMsg", "DissolveWorldMsg"),
    )
    counts = [one["counts"] for one in crowds.all(do="count")]
    members = [one["members"] - int(not at) for at, one in enumerate(crowds.all(do="count"))]
    crowds.each({"do": "crash", "member": "node-0000/0"}, *[{"do": "count"}] * (CROWDS - 1))
    crowds.each(*(_told("DissolveWorldMsg", one, many) for one, many in zip(counts, members, strict=True)))
    told = coordinator.cpu_s()
    crowds.each(*(_told("EnterWorldMsg", one, many) for one, many in zip(counts, members, strict=True)))
    formed = coordinator.cpu_s()
    sent, written = (
        crowds.bytes_told("EnterWorldMsg", "DissolveWorldMsg") - heard,
        coordinator.journal_bytes() - journal,
    )
    crowds.all(do="world", size=agents)
    return {
        "told_cpu_s": told - before,
        "formed_cpu_s": formed - before,
        "told_bytes": sent,
        "journal_bytes": written,
        "replaced_cpu_s": coordinator.cpu_s() - before,
    }


def _told(kind: str, counts: Found, more: int) -> Found:
    return {"do": "told", "kind": kind, "count": counts.get(kind, 0) + more}


def _join(coordinator: Coordinator, crowds: Crowds, agents: int, joins: int) -> Found:
    """Add machines one after another, each once the previous one is in the world."""
    run = coordinator.client().runs()[0].run
    coordinator.client().scale(run, ScaleRequest(agents, agents + joins))
    journal, before, heard = coordinator.journal_bytes(), coordinator.cpu_s(), crowds.bytes_told("PrepareWorldMsg")
    began = time.monotonic()
    for number in range(agents, agents + joins):
        newcomer = {"do": "agents", "names": [f"node-{number:04}"], "hold": 0}
        crowds.each(newcomer, *[{"do": "count"}] * (CROWDS - 1))
        crowds.all(do="world", size=number + 1)
    return {
        "joins": joins,
        "cpu_s": (coordinator.cpu_s() - before) / joins,
        "s": (time.monotonic() - began) / joins,
        "told_bytes": (crowds.bytes_told("PrepareWorldMsg") - heard) / joins,
        "journal_bytes": (coordinator.journal_bytes() - journal) / joins,
    }


def _restart(coordinator: Coordinator, crowds: Crowds, watch_s: float) -> Found:
    """Kill the coordinator and start it again: it reads its journal, and all reconnect without leaving their world."""
    before = crowds.all(do="count")
    world = coordinator.client().runs()[0].world
    coordinator.kill()
    time.sleep(1.0)
    coordinator.start()
    replayed, began = coordinator.cpu_s(), time.monotonic()
    crowds.each(*(_hello(one["counts"]["WelcomeMsg"] + one["members"], 2 * one["agents"]) for one in before))
    found = {"replayed_cpu_s": replayed, "back_cpu_s": coordinator.cpu_s() - replayed, "s": time.monotonic() - began}
    time.sleep(watch_s)
    now = coordinator.client().runs()[0].world
    return {**found, "peak_bytes": coordinator.peak_bytes(), "worlds": (now or 0) - (world or 0)}


def _hello(welcomed: int, linked: int) -> Found:
    return {"do": "hello", "count": welcomed, "agents": linked}


def _summed(counts: Iterator[dict[str, int]] | Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in counts:
        for kind, count in part.items():
            total[kind] = total.get(kind, 0) + count
    return total


# --- the page


def page(found: Found) -> str:
    """Return all figures with their goals and the machine that they were measured on."""
    on, sides = found["machine"], found["sides"]
    head = f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']} GiB; Python {on['python']}; load: {on['load_before']}"
    lines = [f"# A coordinator with {found['agents']:,} agents, {found['began']} UTC", "", f"{head}.", ""]
    lines += [f"| figure | {' | '.join(sides)} | goal | met |", "| --- " * (len(sides) + 3) + "|"]
    for figure, part, name, shown, goal in ROWS:
        values = [one[part][name] for one in sides.values()]
        met = "" if goal is None else "yes" if all(value <= goal for value in values) else "**no**"
        limit = "" if goal is None else f"≤ {shown(goal)}"
        lines.append(f"| {figure} | {' | '.join(shown(value) for value in values)} | {limit} | {met} |")
    return "\n".join(lines) + "\n"


def _s(value: float) -> str:
    return f"{value:.2f} s"


def _mb(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def _part(value: float) -> str:
    return f"{100 * value:.1f} %"


CPU = "of the coordinator's CPU time"
ROWS: tuple[tuple[str, str, str, Any, float | None], ...] = (
    (f"world formed, from the last hello until all know it, {CPU}", "form", "last_cpu_s", _s, 1.0),
    ("… from the first hello on, all connections included", "form", "all_cpu_s", _s, None),
    ("… of that, until all agents are there", "form", "agents_cpu_s", _s, None),
    ("… bytes told to all members", "form", "told_bytes", _mb, None),
    ("… journal by then", "form", "journal_bytes", _mb, None),
    ("heartbeats of all agents and members, of one core", "steady", "cores", _part, 0.2),
    ("… heartbeats of members per second", "steady", "heartbeats_per_s", lambda value: f"{value:,.0f}", None),
    ("… heartbeats sent when due, the smallest part of all kinds", "steady", "kept", _part, None),
    ("memory (RSS) without agents and members", "begin", "rss_bytes", _mb, None),
    ("memory (RSS) with all of them", "steady", "rss_bytes", _mb, 200e6),
    ("… at its highest, over everything but a restart", "end", "peak_bytes", _mb, 200e6),
    (f"a member lost: all told, {CPU}", "lose", "told_cpu_s", _s, None),
    ("… until all have answered, and are in the next world", "lose", "formed_cpu_s", _s, None),
    ("… bytes told to all members", "lose", "told_bytes", _mb, None),
    ("… written to the journal", "lose", "journal_bytes", _mb, None),
    (f"a machine joins: all have crossed over, {CPU}", "join", "cpu_s", _s, None),
    ("… on the wall, on this machine", "join", "s", _s, None),
    ("… bytes told to all members", "join", "told_bytes", _mb, None),
    ("… written to the journal", "join", "journal_bytes", _mb, None),
    (f"killed and started again: the journal is read, {CPU}, imports included", "restart", "replayed_cpu_s", _s, None),
    ("… until all have found it again, at once", "restart", "back_cpu_s", _s, None),
    ("… memory (RSS) at its highest, while all come at once", "restart", "peak_bytes", _mb, None),
    ("… worlds that this cost", "restart", "worlds", str, 0),
    (f"a run with all its members asked for, {CPU}", "ask", "run_cpu_s", lambda v: f"{1000 * v:.0f} ms", None),
    (f"all agents asked for, {CPU}", "ask", "agents_cpu_s", lambda v: f"{1000 * v:.0f} ms", None),
    ("`shoal status RUN`, on the wall", "ask", "status_s", _s, None),
    ("`shoal ps`, on the wall", "ask", "ps_s", _s, None),
    ("journal at the end", "end", "journal_bytes", _mb, None),
)


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: Found = {
        "machine": machine.describe(),
        "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "agents": options.agents,
        "sides": {},
    }
    watch_s = 3.0 if options.quick else 15.0
    for side in options.sides:
        parts: Found = found["sides"].setdefault(side, {})
        for part, figures in measure(HOSTS[side], options.agents, options.joins, options.steady_s, watch_s):
            parts[part] = figures
            told = ", ".join(f"{name} {value:,.4g}" for name, value in figures.items())
            print(f"{time.strftime('%H:%M:%S')} {side}: {part}: {told}", file=sys.stderr, flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(found))
    print(page(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.thousand", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 agents, a few joins, within half a minute")
    parser.add_argument("--agents", type=int)
    parser.add_argument("--joins", type=int)
    parser.add_argument("--steady-s", type=float)
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(HOSTS))
    parser.add_argument("--out", type=Path, help="where the JSON goes  [default: benchmarks/results/thousand.json]")
    options = parser.parse_args()
    options.agents = options.agents or (100 if options.quick else 1000)
    options.joins = options.joins if options.joins is not None else (5 if options.quick else 100)
    options.steady_s = options.steady_s or (3.0 if options.quick else 20.0)
    options.out = options.out or RESULTS / f"thousand{'-quick' if options.quick else ''}.json"
    return options


if __name__ == "__main__":
    main()
