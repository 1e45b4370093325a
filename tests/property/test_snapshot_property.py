"""However reads, the freeze and the owner's next step interleave, a reader gets the state of the step or nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.worker.transport.snapshot import ChunkReleased, Snapshot


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    readers=st.integers(1, 4),
    chunk_bytes=st.integers(1, 20),
    moves=st.lists(st.integers(0, 9), max_size=120),
    freeze_at=st.integers(0, 120),
)
def test_reader_always_gets_the_state_of_the_step(sizes, readers, chunk_bytes, moves, freeze_at):
    truth = [np.arange(size, dtype=np.uint8) + 1 for size in sizes]
    live = [buffer.copy() for buffer in truth]
    snapshot = Snapshot(0, b"", live, readers=readers)
    plans = {
        f"reader{number}": iter(
            [(i, at, min(at + chunk_bytes, size)) for i, size in enumerate(sizes) for at in range(0, size, chunk_bytes)]
        )
        for number in range(readers)
    }
    dead: set[str] = set()

    def move(number: int) -> None:
        name = f"reader{number % readers}"
        if number >= 8 and name not in dead:
            dead.add(name)
            snapshot.done(name)
        if name in dead:
            return
        step = next(plans[name], None)
        if step is None:
            snapshot.done(name)
            return
        index, start, stop = step
        assert snapshot.chunk(name, index, start, stop) == truth[index][start:stop].tobytes()

    for turn, number in enumerate([*moves, *[0, 1, 2, 3] * 201]):
        if turn == freeze_at:
            snapshot.freeze()
            for buffer in live:
                buffer[:] = 0
        move(number)
    assert snapshot.finished

    if freeze_at < len(moves) + 804:
        for index, size in enumerate(sizes):
            if size:
                try:
                    stray = snapshot.chunk("stray", index, 0, size)
                except ChunkReleased:
                    continue
                assert stray == truth[index].tobytes()
