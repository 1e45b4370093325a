"""Setting `batch`: what its texts mean for a script's own size."""

from __future__ import annotations

import pytest

from shoal.core.batch.setting import BatchSetting, resolve_batch
from shoal.errors import BadSize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", BatchSetting(64)),
        (" 48 ", BatchSetting(48)),
        ("auto", BatchSetting(64, (16, 1024))),
        ("auto:32:256", BatchSetting(64, (32, 256))),
        ("auto:80:256", BatchSetting(80, (80, 256))),
        ("auto:8:32", BatchSetting(32, (8, 32))),
        ("auto:32:1000000", BatchSetting(64, (32, 10_000))),
    ],
)
def test_text_gives_size_and_bounds(text: str, expected: BatchSetting) -> None:
    assert resolve_batch(text, 64, 10_000) == expected


def test_auto_leaves_every_epoch_a_few_steps() -> None:
    assert resolve_batch("auto", 64, 1000).bounds == (16, 250)
    assert resolve_batch("auto", 64, 100).bounds == (16, 64)


@pytest.mark.parametrize(
    "text", ["0", "-8", "many", "auto:0:8", "auto:32", "auto:32:", "auto:64:32", "1.5", "auto:a:b"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadSize, match="invalid value for batch"):
        resolve_batch(text, 64, 10_000)
