"""The nodes of a Ray cluster: how many hires fit on them, and what one that waits is waiting for; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.engines.engine import Capacity

if TYPE_CHECKING:
    from shoal.engines.ray.engine import RayOptions

NODE_GROUP = "ray.io/node-group"
CPUS = 1.0
_MORE = "it waits for one to join or, where there is an autoscaler, to be brought"


def needs(options: RayOptions) -> dict[str, float]:
    """What a hire takes of its node, by Ray's names."""
    cpus = CPUS if options.cpus is None else options.cpus
    asked = {"CPU": cpus, "GPU": options.gpus, "memory": float(options.memory_bytes), **options.resources}
    return {name: amount for name, amount in asked.items() if amount}


def fitting(asked: Mapping[str, float], have: Mapping[str, float]) -> int | None:
    """How many of these fit into that; None if they take nothing."""
    return min((math.floor(have.get(name, 0.0) / amount + 1e-9) for name, amount in asked.items()), default=None)


def suits(labels: Mapping[str, str], node: Mapping[str, str]) -> bool:
    """Whether a node has these labels, as Ray understands them."""
    for name, wanted in labels.items():
        negated, value = wanted.startswith("!"), wanted.removeprefix("!")
        among = value[3:-1].split(",") if value.startswith("in(") and value.endswith(")") else [value]
        if (node.get(name) in {one.strip() for one in among}) == negated:
            return False
    return True


def why_waiting(
    options: RayOptions, nodes: Sequence[Mapping[str, Any]], takes: Mapping[str, float] | None = None
) -> str:
    """What a hire of this shape waits for; `takes` is what its members need, where the pool says nothing."""
    asked = {**needs(options), **(takes or {})}
    labelled = [node for node in nodes if suits(options.labels, node["labels"])]
    if not labelled:
        return f"none of {len(nodes)} nodes has the labels {_listed(options.labels)}; {_MORE}"
    able = [node for node in labelled if fitting(asked, node["total"]) != 0]
    if not able:
        return f"no node has {_listed(asked)} at all; {_MORE}"
    if not any(fitting(asked, node["free"]) != 0 for node in able):
        return f"{_listed(asked)} is in use on all of {len(able)} nodes that have it; {_MORE}"
    return "Ray is placing it"


def offers(options: RayOptions, nodes: Sequence[Mapping[str, Any]]) -> list[Capacity]:
    """How many more hires of this shape would fit now, by kind of node."""
    asked = needs(options)
    counts: dict[str, int | None] = {}
    whys: dict[str, str] = {}
    for node in nodes:
        kind = node_kind(node)
        count = fitting(asked, node["free"]) if suits(options.labels, node["labels"]) else 0
        known = counts.get(kind, 0)
        counts[kind] = None if known is None or count is None else known + count
        whys[kind] = "" if counts[kind] != 0 else why_waiting(options, [node])
    cpus, gpus = math.ceil(CPUS if options.cpus is None else options.cpus), math.ceil(options.gpus)
    return [
        Capacity(kind, count, cpus, gpus, options.memory_bytes, whys[kind]) for kind, count in sorted(counts.items())
    ]


def node_kind(node: Mapping[str, Any]) -> str:
    """The node group's name if it has one, or what the node is made of."""
    named = node["labels"].get(NODE_GROUP)
    if named:
        return str(named)
    total = node["total"]
    parts = [f"{total[name]:g} {name}s" for name in ("CPU", "GPU") if total.get(name)]
    return "node with " + (", ".join(parts) or "no CPUs")


def _listed(asked: Mapping[str, float | str]) -> str:
    return ", ".join(
        f"{name} {amount:g}" if isinstance(amount, float) else f"{name}={amount}" for name, amount in asked.items()
    )
