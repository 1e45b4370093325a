"""Pool configuration: a `[pool.NAME]` table of shoal.toml becomes a `PoolInfo` and an engine."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.core.provisioning.events import PoolInfo
from shoal.engines.engine import Engine
from shoal.errors import BadPool, UnknownEngine

ENTRY_POINTS = "shoal.engines"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}"
LOCAL = "local"
BUILT_IN = {
    LOCAL: "shoal.engines.local:Local",
    "ssh": "shoal.engines.ssh.engine:Ssh",
    "slurm": "shoal.engines.slurm.engine:Slurm",
    "ray": "shoal.engines.ray.engine:Ray",
}

MAX_MACHINES = 10_000
MAX_PRICE = 1e12
MAX_WAIT_S = 1e9

Table = Mapping[str, Any]


class PoolConfig(msgspec.Struct, frozen=True):
    """Keys that every pool accepts, whatever its engine."""

    engine: str
    limit: Annotated[int, Meta(ge=0, le=MAX_MACHINES, description="most machines at a time")] = 8
    slots: Annotated[int, Meta(ge=1, le=MAX_MACHINES, description="members on each machine")] = 1
    price: Annotated[float, Meta(ge=0, le=MAX_PRICE, description="of a machine per hour, in any currency")] = 0.0
    instead: Annotated[float, Meta(ge=0, le=MAX_PRICE, description="price of a machine that is not preempted")] = 0.0
    wait_s: Annotated[
        float, Meta(gt=0, le=MAX_WAIT_S, description="time to wait for a machine before trying the next pool")
    ] = 60.0
    labels: Annotated[Mapping[str, str], Meta(description="labels of its machines, for --where")] = msgspec.field(
        default_factory=dict
    )


def engine_type(name: str, where: str = "") -> type[Engine]:
    """Return the engine class of this name, built in or from another package; raise `UnknownEngine`."""
    path = BUILT_IN.get(name) or next(
        (point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)), ""
    )
    if not path:
        expected = ", ".join(engines())
        raise UnknownEngine(f"unknown engine {name!r}", where=where, do=f"use one of: {expected}")
    module, _, class_name = path.partition(":")
    engine: type[Engine] = getattr(importlib.import_module(module), class_name)
    return engine


def engines() -> list[str]:
    """Return the names of all engines."""
    return sorted({*BUILT_IN, *(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))})


def parse(name: str, table: Table, where: str = "") -> tuple[PoolInfo, Engine]:
    """Return the pool and the engine that a `[pool.NAME]` table describes; raise `BadPool` or `UnknownEngine`."""
    if not re.fullmatch(NAME, name):
        raise BadPool(
            f"invalid pool name {name!r}",
            where=where,
            why="machines are named after their pool, also in paths and shell commands",
            do="use up to 48 letters, digits and _ . -, beginning with a letter or a digit",
        )
    if "engine" not in table:
        raise BadPool(f"pool {name} has no engine", where=where, do=f'add engine = "{LOCAL}", or another')
    general = {field.encode_name for field in msgspec.structs.fields(PoolConfig)}
    config = _convert(name, {key: value for key, value in table.items() if key in general}, PoolConfig, where)
    kind = engine_type(config.engine, where)
    options = _engine_options(name, table, config.engine, kind, general, where)
    engine = kind(name, options)
    limit = config.limit if engine.max_allocations is None else min(config.limit, engine.max_allocations)
    price = (config.price, config.instead, config.wait_s)
    pool = PoolInfo(name, config.engine, limit, config.slots, *price, dict(config.labels), kind.sized, *engine.size)
    return pool, engine


def _engine_options(name: str, table: Table, engine: str, kind: type[Engine], general: set[str], where: str) -> Any:
    """Return the engine's own options; raise `BadPool` for a key that neither the engine nor every pool has."""
    accepted = [field.encode_name for field in msgspec.structs.fields(kind.options_type)]
    # `labels` may be both: machines carry the labels that the engine selects them by.
    given = {key: value for key, value in table.items() if key not in general or key in accepted}
    for key in given:
        if key not in accepted:
            near = difflib.get_close_matches(key, [*general, *accepted], n=1)
            do = f"did you mean {near[0]}?" if near else f"{engine} takes {', '.join(sorted((*general, *accepted)))}"
            raise BadPool(f"unknown key {key!r} in [pool.{name}]", where=where, do=do)
    options = _convert(name, given, kind.options_type, where)
    if options.image and not kind.takes_images:
        able = [name for name in BUILT_IN if engine_type(name).takes_images]
        raise BadPool(
            f"pool {name} cannot run the image {options.image!r}",
            where=where,
            why=f"{engine} starts agents outside of containers; images are for {' and '.join(able)}",
            do="give it an environment instead: a requirements file, or a packed archive",
        )
    return options


def _convert(name: str, values: Table, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        key = path.strip("`$.") or "a key"
        raise BadPool(f"invalid value for {key} in [pool.{name}]", where=where, why=why) from error
