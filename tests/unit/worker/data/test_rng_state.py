from __future__ import annotations

import random

import numpy as np

from shoal.worker.data.rng_state import RngState


def draw() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_seed_decides_what_is_drawn_from_all_generators() -> None:
    with RngState().preserved():
        RngState().seed((1 << 63) + 5)
        first = draw()
        RngState().seed((1 << 63) + 5)
        assert draw() == first
        RngState().seed(6)
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_generators_are_preserved_even_if_the_block_raises() -> None:
    generators = RngState()
    before = generators.state()
    try:
        with generators.preserved():
            draw()
            raise ValueError
    except ValueError:
        pass
    assert generators.same(before, generators.state())


def test_a_draw_from_any_generator_is_noticed() -> None:
    generators = RngState()
    with generators.preserved():
        before = generators.state()
        assert generators.same(before, generators.state())
        np.random.rand()
        assert not generators.same(before, generators.state())
    with generators.preserved():
        before = generators.state()
        random.random()
        assert not generators.same(before, generators.state())
