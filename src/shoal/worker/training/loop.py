"""The training loop underneath a run, in any framework: it gives out batches, exchanges pulses and commits steps.

A framework's trainer adds how gradients are computed, summed and applied.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from shoal.core import step_report
from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.world import World
from shoal.errors import MembersDiverged
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import GatherWork
from shoal.worker.data.feed import Feed, IndexedFeed
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.metrics import finite
from shoal.worker.training.noise_sampling import NoiseSampler
from shoal.worker.training.slowdown import pace_of
from shoal.worker.training.step import Step
from shoal.worker.training.step_timing import StepTimer
from shoal.worker.training.training_state import TrainingState

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


class Loop(ABC):
    """Does the steps of one run: every step is given out until all members have committed it."""

    def __init__(self, session: Session | StandaloneSession, keeper: TrainingState) -> None:
        self.feed: Feed | None = None
        self.turn: Step | None = None
        self.auto: AutoBatch | None = None
        self.metrics: dict[str, Any] = {}
        self.looping = False
        self.soundings = NoiseSampler(session.settings.noise_every_steps)
        self.meter = StepTimer(self.soundings.noise)
        self._session, self._keeper = session, keeper
        self._last: Step | None = None
        self._world_seen = 0
        self._loss: float | None = None
        self._pace = pace_of(session.me, session.settings.emulate)
        session.status = self._status

    @property
    def committed(self) -> bool:
        return self.turn is not None and self.turn.committed

    # --- what a framework adds

    @abstractmethod
    def _begin(self, feed: Feed) -> bool:
        """The loop begins: set up what it needs. Whether everything that is trained is on the CPU."""

    @abstractmethod
    def _undo_uncommitted(self) -> None:
        """Put everything back that a step changed which did not commit."""

    @abstractmethod
    def _zero_buffers(self) -> list[ZeroBuffer] | None:
        """What a shadow exchanges in our stead; None if that is unknown."""

    @abstractmethod
    def _seed(self, seed: int) -> None:
        """Let all random numbers start anew."""

    @abstractmethod
    def _check_piece(self, turn: Step, number: int) -> None:
        """The loop's body is done with a piece: raise if it did not do what it should."""

    # --- the loop

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's batches until the last step is committed by all."""
        session = self._session
        on_cpu = self._begin(feed)
        self._keeper.zero_buffers, self._keeper.is_last_step = self._zero_buffers, self._is_last_step
        feed.start()
        session.begin(identity, self._keeper, on_cpu=on_cpu)
        over = False
        self.looping = True
        try:
            while not over:
                # First, because others may be given our state when the next world is entered.
                self._undo_uncommitted()
                step = session.next_step()
                self._keeper.at_boundary(step)
                if feed.ended(step):
                    over = session.finish()
                    if over:
                        self._keeper.at_end(step)
                    continue
                yield from self._give_out(feed, step, seed)
            over = True
        finally:
            self.looping = False
            if not over and sys.exc_info()[0] is GeneratorExit:
                session.leave_loop()
                if self.committed:
                    self._keeper.at_end(session.step or 0)
            feed.close()

    def _give_out(self, feed: Feed, step: int, seed: int) -> Iterator[Any]:
        """Give the loop's body its pieces of one step."""
        session = self._session
        world, exchange = session.world, session.exchange
        if world is None or exchange is None:
            return
        began = time.perf_counter()
        session.set_phase("data")
        if self._pace is not None:
            self._pace.begin(step)
        ghosts = self._ghosts(world, step)
        pieces = feed.micro_batches(step, world, session.rank, ghosts)
        turn = Step(
            step,
            feed.cursor(step).epoch,
            pieces,
            feed.global_batch_size(step),
            exchange,
            world,
            feed.units,
            ghosts,
            first=not self.meter.commits,
            held=feed.shard_range,
        )
        if self.turn is None or not self.turn.spoiled:
            self._last = self.turn
        self.turn = turn
        self._seed(seed_of(seed, step, session.rank))
        turn.data_s = time.perf_counter() - began
        session.set_phase("compute")
        turn.given_at = time.perf_counter()
        for number, piece in enumerate(pieces):
            turn.piece = number
            if turn.shard is not None:
                self._seed(seed_of(seed, step, turn.shard))
            yield piece.take()
            if session.broken or turn.spoiled:
                return
            self._check_piece(turn, number)

    def _ghosts(self, world: World, step: int) -> tuple[int, ...]:
        """The ranks without a share: newcomers in their first step here, and as long as they are catching up."""
        if self._world_seen != world.number:
            self._world_seen = world.number
            return world.catching_up
        before = self.turn
        if before is not None and before.spoiled and before.step == step:
            return before.ghosts
        if before is None or before.step != step - 1:
            return ()
        return tuple(rank for rank, p in enumerate(before.everybody) if p.flags & step_report.CATCHING_UP)

    def _is_last_step(self, everybody: tuple[step_report.StepReport, ...]) -> bool:
        step = max(p.step for p in everybody)
        return self.feed is None or self.feed.ended(step + 1)

    # --- the pulse

    def _send_pulse(self, turn: Step) -> GatherWork:
        return turn.exchange.gather(step_report.encode(self._pulse(turn)))

    def _receive_pulses(self, turn: Step, gathered: GatherWork) -> float:
        """Everybody's pulses of this step; returns the weight of the whole global batch."""
        turn.everybody = step_report.decode(gathered.result())
        self._check(turn)
        self._session.on_step_reports(turn.everybody)
        return sum(p.weight for p in turn.everybody)

    def _pulse(self, turn: Step) -> step_report.StepReport:
        last = self._last
        assert self.feed is not None
        return step_report.StepReport(
            step=turn.step,
            samples=turn.samples,
            weight=turn.weight,
            loss=self._last_loss(),
            compute_s=last.compute_s if last else 0.0,
            data_s=last.data_s if last else 0.0,
            wait_s=last.wait_s if last else 0.0,
            measured=last.measured if last else 0,
            micro=self.feed.micro_batch_size or 0,
            **self.soundings.told(last, turn),
            prepared=self._session.prepared_world(),
            flags=self._session.flags,
            more=self.feed.has_more(),
            rate=self._rate(),
        )

    def _rate(self) -> float:
        """The sum of the learning rates, if all members must have the same."""
        return 0.0

    def _last_loss(self) -> float:
        """Our part of the mean loss of the step before; reading it now does not wait for a device."""
        last = self._last
        total = sum(p.weight for p in last.everybody) if last is not None and last.committed else 0.0
        return float(last.loss) / total if last is not None and total else 0.0

    def _check(self, turn: Step) -> None:
        reason = step_report.step_mismatch(turn.everybody)
        if reason:
            raise MembersDiverged("the members are not at the same step", where=f"world {self._world_seen}", why=reason)
        rates = step_report.learning_rate_mismatch(turn.everybody)
        if rates:
            raise MembersDiverged(
                "the members have different learning rates",
                where=f"step {turn.step}",
                why=f"{rates}; a schedule followed something that is not the same on all members",
                do="let it follow run.step, or a score of the model on data that all of them read, not a share's loss",
            )
        dealt = sum(p.samples for p in turn.everybody)
        if isinstance(self.feed, IndexedFeed) and dealt != self.feed.global_batch_size(turn.step):
            shares = ", ".join(str(p.samples) for p in turn.everybody)
            raise MembersDiverged(
                f"the members do not agree on their shares of step {turn.step}",
                where=f"world {self._world_seen}",
                why=f"shares of {shares} make {dealt} of {self.feed.global_batch_size(turn.step)} samples",
                do="this is an error of Shoal: please report it with the output of shoal why",
            )
        if self._last is not None and self._last.committed:
            self._loss = sum(p.loss for p in turn.everybody)

    # --- the commit

    def _may_apply(self) -> bool:
        self._keeper.before_change()
        return self._session.begin_commit()

    def _commit(self, turn: Step) -> None:
        """The step has been applied: it counts."""
        assert self.feed is not None
        self.soundings.learn(turn.everybody)
        before = self.auto.progress if self.auto is not None else 0.0
        decisions = self.feed.on_commit(turn.step, turn.world, turn.everybody)
        turn.progress = int(self.auto.progress) - int(before) if self.auto is not None else 1
        self._session.commit()
        turn.committed = True
        self.metrics.update(turn.logged)
        self.meter.commit(turn, self._session.rank, self.feed.balancer, time.monotonic())
        for one in decisions:
            self._session.report_adjustment(one.step, one.what, one.values, one.reason, send=self._session.is_writer)

    # --- what does not fit into memory

    @property
    def piece_samples(self) -> int:
        """The samples of the piece that is being computed; 0 outside a step."""
        turn = self.turn
        inside = turn is not None and turn.given_at and not turn.committed and not turn.spoiled
        return turn.pieces[turn.piece].samples if turn is not None and inside else 0

    def too_large(self, error: BaseException) -> None:
        """The piece that was given out last does not fit: smaller ones follow. Raises the error if there are none."""
        turn, feed, session = self.turn, self.feed, self._session
        samples = self.piece_samples
        if turn is None or feed is None or not feed.halve_micro_batch(samples):
            raise error
        turn.spoiled = True
        at_most = feed.micro_batch_size
        reason = f"{session.me} ran out of memory with {samples} samples at once; it computes {at_most} at most"
        sys.stderr.write(f"shoal: {reason}, and repeats step {turn.step}\n")
        session.report_adjustment(turn.step, "memory", {session.me: at_most or 0}, reason)

    # --- what beats tell

    def _status(self) -> dict[str, Any]:
        turn, feed = self.turn, self.feed
        return {
            "epoch": turn.epoch if turn is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": turn.samples if turn is not None else 0,
            "loss": self._loss,
            "metrics": finite(self.metrics),
            **self.meter.status(),
        }


def seed_of(seed: int, step: int, place: int) -> int:
    """Random numbers of a step depend on the step and the place in it alone, so that doing it again gives the same."""
    return hash((seed, step, place)) & 0x7FFF_FFFF_FFFF_FFFF


def tells_of_memory(error: BaseException) -> bool:
    """Whether smaller pieces may help, by what an error says: frameworks raise general ones, too."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in OUT_OF_MEMORY)
    )
