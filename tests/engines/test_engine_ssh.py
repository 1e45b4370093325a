"""Agents on hosts that a real ssh reaches, as an engine starts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.engines.engine import Engine
from shoal.engines.ssh import Ssh
from shoal.testing.engines import SCENARIOS, Site
from tests.engines.ssh_hosts import HUB, SshNetwork, ssh_network, why_not
from tests.engines.ssh_site import SshSite

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(180)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_ssh_does_what_engines_do(scenario: Callable[[Site], None], tmp_path: Path) -> None:
    with ssh_network(tmp_path / "net", "h1", "h2") as network, SshSite(tmp_path, network, "h1*2", "h2*2") as site:
        scenario(site)
