"""What can be said of a pool in shoal.toml, and what is said of what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engines import pool_config
from shoal.errors import BadPool, UnknownEngine


def test_a_pool_is_what_its_table_says() -> None:
    table = {"engine": "slurm", "partition": "night", "limit": 4, "slots": 2, "price": 0.5, "instead": 1.5}
    pool, engine = pool_config.parse("spot", table)
    assert (pool.limit, pool.slots, pool.price_per_h, pool.on_demand_per_h) == (4, 2, 0.5, 1.5)
    assert engine.pool == "spot"
    assert engine.options.partition == "night"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "names no engine"),
        ({"engine": "slurm", "partitoin": "night"}, "did you mean partition?"),
        ({"engine": "slurm", "zzz": 1}, "slurm takes"),
        ({"engine": "local", "limit": -1}, "limit of pool spot"),
        ({"engine": "local", "slots": "two"}, "slots of pool spot"),
        ({"engine": "slurm", "requeue": "perhaps"}, "requeue of pool spot"),
    ],
)
def test_what_cannot_be_said_of_a_pool_is_named(table: dict[str, Any], says: str) -> None:
    with pytest.raises(BadPool) as caught:
        pool_config.parse("spot", table, where="shoal.toml")
    assert says in str(caught.value)
    assert caught.value.where == "shoal.toml"


def test_an_unknown_engine_is_an_error_that_names_the_others() -> None:
    with pytest.raises(UnknownEngine, match="local, ray, slurm, ssh"):
        pool_config.parse("spot", {"engine": "slurn"})


@pytest.mark.parametrize("name", ["my pool", "a;b", "a/b", "../a", "", "a,b", "ä", "-a", ".a", "a" * 64])
def test_a_pool_has_a_name_that_shells_paths_and_agents_take(name: str) -> None:
    with pytest.raises(BadPool) as refused:
        pool_config.parse(name, {"engine": "local"}, "shoal.toml")
    assert refused.value.what == f"a pool cannot be called {name!r}"
    assert refused.value.where == "shoal.toml"


@pytest.mark.parametrize("name", ["spot", "A-1", "eu_west.2"])
def test_usual_names_of_pools_are_taken(name: str) -> None:
    assert pool_config.parse(name, {"engine": "local"})[0].name == name
