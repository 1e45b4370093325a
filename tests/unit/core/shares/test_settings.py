from __future__ import annotations

import math

import pytest

from shoal.core.shares.settings import ShareSettings, parse
from shoal.errors import BadPlan


def test_settings_are_parsed() -> None:
    assert parse("model") == ShareSettings()
    assert parse("ratio", threshold=0.05, window=20).policy == "ratio"
    assert parse("fixed:3,1").weights == (3.0, 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"text": "modal"},
        {"text": "model:3"},
        {"text": "fixed:"},
        {"text": "model", "threshold": -0.1},
        {"text": "model", "threshold": math.nan},
        {"text": "model", "window": 0},
        {"text": "model", "min": -1},
        {"text": "model", "min": math.inf},
        {"text": "model", "max": 0},
        {"text": "model", "min": 0.5, "max": 0.25},
        {"text": "model", "min": 64, "max": 32},
        {"text": "model", "mode": "sometimes"},
    ],
)
def test_invalid_settings_are_refused_with_a_remedy(settings: dict[str, object]) -> None:
    with pytest.raises(BadPlan) as caught:
        parse(**settings)  # type: ignore[arg-type]
    assert caught.value.do


def test_min_above_max_for_this_batch_is_refused() -> None:
    settings = parse("model", min=16, max=0.1)
    settings.check(1000)
    with pytest.raises(BadPlan) as caught:
        settings.check(100)
    assert "minimum is 16 samples and the maximum 10" in caught.value.why


def test_bounds_are_samples_or_fractions_of_the_batch() -> None:
    assert parse("model", min=8, max=64).bounds(256, 4) == (8, 64)
    assert parse("model", min=0.125, max=0.5).bounds(256, 4) == (32, 128)
    assert parse("model", max=0.5).bounds(256, 1) == (0, 256), "a fraction gives way to the last member"
