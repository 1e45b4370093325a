"""Slurm's nodes as capacity: parses sinfo, and counts how many allocations would fit now; pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from shoal.engines.engine import Capacity

FIELDS = ("NodeList", "Partition", "Available", "StateLong", "CPUsState", "Memory", "AllocMem", "Gres", "GresUsed")
FORMAT = ",".join(f"{field}:|" for field in FIELDS)
MIB = 1 << 20
TAKES_JOBS = ("idle", "mixed")
GPUS = re.compile(r"gpu(?::[^:,()]+)*?:(\d+)")
# Suffixes of a state in sinfo: not responding, powered down, powering up, rebooting, reserved …
STATE_SUFFIXES = "*~#!%$@^-+"
POWERED_DOWN = "~"


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """Node in one partition, with its free resources."""

    name: str
    partition: str
    state: str
    takes_jobs: bool
    cpus: int
    cpus_idle: int
    memory_mib: int
    memory_idle_mib: int
    gpus: int
    gpus_idle: int
    gres: str


def parse(text: str) -> list[SlurmNode]:
    """Return the nodes that sinfo printed in `FORMAT`."""
    return [_node(line.split("|")) for line in text.splitlines() if line.count("|") >= len(FIELDS)]


def _node(fields: list[str]) -> SlurmNode:
    name, partition, available, state, cpus, memory, used_memory, gres, used_gres = fields[: len(FIELDS)]
    _, idle, _, total = (int(part) if part.isdecimal() else 0 for part in f"{cpus}/0/0/0".split("/")[:4])
    memory_mib = _number(memory)
    plain = state.rstrip(STATE_SUFFIXES)
    answers = not set(state[len(plain) :]) - set(POWERED_DOWN)
    return SlurmNode(
        name=name,
        partition=partition.rstrip("*"),
        state=state,
        takes_jobs=available == "up" and plain in TAKES_JOBS and answers,
        cpus=total,
        cpus_idle=idle,
        memory_mib=memory_mib,
        memory_idle_mib=max(0, memory_mib - _number(used_memory)),
        gpus=_gpus(gres),
        gpus_idle=max(0, _gpus(gres) - _gpus(used_gres)),
        gres="" if gres == "(null)" else gres.partition("(")[0],
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _gpus(gres: str) -> int:
    return sum(int(count) for count in GPUS.findall(gres))


def capacity(nodes: list[SlurmNode], *, cpus: int = 1, memory_mib: int = 0, gpus: int = 0) -> list[Capacity]:
    """Return, per partition and kind of node, how many allocations of this size fit now."""
    kinds: dict[tuple[str, int, int, int, str], list[SlurmNode]] = {}
    for node in nodes:
        kinds.setdefault((node.partition, node.cpus, node.memory_mib, node.gpus, node.gres), []).append(node)
    return [
        Capacity(
            kind=f"{partition} ({gres})" if gres else partition,
            count=sum(_fitting(node, cpus, memory_mib, gpus) for node in group),
            cpus=has_cpus,
            gpus=has_gpus,
            memory_bytes=has_mib * MIB,
            why=_states(group),
        )
        for (partition, has_cpus, has_mib, has_gpus, gres), group in sorted(kinds.items())
    ]


def _fitting(node: SlurmNode, cpus: int, memory_mib: int, gpus: int) -> int:
    if not node.takes_jobs:
        return 0
    count = node.cpus_idle // max(1, cpus)
    if memory_mib:
        count = min(count, node.memory_idle_mib // memory_mib)
    if gpus:
        count = min(count, node.gpus_idle // gpus)
    return count


def _states(nodes: list[SlurmNode]) -> str:
    counted = Counter(node.state for node in nodes)
    return ", ".join(f"{count} {state}" for state, count in sorted(counted.items()))


def mib(text: str) -> int:
    """Return the amount of sbatch's --mem in MiB; 0 if it is empty or malformed."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.strip().upper().removesuffix("B"))
    if not match:
        return 0
    number, unit = int(match[1]), match[2] or "M"
    return max(1, number * 1024 ** "KMGT".index(unit) // 1024) if number else 0


def requested_gpus(gpus: int | str, gres: str) -> int:
    """Return how many GPUs an allocation requests, by `gpus` or by `gres`."""
    if gpus:
        last = str(gpus).rpartition(":")[2]
        return int(last) if last.isdecimal() else 1
    return _gpus(gres) or (1 if re.match(r"gpu\b", gres) else 0)
