"""A member's part in a run, as its main thread sees it: enter worlds, cross into the next one, leave when told.

The training loop calls `next_step` between steps; everything else happens inside it. The package docstring has the
theory: states, invariants, threads and the lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from shoal import exit_codes
from shoal.core import step_report
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.errors import ModelMismatch, ShoalError
from shoal.wire import member_messages as messages
from shoal.worker.collectives.catch_up import CatchUpExchange
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.collectives.ring import Ring
from shoal.worker.session.member_worlds import MemberWorlds, StateProvider
from shoal.worker.session.pending_worlds import Connect, PendingWorld, abandon
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.snapshot import Snapshot

# How long a member that leaves waits for the others to cross into the next world.
FAREWELL_S = 5.0
# How long the only holder of the state waits outside a world for a member to give it to.
HAND_OVER_S = 2.0
# How long an exception that left the loop may take to reach the top of the script before it counts as caught.
UNWIND_S = 30.0
# A source offers its state at its next step boundary, and a step may be long. The coordinator watches the source: if it
# hangs or is lost, the world is dissolved and this wait cancelled.
OFFER_S = 24 * 3600.0
# What loading a state raises if it was captured from other objects.
_MISFIT = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)


class MemberExit(SystemExit):
    """This member's part in the run has ended; it passes through the user's loop and ends the process."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code)
        self.reason = reason


class Session(MemberWorlds):
    """A member of a run that has a coordinator; all methods are for the main thread."""

    # --- called by the training loop

    def use_exchange(self, build: Connect) -> None:
        """Connect worlds with `build` instead of the built-in ring."""
        self._pending_worlds.build = build

    def begin(self, fingerprint: str, training_state: StateProvider, on_cpu: bool = True) -> None:
        """Report that the model is built and ask to be admitted; the agent's speed estimate holds for CPUs only."""
        self._resolve_suspended()
        with self._changed:
            self._fingerprint, self._state, self._ready = fingerprint, training_state, True
            self._speed = self.environment.speed if on_cpu else 0.0
            self._send(self._readiness())
        self.set_phase("waiting")

    @property
    def broken(self) -> bool:
        """Whether the current world is broken, and with it the present step: it will not be applied."""
        return self._broken and not self._undecided

    @property
    def size(self) -> int:
        """The number of members in the current world."""
        return self.world.size if self.world is not None else 1

    @property
    def is_writer(self) -> bool:
        """Whether this member writes the checkpoints of its world."""
        return self.rank == 0

    @property
    def flags(self) -> int:
        """The flags of this member's next step report."""
        return step_report.STOP if self._stop is not None else 0

    def next_step(self) -> int:
        """Block until this member is in a world and holds its state; return the next step."""
        with self._changed:
            self._decide_step()
        while True:
            if self._error is None and self.step is not None and self._is_at_end():
                return self.step
            self._raise_if_over()
            if self.world is not None and not self._broken:
                if self._agreed_world is not None:
                    self._cross(self._agreed_world)
                    continue
                if self._stop_agreed:
                    self._stop_at_boundary()
                if self.step is not None:
                    return self.step
            self._recover()

    def prepared_world(self) -> int:
        """Return the number of the planned world that could be entered after this step, 0 for none.

        Once returned, it is kept until the reports of the step have shown whether all members go there.
        """
        with self._changed:
            self._announced = self._prepared
            return self._announced.number if self._announced is not None else 0

    def on_step_reports(self, reports: tuple[StepReport, ...]) -> None:
        """Note what the reports of a step agree on: a change of world, or a stop; it takes effect after the commit."""
        last = self._state is not None and self._state.is_last_step(reports)
        with self._changed:
            self._agreed_world = None if last else step_report.agreed_world(reports)
            self._stop_agreed = any(report.flags & step_report.STOP for report in reports)
            if self._agreed_world is None and self._announced is not self._prepared:
                abandon(self._announced)
                self._announced = None

    def begin_exchange(self) -> None:
        """Note that this member's part of the step is sent: peers may commit the step from now on, and end.

        So nothing is reported before the exchange has failed (`fail`) or the sum was applied (`commit`): a member that
        has the sum commits the step even if its world breaks meanwhile. A world of one has no peers.
        """
        with self._changed:
            self._undecided = not self._broken and self.size > 1

    def begin_commit(self) -> bool:
        """Return whether the gradient of this step may be applied; if so, nothing is reported until `commit`."""
        self._wait_for_lease()
        with self._changed:
            if self.broken or self.world is None:
                return False
            self._applying, self._undecided = True, False
        self.before_change()
        return True

    def before_change(self) -> None:
        """Copy what joiners have yet to read of the state, because it is about to change."""
        if self._offered is not None:
            self._offered.freeze()
            self._offered = None

    def commit(self) -> None:
        """Count the step: its gradient was applied."""
        with self._changed:
            assert self.step is not None
            self.step += 1
            self._decide_step()
        retired, self._retired_exchange = self._retired_exchange, None
        if retired is not None:
            retired.close()

    def fail(self, broken: ExchangeBroken) -> None:
        """Break the current world, because the exchange of this step failed; report it if it was broken already."""
        with self._changed:
            self._decide_step()
            self._break_world(broken.suspects, broken.cause)

    def ends_at(self, step: int) -> bool:
        """Return whether training ends at this step, before the last one, because a script has left its loop."""
        return self._end_at is not None and step >= self._end_at

    def forget_state(self) -> None:
        """Drop the state, which differs from that of the others; the next world brings theirs."""
        with self._changed:
            self.step = None

    def finish(self, compare: Callable[[Exchange], None]) -> bool:
        """Return whether every member of this world has committed the last step; if not, call `next_step` again.

        `compare` is called with the exchange when all of them get here; it may raise.
        """
        if self.ends_at(self.step or 0):
            # The member that left its loop answers no barrier; the coordinator sees to it that the others get here.
            self._report_left()
            sys.stderr.write(f"shoal: {self.me}: training ends at step {self.step}: {self.reason}\n")
            return True
        exchange = self.exchange
        self._finishing = True
        try:
            if exchange is not None:
                compare(exchange)
                exchange.barrier()
        except ExchangeBroken as broken:
            self._finishing = False
            self.fail(broken)
            return False
        with self._changed:
            self._done = True
            self._send(messages.DoneMsg(self.step or 0))
        self.set_phase("done")
        return True

    def leave_loop(self) -> None:
        """Report that the script left its loop before the last step: training ends there for all members.

        The exchange stays open until all have completed the step (see `close`); those that wait for the next one are
        told to end by the coordinator.
        """
        self._report_left()
        text = f"its script left the training loop at step {self.step or 0}; training ends there for all members"
        sys.stderr.write(f"shoal: {self.me}: {text}\n")

    def suspend_loop(self, at_end: Callable[[], None]) -> None:
        """Leave open whether the script left its loop or fails: it may be an exception on its way.

        If the script uses the run again, or nothing is heard of an exception for long, it has left the loop. If the
        process ends first, its exit code tells: this session (`close`) or else the coordinator, which keeps the step of
        the last heartbeat of this phase. `at_end` checkpoints the final state then.
        """
        self._suspended = at_end
        self.set_phase(messages.OUTSIDE_THE_LOOP)
        timer = threading.Timer(UNWIND_S, self._resolve_suspended)
        timer.daemon = True
        timer.start()

    def _resolve_suspended(self) -> None:
        """Report that the script left its loop, if that was left open: the exception was caught."""
        suspended, self._suspended = self._suspended, None
        if suspended is not None:
            self.leave_loop()

    def _report_left(self) -> None:
        with self._changed:
            self._undecided = False
            self._finishing = self._done = self._left_loop = True
            self._send(messages.DoneMsg(self.step or 0, early=True))
        self.set_phase("done")

    def close(self) -> None:
        """Close every exchange and the connections to coordinator and peers."""
        suspended, self._suspended = self._suspended, None
        if suspended is not None:
            suspended()
            if _exits_with_code_0():
                self.leave_loop()
        if self._left_loop and self.size > 1:
            self._wait_for_peers()
        with self._changed:
            exchanges = [self.exchange, self._retired_exchange]
            exchanges += [pending.exchange for pending in (self._prepared, self._to_enter) if pending is not None]
        for exchange in exchanges:
            if exchange is not None:
                exchange.close()
        self._uplink.close()
        self.peers.close()

    def _wait_for_peers(self) -> None:
        """Block until all members have completed the step at which this one left its loop.

        If its end broke their world first, they would compute that step again without it, and end with other bits.
        """
        deadline = time.monotonic() + self.settings.hang_timeout_s
        with self._changed, suppress(ShoalError):
            self._wait_until(
                lambda: self._finished or self._stop is not None or time.monotonic() > deadline,
                f"the other members to complete step {self.step}",
            )

    # --- entering a world after a start or a break

    def _recover(self) -> None:
        """Wait for an instruction and carry it out: enter a world, or restore a checkpoint."""
        self.set_phase("waiting")
        with self._changed:
            self._wait_until(self._has_instruction, "the coordinator to form a world")
            pending, self._to_enter = self._to_enter, None
            restore, self._restore_requested = self._restore_requested, False
        self._raise_if_over()
        if restore and self._state is not None:
            self.step = self._state.restore()
            self._send(self._readiness(restored=True))
        elif pending is not None:
            self._enter(pending)

    def _has_instruction(self) -> bool:
        if self._to_enter is not None or self._restore_requested or self._finished:
            return True
        if self._is_at_end():
            return True
        return (self._leaving is not None or self._stop is not None) and self._may_leave()

    def _may_leave(self) -> bool:
        """Return whether this member may leave from outside a world; the only holder of the state waits a while."""
        if self.step is None or self._uplink.down_for_s:
            return True
        waited_s = time.monotonic() - self._phase_since
        return (self._stop is not None and self._leaving is not None) or waited_s > HAND_OVER_S

    def _enter(self, pending: PendingWorld) -> None:
        """Enter a connected world, and receive its state first if this member lacks it; report it if that fails."""
        world, rank = pending.world, pending.world.rank_of(self.me)
        assert rank is not None
        cancelled = threading.Event()
        with self._changed:
            if world.number <= self._ended_up_to:
                abandon(pending)
                return
            self._entering = (pending, cancelled)
        step = 0 if world.fresh else self.step
        pending = self._with_catch_up(pending, rank)
        try:
            if rank in world.sources:
                step = self._receive_state(world, rank, cancelled)
        except ExchangeBroken as broken:
            abandon(pending)
            with self._changed:
                self._entering = None
                if world.number <= self._ended_up_to:
                    self._send(messages.WorldBrokenMsg(world.number, self.step))
                elif not cancelled.is_set():
                    self._report_unconnected(world, pending.after, broken)
            return
        with self._changed:
            self._entering = None
            self.step = step
            if cancelled.is_set():
                abandon(pending)
                self._send(messages.WorldBrokenMsg(world.number, self.step))
                return
            self._adopt(pending, rank)
            if pending.planned:
                self._send(messages.WorldEnteredMsg(world.number, _held_step(self.step)))
        self._offer_state(world, rank)

    def _with_catch_up(self, pending: PendingWorld, rank: int) -> PendingWorld:
        """Let a `CatchUpExchange` take part while the state is on its way, if this rank has no share yet."""
        ring, state = pending.exchange, self._state
        if state is None or not self._may_catch_up or rank not in pending.world.catching_up:
            return pending
        zero_buffers = state.zero_buffers()
        if zero_buffers is None or not isinstance(ring, Ring):
            return pending
        return replace(pending, exchange=CatchUpExchange(ring, zero_buffers, state.is_last_step))

    def _receive_state(self, world: World, rank: int, cancelled: threading.Event) -> int:
        source, limit_s = world.sources[rank], self.settings.hang_timeout_s
        self.set_phase(f"receiving the state of {world.seats[source].member}")
        received = self.peers.fetch_state(world, source, limit_s, cancelled, OFFER_S)
        assert self._state is not None
        try:
            self._state.load(received.header, received.buffers)
        except _MISFIT as error:
            raise ModelMismatch(
                f"the state of the run does not fit into {self.me}",
                where=f"world {world.number}",
                why=f"{type(error).__name__}: {error}",
                do="attach the same objects on every member; what is added in mid-run (add_param_group, a scheduler) "
                "must exist before run.batches on a member that joins later",
            ) from error
        return received.step

    # --- crossing into the next world at a step boundary

    def _cross(self, number: int) -> None:
        """Switch to the world that all members have prepared, or leave if it has no seat for this one."""
        with self._changed:
            pending, self._announced, self._agreed_world = self._announced, None, None
            if self._broken or pending is None or pending.number != number:
                return
            rank = pending.world.rank_of(self.me)
            old = self.exchange
            if rank is not None:
                self._retired_exchange = old
                self._adopt(pending, rank)
                self._send(messages.WorldEnteredMsg(number, _held_step(self.step)))
                early, self._early_proposal = self._early_proposal, None
                if early is not None:
                    self._on_prepare_world(early)
        if rank is None:
            self._leave_after_crossing(old, number)
        else:
            self._offer_state(pending.world, rank)

    def _adopt(self, pending: PendingWorld, rank: int) -> None:
        """Make a pending world the current one."""
        self.world, self.rank, self.exchange = pending.world, rank, pending.exchange
        if rank == 0:
            # The member that was to report an adjustment may be gone; the coordinator ignores what it knows.
            for adjustment in self._adjustments.values():
                self._send(adjustment)
        self._broken, self._agreed_world, self._stop_agreed, self._finishing = False, None, False, False
        self._announced = None
        if self._prepared is not None and self._prepared.after != pending.number:
            if self._prepared is not pending:
                abandon(self._prepared)
            self._prepared = None

    def _offer_state(self, world: World, rank: int) -> None:
        """Let joiners read the state in the background, while this member computes the next step."""
        readers = [world.seats[r].member for r, source in world.sources.items() if source == rank]
        if readers and self._state is not None:
            header, buffers = self._state.capture()
            snapshot = Snapshot(_held_step(self.step), header, buffers, len(readers))
            self.peers.offer_state(world.number, snapshot, readers)
            snapshot.freeze_soon()
            self._offered = snapshot

    # --- leaving

    def _leave_after_crossing(self, old: Exchange | None, number: int) -> None:
        """Stay until the others have crossed into a world without this member, then leave or become a spare."""
        if self._leaving is not None:
            self._send(messages.LeftMsg(self.step, number))
        deadline = time.monotonic() + FAREWELL_S
        while old is not None and time.monotonic() < deadline and getattr(old, "broken", None) is None:
            time.sleep(0.002)
        if self._leaving is not None:
            raise self._exit(exit_codes.RESUMABLE, f"left the run at step {self.step}: {self._leaving[1]}")
        with self._changed:
            # A spare from now on: its state becomes stale, and it waits to be admitted again.
            self.world, self.exchange, self.step = None, None, None
            self._send_hello()

    def _stop_at_boundary(self) -> None:
        """Leave because all members agreed to stop; the writer checkpoints first."""
        stop = self._stop
        if (stop is None or stop.checkpoint) and self.is_writer and self._state is not None:
            self.set_phase("checkpoint")
            self._state.checkpoint_now()
        self._send(messages.LeftMsg(self.step))
        code = stop.exit_code if stop is not None else exit_codes.RESUMABLE
        raise self._exit(code, f"stopped at step {self.step}: {stop.reason if stop else 'the run stops'}")

    def _leave_while_waiting(self) -> None:
        """Leave from outside a world; checkpoint first if this member holds a state and was asked to."""
        stop = self._stop
        if stop is not None and stop.checkpoint and self.step is not None and self._state is not None:
            self._state.checkpoint_now()
        self._send(messages.LeftMsg(self.step))
        why = stop.reason if stop is not None else self._leaving[1] if self._leaving is not None else ""
        code = stop.exit_code if stop is not None else exit_codes.RESUMABLE
        raise self._exit(code, f"left while waiting for a world: {why}")

    def _raise_if_over(self) -> None:
        """Raise if the coordinator rejected this member, the run has finished, or it is time to leave."""
        if self._error is not None:
            raise self._error
        idle = self.world is None or self._broken
        if idle and self._finished:
            raise self._exit(0, "the run has finished")
        if idle and self._to_enter is None and (self._stop or self._leaving) and self._may_leave():
            self._leave_while_waiting()
        if not idle and self._leaving is not None and self._must_leave_alone(self._leaving[0]):
            raise self._exit(exit_codes.RESUMABLE, f"left at step {self.step} without the coordinator's help")

    def _must_leave_alone(self, deadline: float) -> bool:
        return self._uplink.down_for_s > 1.0 or time.monotonic() > deadline

    def _exit(self, exit_code: int, reason: str) -> MemberExit:
        sys.stderr.write(f"shoal: {self.me}: {reason}\n")
        return MemberExit(exit_code, reason)

    def _wait_for_lease(self) -> None:
        """Block while a world of one has no fresh lease: no peer would notice that this member is cut off."""
        if self.size > 1 or self._uplink.may_step_alone(self.settings.lease_s):
            return
        self.set_phase("lease")
        with self._changed:
            self._wait_until(
                lambda: self._broken or self.size > 1 or self._uplink.may_step_alone(self.settings.lease_s),
                "the coordinator to renew the lease",
            )


def _exits_with_code_0() -> bool:
    """Return whether `sys.exit` with code 0 ends this process, as far as that can be seen.

    The warm process runs exit functions while it handles the SystemExit. A cold interpreter has forgotten it by then.
    """
    leaving = sys.exc_info()[1]
    return isinstance(leaving, SystemExit) and leaving.code in (None, 0)


def _held_step(step: int | None) -> int:
    """Return the step whose state this member holds; in a world there always is one."""
    assert step is not None
    return step
