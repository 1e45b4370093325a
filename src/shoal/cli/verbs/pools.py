"""`shoal pools`: pools with their prices and capacity, and the machines that coordinators have of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.core.nouns import counted
from shoal.engines import pool_config
from shoal.engines.engine import Capacity
from shoal.errors import ShoalError
from shoal.launch import run_lookup, settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import PoolView


class PoolListing(msgspec.Struct, frozen=True):
    """A pool of shoal.toml; `trouble` says why its capacity is unknown."""

    pool: str
    engine: str
    limit: int
    slots: int
    price_per_h: float
    offers: tuple[Capacity, ...] = ()
    trouble: str = ""


@click.command()
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget) -> None:
    """List pools of machines.

    Pools of shoal.toml are shown with the machines that they could provide now; pools of running coordinators with the
    machines that they have provided, and their cost.
    """
    settings = settings_layers.resolve(Path.cwd(), os.environ)
    with ThreadPoolExecutor(max_workers=16) as threads:
        queries = [threads.submit(_query, name, table, str(settings.file)) for name, table in settings.pools.items()]
        described = [query.result() for query in queries]
    in_use = [
        (coordinator.id, pool)
        for coordinator in run_lookup.coordinators(target)
        if coordinator.client is not None
        for pool in coordinator.client.pools()
    ]
    facts = {"described": described, "in_use": [{"coordinator": id, "pool": pool} for id, pool in in_use]}
    output.result(facts, lambda: _text(described, in_use))


def _query(name: str, written: pool_config.Table, where: str) -> PoolListing:
    """Return a pool with its present capacity, or why that could not be found out."""
    pool, engine = pool_config.parse(name, written, where)
    listing = PoolListing(name, pool.engine, pool.limit, pool.slots, pool.price_per_h)
    try:
        return msgspec.structs.replace(listing, offers=tuple(engine.capacity()))
    except ShoalError as error:
        return msgspec.structs.replace(listing, trouble=f"{error.what}: {error.why}" if error.why else error.what)
    finally:
        engine.close()


def _text(described: list[PoolListing], in_use: list[tuple[str, PoolView]]) -> str:
    if not described and not in_use:
        return "no pools: describe one under [pool.NAME] in shoal.toml"
    parts = []
    if described:
        titles = ["pool", "engine", "price/h", "limit", "slots", "could provide now"]
        parts.append(table.columns(titles, [_listing_row(listing) for listing in described]))
    if in_use:
        titles = ["pool", "coordinator", "running", "waiting", "leaving", "machine hours", "spent", "problem"]
        parts.append(table.columns(titles, [_use_row(id, pool) for id, pool in in_use]))
    return "\n\n".join(parts)


def _listing_row(listing: PoolListing) -> tuple[str, ...]:
    offers = listing.trouble or "; ".join(_capacity(offer) for offer in listing.offers) or "nothing"
    price = _price(listing.price_per_h)
    return listing.pool, listing.engine, price, str(listing.limit), str(listing.slots), offers


def _use_row(coordinator: str, pool: PoolView) -> tuple[str, ...]:
    hours, spent = f"{pool.cost.machine_s / 3600:.2f}", _price(pool.cost.spent)
    counts = (str(pool.running), str(pool.waiting), str(pool.leaving))
    return pool.pool, coordinator, *counts, hours, spent, pool.trouble or "-"


def _capacity(offer: Capacity) -> str:
    count = "any number" if offer.count is None else str(offer.count)
    sizes = [counted(offer.cpus, "core") if offer.cpus else "", counted(offer.gpus, "GPU") if offer.gpus else ""]
    sizes.append(table.size(offer.memory_bytes) if offer.memory_bytes else "")
    each = ", ".join(size for size in sizes if size)
    return f"{count} of {offer.kind}" + (f" ({each})" if each else "") + (f": {offer.why}" if offer.why else "")


def _price(amount: float) -> str:
    return f"{amount:.2f}" if amount else "-"
