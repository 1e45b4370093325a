from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.worker.data.sample_signature import signature, signatures, stream_signatures

NOISE = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("sample", "other"),
    [
        (3, 4),
        ("a", "b"),
        ({"x": 1}, {"x": 2}),
        ((np.zeros(3), 1), (np.zeros(3), 2)),
        (np.array([1, 2]), np.array([2, 1])),
        (torch.tensor(5), torch.tensor(6)),
        (torch.ones(4), torch.ones(5)),
        (np.full(100, 1.0), np.full(100, 1.5)),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    ],
    ids=str,
)
def test_different_samples_have_different_signatures(sample: Any, other: Any) -> None:
    assert signature(sample) == signature(sample)
    assert signature(sample) != signature(other)


def test_rounding_of_another_machine_does_not_count() -> None:
    image = NOISE.normal(size=(3, 32, 32)).astype(np.float32)
    assert signature((image, 1)) == signature((image * np.float32(1 + 1e-6), 1))


def test_tensor_and_array_of_the_same_values_are_alike() -> None:
    values = NOISE.normal(size=20).astype(np.float32)
    assert signature(torch.from_numpy(values)) == signature(values)


def test_noise_of_one_distribution_is_told_apart() -> None:
    images = NOISE.normal(size=(50, 3, 32, 32)).astype(np.float32)
    assert len({signature(image) for image in images}) == 50


def test_object_without_numbers_counts_by_its_type() -> None:
    assert signature(object()) == signature(object())
    assert signature(object()) != signature(ValueError())


@pytest.mark.parametrize(("count", "read"), [(1, [0]), (3, [0, 1, 2]), (100, [0, 33, 66, 99])])
def test_samples_from_all_of_the_data_are_compared(count: int, read: list[int]) -> None:
    text = signatures(lambda position: (1000 + position, position), count)
    assert [line.split()[1] for line in text.split(", ")] == [str(1000 + position) for position in read]


def test_sample_that_differs_from_itself_is_left_out_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    def read(position: int) -> tuple[int, Any]:
        return position, NOISE.normal(size=20) if position else 1.0

    assert signatures(read, 100).startswith("sample 0 ")
    assert "sample" not in signatures(lambda position: (position, NOISE.normal(size=20)), 1)
    text = capsys.readouterr().err
    assert "warning[S352] sample 33 differs each time it is read" in text


def test_first_and_last_shard_of_a_stream_are_compared() -> None:
    shards = [[number, number + 1] for number in range(5)]
    assert [line.split()[1] for line in stream_signatures(shards.__getitem__, 5).split(", ")] == ["0", "4"]
    assert stream_signatures(shards.__getitem__, 5) != stream_signatures([*shards[:4], [9, 9]].__getitem__, 5)


def test_stream_that_begins_differently_each_time_gets_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream_signatures(lambda _shard: [NOISE.normal(size=20)], 1) == "random"
    assert "warning[S352] shard 0 of the stream begins with other samples" in capsys.readouterr().err
