"""Launcher environment: the variables that unmodified torchrun and TF_CONFIG scripts read.

Ranks are ordered by agent, so that those of one machine are neighbours. Ports are derived from the run and the number
of restarts: a restarted group does not meet the ports of its predecessor, which may still be closing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import addresses
from shoal.errors import BadRole

TORCHRUN, TF, PS = "torchrun", "tf", "ps"
KINDS = (TORCHRUN, TF, PS)
ANY_PORTS = range(20000, 32000)
TASKS = {"trainer": "worker", "evaluator": "evaluator", "server": "ps"}


@dataclass(frozen=True, slots=True)
class RankHost:
    """Agent and host of one rank."""

    agent: str
    host: str


@dataclass(frozen=True, slots=True)
class TfTask:
    """Task of one rank in TF_CONFIG."""

    type: str
    index: int


def evaluator_unsupported(kind: str, where: str = "") -> BadRole:
    """Return the error for an evaluator beside an unmodified script."""
    return BadRole(
        f"an unmodified script (--compat {kind}) cannot have an evaluator",
        where=where,
        why="it writes checkpoints of its own, which Shoal cannot read, and does not say how to evaluate them",
        do="leave --evaluator out and evaluate in the script, or use shoal.torch or shoal.keras instead of --compat",
    )


def tf_tasks(kind: str, count: int, servers: int) -> tuple[TfTask, ...]:
    """Return the task of each rank: all are workers, but with ps the first are the chief and the servers."""
    if kind != PS:
        return tuple(TfTask("worker", index) for index in range(count))
    first = (TfTask("chief", 0), *(TfTask("ps", index) for index in range(servers)))
    return (*first, *(TfTask("worker", index) for index in range(count - len(first))))


def launcher_environments(
    kind: str,
    run: str,
    salt: str,
    hosts: Sequence[RankHost],
    restarts: int,
    max_restarts: int,
    servers: int = 0,
    span: range = ANY_PORTS,
) -> list[tuple[tuple[str, str], ...]]:
    """Return the environment of each rank; `kind` is torchrun, tf or ps. Every restart uses other ports of the span."""
    agents = list(dict.fromkeys(host.agent for host in hosts))
    ordered = sorted(range(len(hosts)), key=lambda i: agents.index(hosts[i].agent))
    first = zlib.crc32(f"{salt} {run} {restarts}".encode()) % max(1, len(span) - len(hosts))
    ports = {i: span[(first + rank) % len(span)] for rank, i in enumerate(ordered)}
    envs: list[tuple[tuple[str, str], ...]] = [()] * len(hosts)
    given = tf_tasks(kind, len(hosts), servers)
    cluster: dict[str, list[str]] = {}
    for i, tf_task in zip(ordered, given, strict=True):
        cluster.setdefault(tf_task.type, []).append(addresses.host_port(hosts[i].host, ports[i]))
    for rank, i in enumerate(ordered):
        if kind in (TF, PS):
            task = {"type": given[rank].type, "index": given[rank].index}
            pairs = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        else:
            pairs = _torchrun(run, hosts, ordered, rank, agents, restarts, max_restarts, ports[ordered[0]])
        envs[i] = (("SHOAL_COMPAT", "1"), *pairs.items())
    return envs


def standalone_tf_config(role: str, member: str) -> str:
    """Return the TF_CONFIG of an elastic member: its own task, in a cluster without other members."""
    number = member.rpartition("/")[2].rpartition("-")[2]
    task = {"type": TASKS[role], "index": int(number) if number.isdecimal() else 0}
    return json.dumps({"cluster": {}, "task": task})


def _torchrun(
    run: str,
    hosts: Sequence[RankHost],
    ordered: Sequence[int],
    rank: int,
    agents: Sequence[str],
    restarts: int,
    max_restarts: int,
    port: int,
) -> dict[str, str]:
    agent = hosts[ordered[rank]].agent
    local = [r for r, i in enumerate(ordered) if hosts[i].agent == agent]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(local.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(agents.index(agent)),
        "GROUP_WORLD_SIZE": str(len(agents)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[ordered[0]].host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
