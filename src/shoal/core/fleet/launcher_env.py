"""What unmodified torchrun and TF_CONFIG scripts find in their environment."""

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
    """Where one rank runs."""

    agent: str
    host: str


@dataclass(frozen=True, slots=True)
class TfTask:
    """What one rank is in TF_CONFIG."""

    type: str
    index: int


def evaluator_unsupported(kind: str, where: str = "") -> BadRole:
    """Why an unmodified script is not evaluated, and what to do instead."""
    return BadRole(
        f"an unmodified script (--compat {kind}) cannot have an evaluator",
        where=where,
        why="it writes checkpoints of its own, which Shoal cannot read, and does not say how to evaluate them",
        do="leave --evaluator out and evaluate in the script, or use shoal.torch or shoal.keras instead of --compat",
    )


def tf_tasks(kind: str, count: int, servers: int) -> tuple[TfTask, ...]:
    """What each of so many ranks is: all are workers, but with ps the first ones are the chief and the servers."""
    if kind != PS:
        return tuple(TfTask("worker", index) for index in range(count))
    first = (TfTask("chief", 0), *(TfTask("ps", index) for index in range(servers)))
    return (*first, *(TfTask("worker", index) for index in range(count - len(first))))


def launcher_environments(
    kind: str,
    run: str,
    salt: str,
    places: Sequence[RankHost],
    restarts: int,
    max_restarts: int,
    servers: int = 0,
    span: range = ANY_PORTS,
) -> list[tuple[tuple[str, str], ...]]:
    """The environment of each rank; `kind` is torchrun, tf or ps. Every restart meets on other ports of the span."""
    agents = list(dict.fromkeys(place.agent for place in places))
    ordered = sorted(range(len(places)), key=lambda i: agents.index(places[i].agent))
    first = zlib.crc32(f"{salt} {run} {restarts}".encode()) % max(1, len(span) - len(places))
    ports = {i: span[(first + rank) % len(span)] for rank, i in enumerate(ordered)}
    envs: list[tuple[tuple[str, str], ...]] = [()] * len(places)
    given = tf_tasks(kind, len(places), servers)
    cluster: dict[str, list[str]] = {}
    for i, task in zip(ordered, given, strict=True):
        cluster.setdefault(task.type, []).append(addresses.host_port(places[i].host, ports[i]))
    for rank, i in enumerate(ordered):
        if kind in (TF, PS):
            mine = {"type": given[rank].type, "index": given[rank].index}
            pairs = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": mine})}
        else:
            pairs = _torchrun(run, places, ordered, rank, agents, restarts, max_restarts, ports[ordered[0]])
        envs[i] = (("SHOAL_COMPAT", "1"), *pairs.items())
    return envs


def standalone_tf_config(role: str, member: str) -> str:
    """TF_CONFIG of an elastic member: what it is, in a cluster that has nobody else in it."""
    number = member.rpartition("/")[2].rpartition("-")[2]
    task = {"type": TASKS[role], "index": int(number) if number.isdecimal() else 0}
    return json.dumps({"cluster": {}, "task": task})


def _torchrun(
    run: str,
    places: Sequence[RankHost],
    ordered: Sequence[int],
    rank: int,
    agents: Sequence[str],
    restarts: int,
    max_restarts: int,
    port: int,
) -> dict[str, str]:
    mine = places[ordered[rank]].agent
    here = [r for r, i in enumerate(ordered) if places[i].agent == mine]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": str(here.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(agents.index(mine)),
        "GROUP_WORLD_SIZE": str(len(agents)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": places[ordered[0]].host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
