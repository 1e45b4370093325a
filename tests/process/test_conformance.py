"""PyTorch keeps the promises of the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing.conformance import SCENARIOS, TORCH, Scenario

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_torch_conforms(scenario: Scenario, tmp_path: Path) -> None:
    scenario(TORCH, tmp_path)
