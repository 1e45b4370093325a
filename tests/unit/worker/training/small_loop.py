"""A loop without a framework: its state is one number, to which every committed step adds the sum of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from shoal.core.data.sample_order import Cursor
from shoal.core.shares.balancer import ShareBalancer, parse
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.worker.data.feed import Adjustment, MicroBatch
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.loop import Loop
from shoal.worker.training.step import Step
from shoal.worker.training.training_state import StateCodec, TrainingState


class SmallFeed:
    """Five steps of one batch each, in micro-batches of `micro_batch_size` samples."""

    def __init__(self, total: int = 5, samples: int = 4) -> None:
        self.total: int | None = total
        self.balancer, self.units, self.shard_range = ShareBalancer(parse("equal")), samples, None
        self.micro_batch_size: int | None = samples
        self._samples = samples
        self.open = False
        self.overruled = ""

    def halve_micro_batch(self, samples: int) -> bool:
        self.micro_batch_size = samples // 2
        return samples > 1

    def ended(self, step: int) -> bool:
        return step >= (self.total or 0)

    def cursor(self, step: int) -> Cursor:
        return Cursor(0, step)

    def global_batch_size(self, step: int) -> int:
        return self._samples

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]:
        size = self.micro_batch_size or self._samples
        return [MicroBatch(step, size) for _ in range(self._samples // size)]

    def has_more(self) -> bool:
        return True

    def overruled_bounds(self, step: int, world: World) -> list[Adjustment]:
        return [Adjustment(step, "bounds", {}, self.overruled)] if self.overruled and step == 0 else []

    def on_commit(self, step: int, world: World, reports: Sequence[StepReport]) -> list[Adjustment]:
        return []

    def start(self) -> None:
        self.open = True

    def close(self) -> None:
        self.open = False


class SmallLoop(Loop):
    """Training without gradients; call `finish_micro_batch` in the loop's body, as a script calls `run.backward`."""

    def __init__(self, session: Any, feed: SmallFeed, directory: str) -> None:
        codec = StateCodec(lambda _parts: (b"", []), lambda _parts, _header, _buffers: None)
        super().__init__(session, TrainingState(session, "r", directory, codec))
        self.feed: SmallFeed = feed
        self.seeds: list[int] = []
        self.undone = 0

    def _start_loop(self, feed: Any) -> bool:
        return True

    def _undo_uncommitted(self) -> None:
        self.undone += self.current is not None and not self.current.committed

    def _zero_buffers(self) -> None:
        return None

    def _seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def _check_micro_batch(self, current: Step, number: int) -> None:
        if current.backwards <= number:
            raise RuntimeError("the loop body did nothing")

    def finish_micro_batch(self) -> None:
        current = self.current
        assert current is not None
        current.backwards += 1
        current.weight += current.micro_batches[current.index].samples
        if current.on_last_micro_batch:
            self._receive_reports(current, self._send_report(current))
            if self._begin_commit():
                self._commit(current)


def small_loop(directory: str, session: Any = None, total: int = 5) -> SmallLoop:
    return SmallLoop(session or StandaloneSession(), SmallFeed(total), directory)
