"""What the examination of a pool's machines means: what is wrong, and the remedy; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from shoal.core import addresses
from shoal.wire.machine_check import ConnectAttempt, MachineFacts

LITTLE_DISK_BYTES, NO_DISK_BYTES = 2 << 30, 100 << 20
SKEW_S = 1.0
SLOW_BYTES_PER_S = 12.5e6
FRAMEWORKS = ("torch", "tensorflow")


class CheckVerdict(msgspec.Struct, frozen=True):
    """One thing that was looked at, with the remedy if it is not good."""

    verdict: Literal["good", "warning", "bad"]
    what: str
    found: str
    do: str = ""


class MachineReport(msgspec.Struct, frozen=True):
    """A machine that was examined; its clock is `skew_s` ahead of ours, give or take `skew_within_s`."""

    agent: str
    pool: str
    via: str
    facts: MachineFacts
    skew_s: float = 0.0
    skew_within_s: float = 0.0


class ConnectionReport(msgspec.Struct, frozen=True):
    """How one machine reached another; `trouble` is why it could not even be asked."""

    here: str
    there: str
    attempts: tuple[ConnectAttempt, ...] = ()
    trouble: str = ""

    @property
    def taken(self) -> ConnectAttempt | None:
        """The one that members would use."""
        return next((one for one in self.attempts if not one.cause), None)


class MissingMachine(msgspec.Struct, frozen=True):
    """A machine that was asked for and did not come; `started` says that its engine had started it."""

    agent: str
    pool: str
    why: str
    do: str = ""
    started: bool = False


class PoolReport(msgspec.Struct, frozen=True):
    """All that was found; `urls` are those at which machines looked for the coordinator, `ports` those of members."""

    machines: tuple[MachineReport, ...]
    pairs: tuple[ConnectionReport, ...]
    missing: tuple[MissingMachine, ...]
    urls: tuple[str, ...]
    ports: str = ""
    verdicts: tuple[CheckVerdict, ...] = ()


def verdicts(report: PoolReport) -> tuple[CheckVerdict, ...]:
    """What it all means, the bad first."""
    order = {"bad": 0, "warning": 1, "good": 2}
    found = (*_missing(report), *_machines(report.machines), *_versions(report.machines), *_pairs(report))
    return tuple(sorted(found, key=lambda one: order[one.verdict]))


def _missing(report: PoolReport) -> Iterator[CheckVerdict]:
    for one in report.missing:
        if not one.started:
            yield CheckVerdict("bad", one.agent, f"it did not come: {one.why}", one.do or f"look at [pool.{one.pool}]")
            continue
        urls = ", ".join(report.urls)
        yield CheckVerdict(
            "bad",
            one.agent,
            f"it was started, and did not come to the coordinator at {urls}: {one.why}",
            one.do or "open that port of this machine for it, or set address to one that leads here",
        )


def _machines(machines: Sequence[MachineReport]) -> Iterator[CheckVerdict]:
    for one in machines:
        facts = one.facts
        if facts.trouble:
            do = "choose another range with ports, or end who has them"
            yield CheckVerdict("bad", one.agent, f"members could not listen there: {facts.trouble}", do)
        if facts.disk_free_bytes < LITTLE_DISK_BYTES:
            verdict: Literal["bad", "warning"] = "bad" if facts.disk_free_bytes < NO_DISK_BYTES else "warning"
            free = f"{facts.disk_free_bytes / (1 << 20):.0f} MiB of disk are free where it keeps logs and projects"
            yield CheckVerdict(verdict, one.agent, free, "make room, or set directory in the pool")
        if abs(one.skew_s) - one.skew_within_s > SKEW_S:
            ahead = "ahead of" if one.skew_s > 0 else "behind"
            found = f"its clock is {abs(one.skew_s):.1f} s {ahead} this machine's"
            yield CheckVerdict(
                "warning", one.agent, found, "set it, with chrony or ntpd: times in logs and stories disagree"
            )
        if not any(name in facts.versions for name in FRAMEWORKS):
            found = f"neither {' nor '.join(FRAMEWORKS)} is installed for Python {facts.python}"
            yield CheckVerdict("warning", one.agent, found, "install it there, or name another python in the pool")


def _versions(machines: Sequence[MachineReport]) -> Iterator[CheckVerdict]:
    """Members of one run have to agree on more than Shoal's version, which is checked when they join."""
    has: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in machines:
        has["Python"][".".join(one.facts.python.split(".")[:2])].append(one.agent)
        for name, version in one.facts.versions.items():
            has[name][version].append(one.agent)
    for name, versions in has.items():
        if len(versions) > 1:
            found = "; ".join(f"{version} on {', '.join(agents)}" for version, agents in versions.items())
            yield CheckVerdict("warning", name, found, "install the same version on all, or numbers may differ")


def _pairs(report: PoolReport) -> Iterator[CheckVerdict]:
    names = {one.agent: one.facts.listens for one in report.machines}
    for pair in report.pairs:
        what = f"{pair.here} → {pair.there}"
        if pair.trouble:
            yield CheckVerdict("bad", what, pair.trouble, "see whether the machine is still there")
        elif names.get(pair.there):
            yield from _pair(what, pair, report.ports)


def _pair(what: str, pair: ConnectionReport, ports: str) -> Iterator[CheckVerdict]:
    by_port: dict[int, list[ConnectAttempt]] = defaultdict(list)
    for one in pair.attempts:
        by_port[one.port].append(one)
    closed = [port for port, attempts in by_port.items() if all(one.cause for one in attempts)]
    if closed:
        tried = [one for one in pair.attempts if one.port == closed[0]]
        found = "; ".join(f"{addresses.host_port(one.host, one.port)}: {one.said}" for one in tried)
        also = f" (and the same on ports {', '.join(map(str, closed[1:]))})" if len(closed) > 1 else ""
        yield CheckVerdict("bad", what, found + also, remedy([one.cause for one in tried], ports))
    taken = pair.taken
    if taken is None:
        return
    rate = taken.bytes_per_s or 0.0
    found = f"{addresses.host_port(taken.host, taken.port)}: {rate / 1e6:.0f} MB/s"
    if rate < SLOW_BYTES_PER_S:
        do = "set sync=local:H to exchange less often, or take machines that are nearer to each other"
        yield CheckVerdict("warning", what, f"{found}, which is slow: a step may wait for its gradients", do)
    else:
        yield CheckVerdict("good", what, found)


REMEDIES: Mapping[str, str] = {
    "silent": "a firewall drops it: open TCP {ports} between the machines",
    "refused": "a firewall rejects it: open TCP {ports} between the machines",
    "no route": "join the two networks, or take the machines from one pool",
    "somebody else": "both machines have that address: set interface to the network that joins them",
    "broken": "look for a proxy or a firewall between the machines that ends connections",
    "unknown name": "mend /etc/hosts or the name service there",
}


def remedy(causes: Sequence[str], ports: str) -> str:
    """What to do about a peer that could be reached at none of its addresses."""
    first = next((cause for cause in REMEDIES if cause in causes), "silent")
    said = REMEDIES[first].format(ports=ports or "from 1024 up")
    if first in ("silent", "refused"):
        said += ", or set ports to a range that is open" + ("" if ports else ", such as ports=29400-29499")
    return said
