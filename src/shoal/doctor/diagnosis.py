"""Diagnosis of a pool check: pure functions from what machines report to verdicts with remedies.

Checked are, in this order: machines that did not join; each machine's ports, disk, clock and frameworks; versions that
differ between machines; and every ordered pair of machines. A pair is good if members would find a way, that is, if
one address of the target answers on each port that was tried; an address that leads elsewhere does not matter then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from shoal.core import addresses
from shoal.wire.connect_errors import Cause
from shoal.wire.machine_check import ConnectAttempt, MachineFacts

LITTLE_DISK_BYTES, NO_DISK_BYTES = 2 << 30, 100 << 20
SKEW_S = 1.0
SLOW_BYTES_PER_S = 12.5e6
FRAMEWORKS = ("torch", "tensorflow")


class CheckVerdict(msgspec.Struct, frozen=True):
    """The result of one check: its subject, the finding, and a remedy (`do`) unless the verdict is good."""

    verdict: Literal["good", "warning", "bad"]
    what: str
    finding: str
    do: str = ""


class MachineReport(msgspec.Struct, frozen=True):
    """A checked machine; its clock is `skew_s` ahead of ours, give or take `skew_within_s`."""

    agent: str
    pool: str
    via: str
    facts: MachineFacts
    skew_s: float = 0.0
    skew_within_s: float = 0.0


class ConnectionReport(msgspec.Struct, frozen=True):
    """The attempts of one agent to connect to another; `error` says why it could not even try."""

    source: str
    target: str
    attempts: tuple[ConnectAttempt, ...] = ()
    error: str = ""

    @property
    def successful(self) -> ConnectAttempt | None:
        """The first attempt that succeeded, which is the one that members would use."""
        return next((attempt for attempt in self.attempts if not attempt.cause), None)


class MissingMachine(msgspec.Struct, frozen=True):
    """A machine that was requested and did not join; `started` says that its engine had started it."""

    agent: str
    pool: str
    why: str
    do: str = ""
    started: bool = False


class PoolReport(msgspec.Struct, frozen=True):
    """The result of a pool check; `urls` are the coordinator's addresses, `ports` the range that members listen on."""

    machines: tuple[MachineReport, ...]
    pairs: tuple[ConnectionReport, ...]
    missing: tuple[MissingMachine, ...]
    urls: tuple[str, ...]
    ports: str = ""
    verdicts: tuple[CheckVerdict, ...] = ()


def verdicts(report: PoolReport) -> tuple[CheckVerdict, ...]:
    """Return all verdicts, the bad ones first."""
    order = {"bad": 0, "warning": 1, "good": 2}
    checks = (*_missing(report), *_machines(report.machines), *_versions(report.machines), *_connections(report))
    return tuple(sorted(checks, key=lambda check: order[check.verdict]))


def _missing(report: PoolReport) -> Iterator[CheckVerdict]:
    for machine in report.missing:
        if not machine.started:
            do = machine.do or f"check [pool.{machine.pool}] in shoal.toml"
            yield CheckVerdict("bad", machine.agent, f"not started: {machine.why}", do)
            continue
        yield CheckVerdict(
            "bad",
            machine.agent,
            f"started, but did not reach the coordinator at {', '.join(report.urls)}: {machine.why}",
            machine.do or "open that port on this machine, or set address to one that the machine can reach",
        )


def _machines(machines: Sequence[MachineReport]) -> Iterator[CheckVerdict]:
    for machine in machines:
        agent, facts = machine.agent, machine.facts
        if facts.trouble:
            do = "choose another range with ports, or stop the processes that use it"
            yield CheckVerdict("bad", agent, f"members could not listen on it: {facts.trouble}", do)
        if facts.disk_free_bytes < LITTLE_DISK_BYTES:
            verdict: Literal["bad", "warning"] = "bad" if facts.disk_free_bytes < NO_DISK_BYTES else "warning"
            free = f"only {facts.disk_free_bytes / (1 << 20):.0f} MiB of disk free for logs and projects"
            yield CheckVerdict(verdict, agent, free, "free some space, or set directory in the pool")
        if abs(machine.skew_s) - machine.skew_within_s > SKEW_S:
            ahead = "ahead of" if machine.skew_s > 0 else "behind"
            skew = f"its clock is {abs(machine.skew_s):.1f} s {ahead} this machine's"
            do = "synchronise the clocks, with chrony or ntpd: times in logs and stories disagree"
            yield CheckVerdict("warning", agent, skew, do)
        if not any(name in facts.versions for name in FRAMEWORKS):
            absent = f"neither {' nor '.join(FRAMEWORKS)} is installed for Python {facts.python}"
            yield CheckVerdict("warning", agent, absent, "install one of them, or set python in the pool")


def _versions(machines: Sequence[MachineReport]) -> Iterator[CheckVerdict]:
    """Yield a warning for every package that differs between machines; Shoal's own version is checked on joining."""
    agents_by_version: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for machine in machines:
        agents_by_version["Python"][".".join(machine.facts.python.split(".")[:2])].append(machine.agent)
        for name, version in machine.facts.versions.items():
            agents_by_version[name][version].append(machine.agent)
    for name, versions in agents_by_version.items():
        if len(versions) > 1:
            listing = "; ".join(f"{version} on {', '.join(agents)}" for version, agents in versions.items())
            yield CheckVerdict("warning", name, listing, "install the same version everywhere, or results may differ")


def _connections(report: PoolReport) -> Iterator[CheckVerdict]:
    listens = {machine.agent: machine.facts.listens for machine in report.machines}
    for pair in report.pairs:
        what = f"{pair.source} → {pair.target}"
        if pair.error:
            yield CheckVerdict("bad", what, pair.error, "check that the machine is still running")
        elif listens.get(pair.target):
            yield from _connection(what, pair, report.ports)


def _connection(what: str, pair: ConnectionReport, ports: str) -> Iterator[CheckVerdict]:
    by_port: dict[int, list[ConnectAttempt]] = defaultdict(list)
    for attempt in pair.attempts:
        by_port[attempt.port].append(attempt)
    closed = [port for port, attempts in by_port.items() if all(attempt.cause for attempt in attempts)]
    if closed:
        failed = by_port[closed[0]]
        listing = "; ".join(
            f"{addresses.host_port(attempt.host, attempt.port)}: {attempt.detail}" for attempt in failed
        )
        also = f" (and the same on ports {', '.join(map(str, closed[1:]))})" if len(closed) > 1 else ""
        yield CheckVerdict("bad", what, listing + also, remedy([attempt.cause for attempt in failed], ports))
    successful = pair.successful
    if successful is None:
        return
    rate = successful.bytes_per_s or 0.0
    measured = f"{addresses.host_port(successful.host, successful.port)}: {rate / 1e6:.0f} MB/s"
    if rate < SLOW_BYTES_PER_S:
        do = "set sync=local:H to exchange less often, or use machines that are closer to each other"
        yield CheckVerdict("warning", what, f"{measured}, slow: steps may wait for gradients", do)
    else:
        yield CheckVerdict("good", what, measured)


# In the order of what is worth fixing first, if the addresses of a machine fail for different causes.
REMEDIES: Mapping[Cause, str] = {
    "silent": "a firewall drops it: open TCP {ports} between the machines",
    "refused": "a firewall rejects it: open TCP {ports} between the machines",
    "no route": "connect the two networks, or take the machines from one pool",
    "wrong peer": "both machines have that address: set interface to the network that connects them",
    "broken": "look for a proxy or a firewall between the machines that closes connections",
    "unknown name": "fix /etc/hosts or the name service on that machine",
}


def remedy(causes: Sequence[str], ports: str) -> str:
    """Return what to do about a machine that none of its addresses led to."""
    cause: Cause = next((cause for cause in REMEDIES if cause in causes), "silent")
    text = REMEDIES[cause].format(ports=ports or "from 1024 up")
    if cause in ("silent", "refused"):
        text += ", or set ports to a range that is open" + ("" if ports else ", such as ports=29400-29499")
    return text
