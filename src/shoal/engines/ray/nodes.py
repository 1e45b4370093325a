"""Nodes of a Ray cluster: how many allocations fit on them, and what a waiting one waits for; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.engines.engine import Capacity

if TYPE_CHECKING:
    from shoal.engines.ray.engine import RayOptions

NODE_GROUP = "ray.io/node-group"
CPUS = 1.0
_MORE = "waiting for a node to join, or for the autoscaler to add one"


def resources(options: RayOptions) -> dict[str, float]:
    """Return what an allocation takes of its node, by Ray's names of resources."""
    cpus = CPUS if options.cpus is None else options.cpus
    amounts = {"CPU": cpus, "GPU": options.gpus, "memory": float(options.memory_bytes), **options.resources}
    return {name: amount for name, amount in amounts.items() if amount}


def fitting(needed: Mapping[str, float], available: Mapping[str, float]) -> int | None:
    """Return how often `needed` fits into `available`; None if nothing is needed."""
    return min((math.floor(available.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items()), default=None)


def matches(labels: Mapping[str, str], node: Mapping[str, str]) -> bool:
    """Return whether a node's labels satisfy these selectors, as Ray reads them."""
    for name, selector in labels.items():
        negated, value = selector.startswith("!"), selector.removeprefix("!")
        values = value[3:-1].split(",") if value.startswith("in(") and value.endswith(")") else [value]
        if (node.get(name) in {value.strip() for value in values}) == negated:
            return False
    return True


def why_waiting(
    options: RayOptions, nodes: Sequence[Mapping[str, Any]], requested: Mapping[str, float] | None = None
) -> str:
    """Return what an allocation waits for; `requested` is what its members need, where the pool configures nothing."""
    needed = {**resources(options), **(requested or {})}
    labelled = [node for node in nodes if matches(options.labels, node["labels"])]
    if not labelled:
        return f"none of {len(nodes)} nodes has the labels {_listed(options.labels)}; {_MORE}"
    able = [node for node in labelled if fitting(needed, node["total"]) != 0]
    if not able:
        return f"no node has {_listed(needed)}; {_MORE}"
    if not any(fitting(needed, node["free"]) != 0 for node in able):
        where = f"all {len(able)} nodes that have it" if len(able) > 1 else "the only node that has it"
        return f"{_listed(needed)} is in use on {where}; {_MORE}"
    return "Ray is placing it"


def capacity(options: RayOptions, nodes: Sequence[Mapping[str, Any]]) -> list[Capacity]:
    """Return how many more allocations of this pool would fit now, by kind of node."""
    needed = resources(options)
    counts: dict[str, int | None] = {}
    whys: dict[str, str] = {}
    for node in nodes:
        kind = node_kind(node)
        count = fitting(needed, node["free"]) if matches(options.labels, node["labels"]) else 0
        before = counts.get(kind, 0)
        counts[kind] = None if before is None or count is None else before + count
        whys[kind] = "" if counts[kind] != 0 else why_waiting(options, [node])
    cpus, gpus = math.ceil(CPUS if options.cpus is None else options.cpus), math.ceil(options.gpus)
    return [
        Capacity(kind, count, cpus, gpus, options.memory_bytes, whys[kind]) for kind, count in sorted(counts.items())
    ]


def node_kind(node: Mapping[str, Any]) -> str:
    """Return the name of the node's group, or its processors if it has no group."""
    named = node["labels"].get(NODE_GROUP)
    if named:
        return str(named)
    total = node["total"]
    parts = [f"{total[name]:g} {name}s" for name in ("CPU", "GPU") if total.get(name)]
    return "node with " + (", ".join(parts) or "no CPUs")


def _listed(amounts: Mapping[str, float | str]) -> str:
    return ", ".join(
        f"{name} {amount:g}" if isinstance(amount, float) else f"{name}={amount}" for name, amount in amounts.items()
    )
