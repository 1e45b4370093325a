"""Pools as shoal.toml describes them: what they cost, how much they may give, and the engine behind each."""

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
OURS = {
    LOCAL: "shoal.engines.local:Local",
    "ssh": "shoal.engines.ssh.engine:Ssh",
    "slurm": "shoal.engines.slurm.engine:Slurm",
    "ray": "shoal.engines.ray.engine:Ray",
}

Table = Mapping[str, Any]


class PoolConfig(msgspec.Struct, frozen=True):
    """What can be said of any pool."""

    engine: str
    limit: Annotated[int, Meta(ge=0, description="most machines that may be had at a time")] = 8
    slots: Annotated[int, Meta(ge=1, description="members on each machine")] = 1
    price: Annotated[float, Meta(ge=0, description="of a machine for an hour, in any currency")] = 0.0
    instead: Annotated[float, Meta(ge=0, description="what a machine that is not preempted would cost")] = 0.0
    wait_s: Annotated[float, Meta(gt=0, description="wait for a machine before the next pool is asked")] = 60.0
    labels: Annotated[Mapping[str, str], Meta(description="what its machines carry, for --where")] = msgspec.field(
        default_factory=dict
    )


def engine_type(name: str, where: str = "") -> type[Engine]:
    """The engine of this name, ours or another package's."""
    found = OURS.get(name) or next(
        (p.value for p in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)), ""
    )
    if not found:
        raise UnknownEngine(f"there is no engine {name!r}", where=where, do=f"the engines are: {', '.join(engines())}")
    module, _, kind = found.partition(":")
    loaded: type[Engine] = getattr(importlib.import_module(module), kind)
    return loaded


def engines() -> list[str]:
    """The names of all engines."""
    return sorted({*OURS, *(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))})


def parse(name: str, table: Table, where: str = "") -> tuple[PoolInfo, Engine]:
    """A pool and its engine from a ``[pool.NAME]``."""
    if not re.fullmatch(NAME, name):
        raise BadPool(
            f"a pool cannot be called {name!r}",
            where=where,
            why="its machines are named after it, also in paths and for shells",
            do="use up to 48 letters, digits and _ . -, and begin with a letter or a digit",
        )
    if "engine" not in table:
        raise BadPool(f"pool {name} names no engine", where=where, do=f'add engine = "{LOCAL}", or another')
    general = {field.encode_name for field in msgspec.structs.fields(PoolConfig)}
    said = _convert(name, {key: value for key, value in table.items() if key in general}, PoolConfig, where)
    kind = engine_type(said.engine, where)
    known = [field.encode_name for field in msgspec.structs.fields(kind.options_type)]
    # Labels may be the engine's too: what it chooses machines by is what they carry.
    own = {key: value for key, value in table.items() if key not in general or key in known}
    for key in own:
        if key not in known:
            near = difflib.get_close_matches(key, [*general, *known], n=1)
            do = f"did you mean {near[0]}?" if near else f"{said.engine} takes {', '.join(sorted((*general, *known)))}"
            raise BadPool(f"pool {name} cannot be told {key!r}", where=where, do=do)
    options = _convert(name, own, kind.options_type, where)
    if options.image and not kind.takes_images:
        able = [one for one in OURS if engine_type(one).takes_images]
        raise BadPool(
            f"pool {name} cannot run the image {options.image!r}",
            where=where,
            why=f"{said.engine} starts agents on machines as they are; images are for {' and '.join(able)}",
            do="give it an environment instead: a requirements file, or a packed archive",
        )
    engine = kind(name, options)
    limit = said.limit if engine.max_allocations is None else min(said.limit, engine.max_allocations)
    price = (said.price, said.instead, said.wait_s)
    pool = PoolInfo(name, said.engine, limit, said.slots, *price, dict(said.labels), kind.sized, *engine.size)
    return pool, engine


def _convert(name: str, values: Table, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        key = path.strip("`$.") or "something"
        raise BadPool(f"{key} of pool {name} cannot be what it is", where=where, why=why) from error
