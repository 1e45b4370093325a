"""Ports of scripts that are run unmodified."""

from __future__ import annotations

import json

import pytest

from shoal.core.fleet import launcher_env
from shoal.core.fleet.launcher_env import RankHost
from shoal.errors import BadSettings
from shoal.settings import parse_settings

PLACES = [RankHost("a", "10.0.0.1"), RankHost("a", "10.0.0.1"), RankHost("b", "fd00::1")]


@pytest.mark.parametrize("size", [3, 4, 100])
def test_every_rank_has_its_own_port_in_the_range(size):
    span = range(29400, 29400 + size)
    for restarts in range(20):
        envs = launcher_env.launcher_environments("tf", "run", "salt", PLACES, restarts, 9, span=span)
        workers = json.loads(dict(envs[0])["TF_CONFIG"])["cluster"]["worker"]
        ports = [int(one.rpartition(":")[2]) for one in workers]
        assert len(set(ports)) == 3
        assert set(ports) <= set(span)
        assert workers[2].startswith("[fd00::1]:")
        torchrun = dict(
            launcher_env.launcher_environments("torchrun", "run", "salt", PLACES, restarts, 9, span=span)[0]
        )
        assert int(torchrun["MASTER_PORT"]) in span


def test_port_range_is_rejected_with_gloo():
    with pytest.raises(BadSettings, match="gloo"):
        parse_settings({"ports": "29400-29499", "exchange": "gloo"})
    assert parse_settings({"ports": "29400-29499", "exchange": "ring"}).ports
