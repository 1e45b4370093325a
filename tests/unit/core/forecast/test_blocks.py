from __future__ import annotations

from shoal.core.forecast.blocks import CAPACITY, Block, BlockLog


def log_of(*observations: tuple[float, int]) -> BlockLog:
    log = BlockLog()
    for at, step in observations:
        log.observe(at, step)
    return log


def test_block_ends_with_the_first_step_after_its_time() -> None:
    log = log_of((0.0, 5), (0.5, 7), (1.2, 9), (1.9, 9), (5.0, 9), (5.5, 10))
    assert log.blocks == [Block(4, 1.2), Block(1, 5.5 - 1.2)]


def test_time_in_which_steps_were_taken_back_is_in_no_block() -> None:
    log = log_of((0.0, 10), (1.0, 12), (9.0, 4), (10.0, 6))
    assert log.blocks == [Block(2, 1.0), Block(2, 1.0)]


def test_full_log_merges_neighbours_and_loses_nothing() -> None:
    log = log_of(*((float(at), 3 * at) for at in range(10_001)))
    assert CAPACITY // 2 <= len(log.blocks) < CAPACITY
    covered_s = sum(block.seconds for block in log.blocks)
    assert 10_000 - 2 * log.blocks[0].seconds < covered_s <= 10_000
    assert {block.step_s for block in log.blocks} == {1 / 3}
