"""One member's part in a run: it enters worlds, crosses into the next, and goes when it is told to.

The main thread trains and calls `turn` between steps. The link's thread hears the coordinator, and every world is
connected in a thread of its own, so that training never waits for a connection that somebody else may not make.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

from shoal import exit_codes
from shoal.core import step_report as pulses
from shoal.core.world import World
from shoal.wire import member_messages as messages
from shoal.worker.collectives.catch_up import CatchUpExchange
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.collectives.ring import Ring
from shoal.worker.session.pending_worlds import Connect, PendingWorld, drop
from shoal.worker.session.worlds import MemberWorlds, StateProvider
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.snapshot import Snapshot

FAREWELL_S = 5.0
HAND_OVER_S = 2.0
FOREVER_S = 7 * 24 * 3600.0


class MemberExit(SystemExit):
    """This member's part in the run has ended; it passes through the user's loop and ends the process."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(exit_code)
        self.reason = reason


class Session(MemberWorlds):
    """A member of a run that has a coordinator, as its main thread sees it."""

    # --- what the training loop calls

    def use_exchange(self, build: Connect) -> None:
        """Let gradients travel over something else than our own ring."""
        self._entrances.build = build

    def begin(self, fingerprint: str, keeper: StateProvider, on_cpu: bool = True) -> None:
        """The model is built: ask to be admitted. The agent has an idea of the speed of CPUs only."""
        with self._changed:
            self._fingerprint, self._keeper, self._ready = fingerprint, keeper, True
            self._speed = self.environment.speed if on_cpu else 0.0
            self._say(self._readiness())
        self.set_phase("waiting")

    @property
    def broken(self) -> bool:
        return self._broken

    @property
    def size(self) -> int:
        return self.world.size if self.world is not None else 1

    @property
    def is_writer(self) -> bool:
        """Whether this member writes the checkpoints of its world."""
        return self.rank == 0

    def next_step(self) -> int:
        """Make sure that we are in a world with the state of a step, whatever it takes; the step to train next."""
        while True:
            self._raise_if_over()
            if self.world is not None and not self._broken:
                if self._agreed is not None:
                    self._cross(self._agreed)
                    continue
                if self._stop_agreed:
                    self._obey_stop()
                if self.step is not None:
                    return self.step
            self._recover()

    def prepared_world(self) -> int:
        """The number of the proposed world that could be entered after this step, 0 for none.

        Once announced it is kept until the pulses of the step have told whether all go there.
        """
        with self._changed:
            self._announced = self._prepared
            return self._announced.world.number if self._announced is not None else 0

    @property
    def flags(self) -> int:
        return pulses.STOP if self._stop is not None else 0

    def on_step_reports(self, everybody: tuple[pulses.StepReport, ...]) -> None:
        """Note what the pulses of a step say about its end; it holds once the step is committed."""
        last = self._keeper is not None and self._keeper.is_last_step(everybody)
        with self._changed:
            self._agreed = None if last else pulses.agreed_world(everybody)
            self._stop_agreed = any(p.flags & pulses.STOP for p in everybody)
            if self._agreed is None and self._announced is not self._prepared:
                drop(self._announced)
                self._announced = None

    def begin_commit(self) -> bool:
        """Whether the gradient of this step may be applied; if so, nothing is said about the step before `commit`."""
        self._wait_for_a_fresh_lease()
        with self._changed:
            if self._broken or self.world is None:
                return False
            self._applying = True
        self.before_change()
        return True

    def before_change(self) -> None:
        """The state is about to change: what others have yet to read of it is copied."""
        if self._offered is not None:
            self._offered.freeze()
            self._offered = None

    def commit(self) -> None:
        """The gradient was applied: the step counts."""
        with self._changed:
            assert self.step is not None
            self.step += 1
            self._applying = False
            if self._expelled:
                self._come_anew()
            elif self._broken:
                self._answer()
        retired, self._retired = self._retired, None
        if retired is not None:
            retired.close()

    def fail(self, broken: ExchangeBroken) -> None:
        """The exchange of this step failed."""
        self._break_world(broken.suspects, broken.cause)

    def finish(self) -> bool:
        """Whether every member of this world has committed the last step; if not, take another turn."""
        exchange = self.exchange
        self._finishing = True
        try:
            if exchange is not None:
                exchange.barrier()
        except ExchangeBroken as broken:
            self._finishing = False
            self.fail(broken)
            return False
        with self._changed:
            self._done = True
            self._say(messages.DoneMsg(self.step or 0))
        self.set_phase("done")
        return True

    def leave_loop(self) -> None:
        """The script left its loop before the last step: the others go on without this member."""
        with self._changed:
            self._finishing = self._done = self._quit = True
            self._say(messages.DoneMsg(self.step or 0, early=True))
            if self.exchange is not None:
                self.exchange.abort("its script left the training loop")
        self.set_phase("done")

    def close(self) -> None:
        with self._changed:
            exchanges = [self.exchange, self._retired]
            exchanges += [e.exchange for e in (self._prepared, self._formed) if e is not None]
        for exchange in exchanges:
            if exchange is not None:
                exchange.close()
        self._link.close()
        self.peers.close()

    # --- changing worlds, in the main thread

    def _recover(self) -> None:
        """Wait for a world and enter it; one that cannot be entered is reported, and the next is waited for."""
        self.set_phase("waiting")
        with self._changed:
            self._wait_until(self._something_to_do, "the coordinator to form a world")
            entrance, self._formed = self._formed, None
            restore, self._restore_asked = self._restore_asked, False
        self._raise_if_over()
        if restore and self._keeper is not None:
            self.step = self._keeper.restore()
            self._say(self._readiness(restored=True))
        elif entrance is not None:
            self._enter(entrance)

    def _something_to_do(self) -> bool:
        going = self._leaving is not None or self._stop is not None
        return self._formed is not None or self._restore_asked or self._finished or (going and self._may_go())

    def _may_go(self) -> bool:
        """Whether nobody needs us outside a world: the only holder of the state waits to hand it over."""
        if self.step is None or self._link.down_for_s:
            return True
        waited_s = time.monotonic() - self._phase_since
        return (self._stop is not None and self._leaving is not None) or waited_s > HAND_OVER_S

    def _enter(self, entrance: PendingWorld) -> None:
        world, rank = entrance.world, entrance.world.rank_of(self.me)
        assert rank is not None
        cancelled = threading.Event()
        with self._changed:
            if world.number <= self._over_up_to:
                drop(entrance)
                return
            self._entering = (entrance, cancelled)
        step = 0 if world.fresh else self.step
        entrance = self._shadowed(entrance, rank)
        try:
            if rank in world.sources:
                step = self._receive(world, rank, cancelled)
        except ExchangeBroken as broken:
            drop(entrance)
            with self._changed:
                self._entering = None
                if world.number <= self._over_up_to:
                    self._say(messages.WorldBrokenMsg(world.number, self.step))
                elif not cancelled.is_set():
                    self._tell_unconnected(world, entrance.after, broken)
            return
        with self._changed:
            self._entering = None
            self.step = step
            if cancelled.is_set():
                drop(entrance)
                self._say(messages.WorldBrokenMsg(world.number, self.step))
                return
            self._take_over(entrance, rank)
            if entrance.planned:
                self._say(messages.WorldEnteredMsg(world.number, _known(self.step)))
        self._offer(world, rank)

    def _shadowed(self, entrance: PendingWorld, rank: int) -> PendingWorld:
        """Let a shadow take part while our state is on its way, if we are not expected to compute yet."""
        real, keeper = entrance.exchange, self._keeper
        zero_buffers = (
            keeper.zero_buffers()
            if keeper is not None and self._may_shadow and rank in entrance.world.catching_up
            else None
        )
        if keeper is None or zero_buffers is None or not isinstance(real, Ring):
            return entrance
        return replace(entrance, exchange=CatchUpExchange(real, zero_buffers, keeper.is_last_step))

    def _receive(self, world: World, rank: int, cancelled: threading.Event) -> int:
        self.set_phase("receiving state")
        received = self.peers.fetch_state(world, world.sources[rank], FOREVER_S, cancelled)
        assert self._keeper is not None
        self._keeper.load(received.header, received.buffers)
        return received.step

    def _cross(self, number: int) -> None:
        """Everybody has prepared the same world: leave the old one for it, or leave altogether."""
        with self._changed:
            entrance, self._announced, self._agreed = self._announced, None, None
            if self._broken or entrance is None or entrance.world.number != number:
                return
            rank = entrance.world.rank_of(self.me)
            old = self.exchange
            if rank is not None:
                self._retired = old
                self._take_over(entrance, rank)
                self._say(messages.WorldEnteredMsg(number, _known(self.step)))
                early, self._early = self._early, None
                if early is not None:
                    self._on_prepareworld(early)
        if rank is None:
            self._go_after(old, number)
        else:
            self._offer(entrance.world, rank)

    def _take_over(self, entrance: PendingWorld, rank: int) -> None:
        self.world, self.rank, self.exchange = entrance.world, rank, entrance.exchange
        if rank == 0:
            # Whoever was to tell what was decided may be gone; what is known already is not told twice.
            for decision in self._decided.values():
                self._say(decision)
        self._broken, self._agreed, self._stop_agreed, self._finishing = False, None, False, False
        self._announced = None
        if self._prepared is not None and self._prepared.after != entrance.number:
            if self._prepared is not entrance:
                drop(self._prepared)
            self._prepared = None

    def _offer(self, world: World, rank: int) -> None:
        """Let those that need the state read it, while we already compute the next step."""
        readers = [world.seats[r].member for r, source in world.sources.items() if source == rank]
        if readers and self._keeper is not None:
            header, buffers = self._keeper.capture()
            snapshot = Snapshot(_known(self.step), header, buffers, len(readers))
            self.peers.offer_state(world.number, snapshot, readers)
            snapshot.freeze_soon()
            self._offered = snapshot

    def _go_after(self, old: Exchange | None, number: int) -> None:
        """We are not in the next world. Stay until the others have crossed, so that nobody sees us vanish."""
        if self._leaving is not None:
            self._say(messages.LeftMsg(self.step, number))
        deadline = time.monotonic() + FAREWELL_S
        while old is not None and time.monotonic() < deadline and getattr(old, "broken", None) is None:
            time.sleep(0.002)
        if self._leaving is not None:
            raise self._goodbye(exit_codes.RESUMABLE, f"left the run at step {self.step}: {self._leaving[1]}")
        with self._changed:
            # A spare now: the state that we hold grows old, and we wait to be admitted again.
            self.world, self.exchange, self.step = None, None, None
            self._say_hello_again()

    def _obey_stop(self) -> None:
        stop = self._stop
        if (stop is None or stop.checkpoint) and self.is_writer and self._keeper is not None:
            self.set_phase("checkpoint")
            self._keeper.checkpoint_now()
        self._say(messages.LeftMsg(self.step))
        code = stop.exit_code if stop is not None else exit_codes.RESUMABLE
        raise self._goodbye(code, f"stopped at step {self.step}: {stop.reason if stop else 'the run stops'}")

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        idle = self.world is None or self._broken
        if idle and self._finished:
            raise self._goodbye(0, "the run has finished")
        if idle and self._formed is None and (self._stop or self._leaving) and self._may_go():
            self._go_from_outside()
        if not idle and self._leaving is not None and self._nobody_answers(self._leaving[0]):
            raise self._goodbye(exit_codes.RESUMABLE, f"left at step {self.step} without the coordinator's help")

    def _nobody_answers(self, deadline: float) -> bool:
        return self._link.down_for_s > 1.0 or time.monotonic() > deadline

    def _go_from_outside(self) -> None:
        stop = self._stop
        if stop is not None and stop.checkpoint and self.step is not None and self._keeper is not None:
            self._keeper.checkpoint_now()
        self._say(messages.LeftMsg(self.step))
        why = stop.reason if stop is not None else self._leaving[1] if self._leaving is not None else ""
        code = stop.exit_code if stop is not None else exit_codes.RESUMABLE
        raise self._goodbye(code, f"left while waiting for a world: {why}")

    def _goodbye(self, exit_code: int, reason: str) -> MemberExit:
        sys.stderr.write(f"shoal: {self.me}: {reason}\n")
        return MemberExit(exit_code, reason)

    def _wait_for_a_fresh_lease(self) -> None:
        """A world of one has no peer that would notice that it is cut off, so it must not outlive its lease."""
        if self.size > 1 or self._link.may_step_alone(self.settings.lease_s):
            return
        self.set_phase("lease")
        with self._changed:
            self._wait_until(
                lambda: self._broken or self.size > 1 or self._link.may_step_alone(self.settings.lease_s),
                "the coordinator to renew the lease",
            )


def _known(step: int | None) -> int:
    """A member that is in a world, or hands its state over, holds the state of a step."""
    assert step is not None
    return step
