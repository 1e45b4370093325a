"""Roles and their requirements."""

from __future__ import annotations

import pytest

import shoal
from shoal.experiment import roles


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("", 0), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("512 MiB", 512 << 20), ("100", 100), ("1TB", 1 << 40), (7, 7)],
)
def test_memory_size_is_parsed(text: int | str, size_bytes: int) -> None:
    assert shoal.Role(memory=text).memory_bytes == size_bytes


def test_role_spec_has_the_requirements_of_each_process() -> None:
    spec = roles.specs({"trainer": shoal.Role("1:8", "1GiB", 4)})["trainer"]
    assert (spec.count, spec.cpus, spec.memory_bytes) == (8, 4, 1 << 30)
