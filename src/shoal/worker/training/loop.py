"""Training loop under a run, independent of the framework: one step after another, each committed by all members.

The life of a step on one member:

1. *World.* `session.next_step` blocks until this member is in a world and holds the state of a step, and returns the
   number of the step to train. Joins, departures, stops and restores all happen inside that call, between two steps.
2. *Share.* The feed yields this member's share of the global batch: which samples is a pure function of the step, the
   world and the reports of earlier steps, so no message is needed. The share is cut into micro-batches that fit into
   memory. A member that still catches up has an empty share and takes part with weight 0.
3. *Compute.* The script's loop body runs once per micro-batch: forward, then `run.backward`, which adds the weighted
   gradients. Random numbers are seeded from the step and the position in it, so a repeated step gives the same result.
4. *Exchange.* With the last micro-batch the gradients are all-reduced, and a `StepReport` is all-gathered beside them.
   The reports tell every member the same facts: the total weight to divide by, the times of the previous step (from
   which shares are balanced), the world each member is prepared to enter next, and whether to stop. Because all members
   decide from the same reports, they decide alike without asking anyone.
5. *Commit.* `begin_commit` asks the session whether the gradient may be applied: not if the world broke meanwhile, and
   not while this member's lease is in doubt. Then the optimizer steps and the step counts.

Nothing is applied twice. A failure before the commit leaves the parameters untouched: the script's `optimizer.step`
does nothing, what else the step changed (running statistics, random generators) is rolled back at the top of the loop,
and the step is given out again in the next world. A failure after the commit finds some members one step ahead: the
next world starts from the highest committed step, and members behind it copy the state from one that has it instead of
applying the gradient themselves. From `begin_exchange`, when its own part is sent, until the exchange has failed or the
step is committed, a member reports no step to the coordinator, since the answer would depend on the moment. A member
that has the sum applies it even if the world breaks before: a peer that applied it may have left its loop and ended.

Failures, in short:

- A peer dies or hangs during the exchange: `session.fail` breaks the world, the generator stops giving out the step's
  micro-batches, and `next_step` waits for another world.
- This member runs out of memory: the feed halves its micro-batches and the step is `discarded` and repeated. If some
  gradients were already sent, the world is broken too, so that all members repeat it.
- Members disagree (steps, shares, learning rates, tensors): `MembersDiverged`. It is a defect of the script or of Shoal
  and is never ignored, because training on would silently produce a different model on each member. Now and then,
  and after the last step, they compare their parameters too (`state_check`): `StateDiverged`.
- The script leaves the loop early (`break`, `return`): training ends at that step for all members. The session tells
  the coordinator, and the other members' loops end when they have committed the same step (`session.ends_at`).
- The script raises: nothing is reported as done. The process ends, and the coordinator restarts it or not.

A framework's trainer subclasses `Loop` and adds how gradients are computed, summed and applied.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from shoal.core import step_report
from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.nouns import counted
from shoal.core.state_check import TensorDigest
from shoal.core.world import World
from shoal.errors import MembersDiverged, OutOfMemory, SharesOutOfBounds
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Exchange, GatherWork
from shoal.worker.data.feed import Adjustment, Feed, IndexedFeed
from shoal.worker.session.session import Session
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.loop_exit import left_on_purpose
from shoal.worker.training.loss_monitor import LossMonitor
from shoal.worker.training.metrics import finite_metrics
from shoal.worker.training.noise_sampling import NoiseSampler
from shoal.worker.training.slowdown import slowdown_for
from shoal.worker.training.state_check import StateCheck
from shoal.worker.training.step import Step
from shoal.worker.training.step_timing import StepTimer
from shoal.worker.training.training_state import TrainingState
from shoal.worker.transport.exchange_broken import ExchangeBroken, ExchangeDisagreement

# A restart costs more than a repeated step, so micro-batches shrink by more.
SMALLER_AFTER_RESTART = 4
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


class Loop(ABC):
    """Runs the steps of one training loop; a step is given out until all members have committed it.

    `current` is the step in progress, or the last one between steps; None before the first. Set `closing` before you
    close the generator of `train` yourself, so that this is not taken for an exception.
    """

    def __init__(self, session: Session | StandaloneSession, training_state: TrainingState) -> None:
        self.feed: Feed | None = None
        self.current: Step | None = None
        self.auto: AutoBatch | None = None
        self.metrics: dict[str, Any] = {}
        self.looping = self.closing = False
        self.noise_sampler = NoiseSampler(session.settings.noise_every_steps)
        self.timer = StepTimer(self.noise_sampler.noise)
        self._session, self._training_state = session, training_state
        self._previous: Step | None = None
        self._world_seen = 0
        self._loss: float | None = None
        self._loss_monitor = LossMonitor(session)
        self._slowdown = slowdown_for(session.me, session.settings.emulate)
        self._disagreed_at: int | None = None
        self._state_check = StateCheck(session, self._tensor_digests, self._arithmetic)
        session.status = self._status

    @property
    def committed(self) -> bool:
        return self.current is not None and self.current.committed

    # --- hooks of the framework's trainer

    @abstractmethod
    def _start_loop(self, feed: Feed) -> bool:
        """Set up what the loop needs; return whether everything that is trained is on the CPU."""

    @abstractmethod
    def _undo_uncommitted(self) -> None:
        """Roll back what an uncommitted step changed."""

    @abstractmethod
    def _zero_buffers(self) -> list[ZeroBuffer] | None:
        """Return what a catching-up member exchanges in place of gradients, None if that is not known yet."""

    @abstractmethod
    def _seed(self, seed: int) -> None:
        """Seed every random generator."""

    @abstractmethod
    def _check_micro_batch(self, current: Step, number: int) -> None:
        """Raise if the loop body skipped `backward` or `step` for this micro-batch."""

    def _begin_body(self, current: Step) -> None:  # noqa: B027
        """Prepare for one run of the loop body; by default nothing."""

    def _end_loop(self) -> None:  # noqa: B027
        """Release what `_start_loop` took; by default nothing."""

    def _tensor_digests(self) -> Iterable[TensorDigest]:
        """Return the digests of all tensors that must be equal on all members between two steps."""
        return ()

    def _arithmetic(self) -> str:
        """Return a text that is equal where the framework gives equal bits on equal processors."""
        return ""

    # --- the loop

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's batches until all members have committed the last step."""
        session = self._session
        on_cpu = self._start_loop(feed)
        self._training_state.zero_buffers, self._training_state.is_last_step = self._zero_buffers, self._is_last_step
        feed.start()
        session.begin(identity, self._training_state, on_cpu=on_cpu)
        session.on_uncaught = self._on_uncaught
        over = False
        self.looping = True
        try:
            while not over:
                # First, because peers may copy our state when the next world is entered.
                self._undo_uncommitted()
                step = session.next_step()
                feed.balancer.min_members = session.min_members
                limit_micro_batch(feed, session)
                self._training_state.at_boundary(step)
                if feed.ended(step) or session.ends_at(step):
                    self._observe_last_loss()
                    over = session.finish(self._compare_at_end)
                    if over:
                        self._training_state.at_end(step)
                    continue
                yield from self._run_step(feed, step, seed)
            over = True
        finally:
            self.looping = False
            if not over and sys.exc_info()[0] is GeneratorExit:
                self._on_closed(on_purpose=self.closing or left_on_purpose())
            self._end_loop()
            feed.close()

    def _compare_at_end(self, exchange: Exchange) -> None:
        world = self._session.world
        if world is not None:
            self._state_check.compare_at_end(world, exchange)

    def _on_closed(self, *, on_purpose: bool) -> None:
        """Report that the script left the loop, or leave that open until it is known whether it failed."""
        session = self._session
        if not on_purpose:
            session.suspend_loop(self._checkpoint_end)
            return
        session.leave_loop()
        self._checkpoint_end()

    def _checkpoint_end(self) -> None:
        if self.committed:
            self._training_state.at_end(self._session.step or 0)

    def _run_step(self, feed: Feed, number: int, seed: int) -> Iterator[Any]:
        """Yield the micro-batches of one step; stop early if the world breaks or memory runs out."""
        session = self._session
        world, exchange = session.world, session.exchange
        if world is None or exchange is None:
            return
        self._warn_of_bounds(feed, number, world)
        catching_up = self._catching_up(world, number)
        digest = self._state_check.digest(number, world, catching_up)
        began = time.perf_counter()
        session.set_phase("data")
        if self._slowdown is not None:
            self._slowdown.begin(number)
        micro_batches = feed.micro_batches(number, world, session.rank, catching_up)
        current = Step(
            number,
            feed.cursor(number).epoch,
            micro_batches,
            feed.global_batch_size(number),
            exchange,
            world,
            feed.units,
            catching_up,
            first=not self.timer.commits,
            shard_range=feed.shard_range,
            common_seed=step_seed(seed, number, -1),
            digest=digest,
        )
        if self.current is None or not self.current.discarded:
            self._previous = self.current
        self.current = current
        self._seed(step_seed(seed, number, session.rank))
        current.data_s = time.perf_counter() - began
        session.set_phase("compute")
        current.started_at = time.perf_counter()
        for index, micro_batch in enumerate(micro_batches):
            current.index = index
            if current.shard is not None:
                self._seed(step_seed(seed, number, current.shard))
            self._begin_body(current)
            yield micro_batch.take()
            if session.broken or current.discarded:
                return
            self._check_micro_batch(current, index)

    def _catching_up(self, world: World, number: int) -> tuple[int, ...]:
        """Return the ranks without a share: newcomers in their first step here, and while they are catching up."""
        if self._world_seen != world.number:
            self._world_seen = world.number
            return world.catching_up
        before = self.current
        if before is not None and before.discarded and before.number == number:
            return before.catching_up
        if before is None or before.number != number - 1:
            return ()
        return tuple(rank for rank, report in enumerate(before.reports) if report.flags & step_report.CATCHING_UP)

    def _is_last_step(self, reports: tuple[step_report.StepReport, ...]) -> bool:
        number = max(report.step for report in reports)
        return self.feed is None or self.feed.ended(number + 1)

    # --- step reports

    def _send_report(self, current: Step) -> GatherWork:
        return current.exchange.gather(step_report.encode(self._report(current)))

    def _receive_reports(self, current: Step, gathered: GatherWork) -> float:
        """Block for the reports of all members and check them; return the weight of the whole global batch."""
        current.reports = step_report.decode(gathered.result())
        self._check_reports(current)
        self._session.on_step_reports(current.reports)
        return sum(report.weight for report in current.reports)

    def _report(self, current: Step) -> step_report.StepReport:
        previous = self._previous
        assert self.feed is not None
        return step_report.StepReport(
            step=current.number,
            samples=current.samples,
            weight=current.weight,
            loss=self._previous_loss(),
            compute_s=previous.compute_s if previous else 0.0,
            data_s=previous.data_s if previous else 0.0,
            wait_s=previous.wait_s if previous else 0.0,
            measured=previous.measured_units if previous else 0,
            micro=self.feed.micro_batch_size or 0,
            **self.noise_sampler.report_fields(previous, current),
            prepared=self._session.prepared_world(),
            flags=self._session.flags,
            more=self.feed.has_more(),
            rate=self._rate(),
            checksum=current.digest.checksum if current.digest is not None else 0,
            checksum_s=current.digest.seconds if current.digest is not None else 0.0,
        )

    def _rate(self) -> float:
        """Return the sum of the learning rates if members must agree on it, else 0."""
        return 0.0

    def _previous_loss(self) -> float:
        """Return our part of the previous step's mean loss; by now reading it does not wait for a device."""
        previous = self._previous
        if previous is None or not previous.committed:
            return 0.0
        total = sum(report.weight for report in previous.reports)
        return float(previous.loss) / total if total else 0.0

    def _observe_last_loss(self) -> None:
        """Check this member's loss of the last step, which no report will carry."""
        current = self.current
        if current is not None and current.committed and current.weight:
            self._loss_monitor.observe(
                current.number, float(current.loss) / current.weight, send=self._session.is_writer
            )

    def _check_reports(self, current: Step) -> None:
        """Raise MembersDiverged if the reports contradict each other."""
        reports = current.reports
        reason = step_report.step_mismatch(reports)
        if reason:
            raise MembersDiverged("members are not at the same step", where=f"world {self._world_seen}", why=reason)
        rates = step_report.learning_rate_mismatch(reports)
        if rates:
            raise MembersDiverged(
                "members have different learning rates",
                where=f"step {current.number}",
                why=f"{rates}; the schedule depends on something that differs between members",
                do="let it follow run.step, or a score on data that every member reads, not the loss of a share",
            )
        samples = sum(report.samples for report in reports)
        if isinstance(self.feed, IndexedFeed) and samples != self.feed.global_batch_size(current.number):
            shares = ", ".join(str(report.samples) for report in reports)
            raise MembersDiverged(
                f"members disagree on their shares of step {current.number}",
                where=f"world {self._world_seen}",
                why=f"shares of {shares} sum to {samples}, not {self.feed.global_batch_size(current.number)} samples",
                do="this is a defect of Shoal: please report it with the output of shoal why",
            )
        if self._previous is not None and self._previous.committed:
            self._loss = sum(report.loss for report in reports)
            self._loss_monitor.observe(self._previous.number, self._loss, send=self._session.is_writer)

    def _on_exchange_broken(self, current: Step, broken: ExchangeBroken) -> None:
        """Break the world, which repeats the step; raise MembersDiverged if members disagree in it a second time."""
        self._session.fail(broken)
        if isinstance(broken, ExchangeDisagreement):
            if self._disagreed_at == current.number:
                raise MembersDiverged(
                    "members do not exchange the same tensors",
                    where=f"step {current.number}",
                    why=broken.cause,
                    do="freeze, unfreeze and add parameters on all members alike, in the same step",
                ) from broken
            self._disagreed_at = current.number

    # --- commit

    def _begin_exchange(self) -> None:
        """Note that this member's part is sent, and that it waits for those of the others."""
        self._session.set_phase("exchange")
        self._session.begin_exchange()

    def _begin_commit(self) -> bool:
        """Return whether the gradient may be applied; if so, pending snapshots are copied first."""
        self._training_state.before_change()
        return self._session.begin_commit()

    def _commit(self, current: Step) -> None:
        """Count the step, whose gradient has just been applied."""
        assert self.feed is not None
        self.noise_sampler.observe(current.reports)
        before = self.auto.progress if self.auto is not None else 0.0
        adjustments = self.feed.on_commit(current.number, current.world, current.reports)
        current.progress = int(self.auto.progress) - int(before) if self.auto is not None else 1
        self._session.commit()
        current.committed = True
        self.metrics.update(current.metrics)
        self.timer.commit(current, self._session.rank, self.feed.balancer, time.monotonic())
        self._report_adjustments(adjustments)

    def _warn_of_bounds(self, feed: Feed, step: int, world: World) -> None:
        """Say before a step which bounds of shares it cannot keep."""
        adjustments = feed.overruled_bounds(step, world)
        if self._session.is_writer:
            do = "add members, or change shares.max, shares.min, shares.machines or the batch"
            for adjustment in adjustments:
                sys.stderr.write(f"{SharesOutOfBounds(adjustment.reason, do=do).as_warning()}\n")
        self._report_adjustments(adjustments)

    def _report_adjustments(self, adjustments: Iterable[Adjustment]) -> None:
        """Report adjustments to the coordinator."""
        for adjustment in adjustments:
            self._session.report_adjustment(
                adjustment.step,
                adjustment.what,
                adjustment.values,
                adjustment.reason,
                send=self._session.is_writer,
            )

    # --- out of memory

    @property
    def micro_batch_samples(self) -> int:
        """Samples of the micro-batch that is being computed; 0 outside a step."""
        current = self.current
        inside = current is not None and current.started_at and not current.committed and not current.discarded
        return current.micro_batches[current.index].samples if current is not None and inside else 0

    def on_out_of_memory(self, error: BaseException) -> None:
        """Repeat the step with smaller micro-batches; raise the error if they cannot get smaller."""
        current, feed, session = self.current, self.feed, self._session
        samples = self.micro_batch_samples
        if current is None or feed is None or not feed.halve_micro_batch(samples):
            raise error
        current.discarded = True
        repeats = f"repeats step {current.number}"
        report_smaller_micro_batches(session, current.number, samples, feed.micro_batch_size, repeats)

    def _on_uncaught(self, error: BaseException) -> None:
        report_if_out_of_memory(
            self._session, self.current.number if self.current else 0, self.micro_batch_samples, error
        )

    # --- status

    def _status(self) -> dict[str, Any]:
        """Return the fields of a heartbeat; called by the heartbeat's thread."""
        current, feed = self.current, self.feed
        return {
            "epoch": current.epoch if current is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": current.samples if current is not None else 0,
            "loss": self._loss,
            "metrics": finite_metrics(self.metrics),
            **self.timer.status(),
        }


def step_seed(seed: int, step: int, position: int) -> int:
    """Return a seed that depends on the step and the position in it alone, so that a repeated step is the same."""
    return hash((seed, step, position)) & 0x7FFF_FFFF_FFFF_FFFF


def mentions_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of unspecific type says that memory ran out."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in OUT_OF_MEMORY)
    )


def limit_micro_batch(feed: Feed, session: Any) -> None:
    """Compute no more samples at once than what the coordinator remembers of this member's memory."""
    if session.micro_batch and isinstance(feed, IndexedFeed):
        feed.limit_micro_batch(session.micro_batch)


def report_smaller_micro_batches(session: Any, step: int, samples: int, limit: int | None, repeats: str) -> None:
    """Report that this member computes smaller micro-batches from now on, because memory ran out."""
    reason = (
        f"{session.me} ran out of memory with {counted(samples, 'sample')} at once; it now computes at most {limit}"
    )
    sys.stderr.write(f"shoal: {reason}, and {repeats}\n")
    session.report_adjustment(step, "memory", {session.me: limit or 0}, reason)


def report_if_out_of_memory(session: Any, step: int, samples: int, error: BaseException) -> None:
    """Report a script that dies because its micro-batch does not fit, so that its restart computes smaller ones.

    `samples` is the size of the micro-batch that was being computed, 0 if there was none.
    """
    if not samples or not mentions_out_of_memory(error):
        return
    limit = max(1, samples // SMALLER_AFTER_RESTART)
    at_once = counted(samples, "sample")
    reason = f"{session.me} ran out of memory with {at_once} at once; it starts again with at most {limit}"
    if samples > 1:
        session.report_adjustment(step, "memory", {session.me: limit}, reason)
    note = OutOfMemory(
        f"memory ran out with {counted(samples, 'sample')} at once, outside the model's forward pass and run.backward",
        where=f"step {step}",
        why="there Shoal would repeat the step in smaller micro-batches; here the error ends the script",
        do="compute the loss in the model's forward, or pass micro= to run.batches",
    )
    error.add_note(str(note))
