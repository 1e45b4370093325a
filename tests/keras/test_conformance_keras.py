"""Keras passes the conformance suite on both of its backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing.conformance import KERAS_TENSORFLOW, KERAS_TORCH, SCENARIOS, FrameworkScript, Scenario

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(600)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("backend", [KERAS_TENSORFLOW, KERAS_TORCH], ids=lambda backend: backend.name.replace(" ", "-"))
def test_keras_passes_the_scenario(backend: FrameworkScript, scenario: Scenario, tmp_path: Path) -> None:
    if backend.missing:
        pytest.skip(f"{backend.name} needs {', '.join(backend.missing)}")
    scenario(backend, tmp_path)
