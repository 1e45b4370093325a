"""The feed of a loop follows the arguments and the sync mode; impossible combinations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shoal.errors import UnsupportedInExactMode, UnsupportedWithLocalSgd, UnusableData
from shoal.torch.data.shard_feed import ShardFeed
from shoal.torch.run import Run
from shoal.worker.data.auto_batch_feed import AutoFeed
from shoal.worker.data.feed import IndexedFeed, StreamFeed
from shoal.worker.data.round_feed import RoundFeed
from shoal.worker.session.standalone import StandaloneSession

DATA = TensorDataset(torch.ones(64, 2))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def a_run(directory: Path, model: torch.nn.Module | None = None, **settings: Any) -> Run:
    session = StandaloneSession()
    session.settings = msgspec.structs.replace(session.settings, **settings)
    run = Run(session, "unit", str(directory))
    model = model or torch.nn.Linear(2, 1)
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run


def feed_of(run: Run) -> Any:
    return run._trainer.feed


@pytest.mark.parametrize(
    ("settings", "options", "kind"),
    [
        ({}, {}, IndexedFeed),
        ({}, {"exact": 4}, ShardFeed),
        ({"exact": 4}, {}, ShardFeed),
        ({"exact": 4}, {"exact": 0}, IndexedFeed),
        ({"batch": "auto"}, {}, AutoFeed),
        ({"sync": "local:2"}, {}, RoundFeed),
    ],
    ids=str,
)
def test_arguments_and_settings_choose_the_feed(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], kind: type
) -> None:
    run = a_run(tmp_path, **settings)
    run.batches(DATA, size=8, **options)
    assert type(feed_of(run)) is kind


def test_stream_has_its_position_in_the_state(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.stream([[1, 2, 3, 4]], size=2)
    assert isinstance(feed_of(run), StreamFeed)
    assert run._training_state.parts["stream"] is feed_of(run)


@pytest.mark.parametrize(
    ("settings", "options", "error"),
    [
        ({"batch": "auto"}, {"exact": 4}, UnsupportedInExactMode),
        ({"sync": "local:2"}, {"exact": 4}, UnsupportedWithLocalSgd),
        ({"sync": "local:2", "batch": "auto"}, {}, UnsupportedWithLocalSgd),
    ],
    ids=str,
)
def test_options_that_exclude_each_other_are_refused(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        a_run(tmp_path, **settings).batches(DATA, size=8, **options)


@pytest.mark.parametrize("data", [DataLoader(DATA), Endless(), iter([1])], ids=lambda data: type(data).__name__)
def test_data_without_an_index_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(UnusableData, match=type(data).__name__):
        a_run(tmp_path).batches(data, size=8)


@pytest.mark.parametrize(("layer", "single"), [(torch.nn.BatchNorm1d(2), False), (torch.nn.LayerNorm(2), True)])
def test_share_of_one_sample_is_avoided_if_batchnorm_cannot_train_on_it(
    tmp_path: Path, layer: torch.nn.Module, single: bool
) -> None:
    run = a_run(tmp_path, torch.nn.Sequential(torch.nn.Linear(2, 2), layer))
    run.batches(DATA, size=8)
    assert feed_of(run).balancer.allow_single_sample is single
