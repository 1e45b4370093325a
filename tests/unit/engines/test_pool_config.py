"""Tables of pools in shoal.toml, and the errors of invalid ones."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engines import pool_config
from shoal.errors import BadPool, UnknownEngine


def test_pool_has_the_values_of_its_table() -> None:
    table = {"engine": "slurm", "partition": "night", "limit": 4, "slots": 2, "price": 0.5, "instead": 1.5}
    pool, engine = pool_config.parse("spot", table)
    assert (pool.limit, pool.slots, pool.price_per_h, pool.on_demand_per_h) == (4, 2, 0.5, 1.5)
    assert engine.pool == "spot"
    assert engine.options.partition == "night"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({}, "has no engine"),
        ({"engine": "slurm", "partitoin": "night"}, "did you mean partition?"),
        ({"engine": "slurm", "zzz": 1}, "slurm takes"),
        ({"engine": "local", "limit": -1}, "invalid value for limit in [pool.spot]"),
        ({"engine": "local", "slots": "two"}, "invalid value for slots in [pool.spot]"),
        ({"engine": "slurm", "requeue": "perhaps"}, "invalid value for requeue in [pool.spot]"),
    ],
)
def test_invalid_key_is_named(table: dict[str, Any], text: str) -> None:
    with pytest.raises(BadPool) as caught:
        pool_config.parse("spot", table, where="shoal.toml")
    assert text in str(caught.value)
    assert caught.value.where == "shoal.toml"


def test_unknown_engine_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(UnknownEngine, match="local, ray, slurm, ssh"):
        pool_config.parse("spot", {"engine": "slurn"})


@pytest.mark.parametrize("name", ["my pool", "a;b", "a/b", "../a", "", "a,b", "ä", "-a", ".a", "a" * 64])
def test_name_that_is_unsafe_in_shells_or_paths_is_refused(name: str) -> None:
    with pytest.raises(BadPool) as error:
        pool_config.parse(name, {"engine": "local"}, "shoal.toml")
    assert error.value.what == f"invalid pool name {name!r}"
    assert error.value.where == "shoal.toml"


@pytest.mark.parametrize("name", ["spot", "A-1", "eu_west.2"])
def test_usual_names_are_accepted(name: str) -> None:
    assert pool_config.parse(name, {"engine": "local"})[0].name == name
