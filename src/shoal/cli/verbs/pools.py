"""`shoal pools`: where machines can be had, at what price, and what keeps them away."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.output import table
from shoal.engines import pool_config
from shoal.engines.engine import Capacity
from shoal.errors import ShoalError
from shoal.launch import run_lookup, settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import PoolView


class PoolListing(msgspec.Struct, frozen=True):
    """A pool of shoal.toml; `trouble` is why nobody knows what it offers."""

    pool: str
    engine: str
    limit: int
    slots: int
    price_per_h: float
    offers: tuple[Capacity, ...] = ()
    trouble: str = ""


@click.command()
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget) -> None:
    """List pools of machines.

    Those of shoal.toml are asked what they could give now; those of coordinators that run are shown with what they
    have given, and what it has cost.
    """
    choices = settings_layers.choose(Path.cwd(), os.environ)
    with ThreadPoolExecutor(max_workers=16) as threads:
        asked = [threads.submit(_ask, name, written, str(choices.file)) for name, written in choices.pools.items()]
        described = [one.result() for one in asked]
    hiring = [
        (one.id, pool)
        for one in run_lookup.coordinators(place)
        if one.client is not None
        for pool in one.client.pools()
    ]
    found = {"described": described, "hiring": [{"coordinator": id, "pool": pool} for id, pool in hiring]}
    frame.answer(found, lambda: _text(described, hiring))


def _ask(name: str, written: pool_config.Table, where: str) -> PoolListing:
    pool, engine = pool_config.parse(name, written, where)
    known = PoolListing(name, pool.engine, pool.limit, pool.slots, pool.price_per_h)
    try:
        return msgspec.structs.replace(known, offers=tuple(engine.capacity()))
    except ShoalError as error:
        return msgspec.structs.replace(known, trouble=f"{error.what}: {error.why}" if error.why else error.what)
    finally:
        engine.close()


def _text(described: list[PoolListing], hiring: list[tuple[str, PoolView]]) -> str:
    if not described and not hiring:
        return "no pools: describe one under [pool.NAME] in shoal.toml"
    parts = []
    if described:
        head = ("pool", "engine", "price/h", "limit", "slots", "could give now")
        parts.append(table.columns(head, [_described(one) for one in described]))
    if hiring:
        below = ("pool", "coordinator", "here", "waiting", "leaving", "machine hours", "spent", "trouble")
        parts.append(table.columns(below, [_hiring(id, one) for id, one in hiring]))
    return "\n\n".join(parts)


def _described(one: PoolListing) -> tuple[str, ...]:
    return one.pool, one.engine, _price(one.price_per_h), str(one.limit), str(one.slots), _offered(one)


def _hiring(coordinator: str, one: PoolView) -> tuple[str, ...]:
    hours, spent = f"{one.cost.machine_s / 3600:.2f}", _price(one.cost.spent)
    counts = (str(one.here), str(one.waiting), str(one.leaving))
    return one.pool, coordinator, *counts, hours, spent, one.trouble or "-"


def _offered(one: PoolListing) -> str:
    if one.trouble:
        return one.trouble
    return "; ".join(_one_offer(offer) for offer in one.offers) or "nothing"


def _one_offer(offer: Capacity) -> str:
    many = "any number" if offer.count is None else str(offer.count)
    sizes = [f"{offer.cpus} cores" if offer.cpus else "", f"{offer.gpus} GPUs" if offer.gpus else ""]
    sizes.append(table.size(offer.memory_bytes) if offer.memory_bytes else "")
    said = ", ".join(size for size in sizes if size)
    return f"{many} of {offer.kind}" + (f" ({said})" if said else "") + (f": {offer.why}" if offer.why else "")


def _price(amount: float) -> str:
    return f"{amount:.2f}" if amount else "-"
