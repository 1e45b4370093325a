"""The worlds of a member: the current one, one that is being entered, and one that is prepared to follow.

Messages and broken connections arrive in threads of their own and change this state under the lock. Only the main
thread, in `shoal.worker.session.session`, enters a world. The package docstring has the theory.

    _to_enter    an immediate world, connected; the main thread enters it next
    _entering    the world that the main thread is entering now, and the event that cancels it
    _prepared    a planned world that follows the current one; it is connected, or has no seat for this member
    _announced   the prepared world that this member named in its step report; kept until all reports are in
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Protocol

from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.settings import port_range
from shoal.wire import credentials
from shoal.wire import member_messages as messages
from shoal.worker.collectives.catch_up import CatchUpExchange, ZeroBuffer
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.session.coordinator_client import CoordinatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.pending_worlds import PendingWorld, PendingWorlds, abandon
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.snapshot import Bytes, Snapshot


class StateProvider(Protocol):
    """The owner of the state that is trained: a framework's side of a session."""

    def capture(self) -> tuple[bytes, list[Bytes]]:
        """Return the state now, as a header and views of live memory."""

    def load(self, header: bytes, buffers: list[Bytes]) -> None:
        """Replace the state."""

    def restore(self) -> int | None:
        """Load the newest good checkpoint; return its step, or None if there is none."""

    def checkpoint_now(self) -> None:
        """Write a durable checkpoint before returning."""

    def zero_buffers(self) -> list[ZeroBuffer] | None:
        """Return the buffers of one step's exchange, filled with zeros; None if they are not known beforehand."""

    def is_last_step(self, reports: tuple[StepReport, ...]) -> bool:
        """Return whether no step follows the one of these reports."""


class MemberWorlds(CoordinatorClient):
    """A member's state among worlds, and how it reacts to the coordinator and to broken connections."""

    def __init__(self, environment: MemberEnvironment) -> None:
        access = credentials.read(environment.token_file, environment.url)
        super().__init__(environment, access)
        self.rank = 0
        self.exchange: Exchange | None = None
        self.reason = ""
        self._state: StateProvider | None = None
        self._agreed_world: int | None = None
        self._stop_agreed = False
        self._finishing = False
        self._prepared: PendingWorld | None = None
        self._announced: PendingWorld | None = None
        self._to_enter: PendingWorld | None = None
        self._entering: tuple[PendingWorld, threading.Event] | None = None
        self._early_proposal: messages.PrepareWorldMsg | None = None
        self._retired_exchange: Exchange | None = None
        self._ended_up_to = 0
        self._step_limit: threading.Timer | None = None
        self._offered: Snapshot | None = None
        self._restore_requested = False
        self._may_catch_up = True
        self._break_cause: tuple[tuple[str, ...], str] = ((), "")
        self._handlers |= {
            messages.EnterWorldMsg: self._on_enter_world,
            messages.PrepareWorldMsg: self._on_prepare_world,
            messages.DissolveWorldMsg: self._on_dissolve_world,
            messages.EvictedMsg: self._on_evicted,
            messages.RestoreMsg: self._on_restore,
            messages.EndTrainingMsg: self._on_end_training,
        }
        self.peers = Peers(
            access.token.encode(),
            environment.run,
            self.me,
            environment.incarnation,
            environment.host,
            port_range(self.settings.ports),
            others=environment.other_hosts,
            on_failure=self._on_fatal,
        )
        self.address = self.peers.address
        self._pending_worlds = PendingWorlds(
            partial(connect_ring, self.peers),
            self.settings.connect_timeout_s,
            self._on_connected,
            self._report_unconnected,
            self._on_lost_neighbour,
        )
        self._uplink.open()

    # --- breaking, from any thread

    def _break_world(self, suspects: tuple[str, ...], cause: str, report: bool = True) -> None:
        with self._changed:
            if self.world is None or self._broken:
                return
            self._broken = True
            self._break_cause = (suspects, cause)
            if isinstance(self.exchange, CatchUpExchange) and self.exchange.following:
                # It may have misjudged what the others exchange: next time, wait for the state.
                self._may_catch_up = False
            if self.exchange is not None:
                self.exchange.abort(cause)
            self._forget_prepared()
            self.peers.end_worlds(self.world.number)
            if self._offered is not None:
                self._offered.abandon()
                self._offered = None
            if report:
                self._report_broken()
            if self._undecided:
                self._step_limit = threading.Timer(self.settings.hang_timeout_s, self._give_up_step)
                self._step_limit.daemon = True
                self._step_limit.start()
            self._changed.notify_all()

    def _give_up_step(self) -> None:
        """Report a broken world without the step whose sum may be here: the script has not applied it for long."""
        with self._changed:
            if self._undecided and self._step_limit is threading.current_thread():
                self._decide_step()

    def _decide_step(self) -> None:
        """Report what was held back while it was not decided which step this member holds."""
        self._undecided = self._applying = False
        limit, self._step_limit = self._step_limit, None
        if limit is not None:
            limit.cancel()
        if self._evicted_while_applying:
            self._rejoin()
        elif self._report_due and not self._is_at_end():
            self._report_broken()

    def _is_at_end(self) -> bool:
        """Return whether this member holds the step at which training ends early; it reports that it is done, then."""
        return self._end_at is not None and self.step is not None and self.step >= self._end_at

    def _report_broken(self) -> None:
        """Report the broken world with the step held, at once or when that is decided."""
        self._report_due = self._is_silent
        if self.world is not None and not self._report_due:
            self._send(messages.WorldBrokenMsg(self.world.number, self.step, *self._break_cause))

    def _on_lost_neighbour(self, number: int, suspects: tuple[str, ...], cause: str) -> None:
        """Break the world after a loss between operations; at an agreed end a closed connection is no loss."""
        with self._changed:
            current = self.world is not None and self.world.number == number
            ending = self._finishing or self._stop_agreed or self._agreed_world is not None
            if current and not ending:
                self._break_world(suspects, cause)

    def _forget_prepared(self) -> None:
        self._pending_worlds.cancel(planned=True)
        abandon(self._prepared)
        abandon(self._announced)
        self._prepared = self._announced = self._early_proposal = None

    # --- handling messages, in the uplink's thread

    def _on_enter_world(self, message: messages.EnterWorldMsg) -> None:
        current = self.world.number if self.world is not None else 0
        if message.world.number <= max(current, self._own_number() or 0, self._ended_up_to):
            return
        self.reason = message.reason
        self._restore_requested = False  # the state comes from a member after all
        self._stop_entering()
        if self.world is not None and not self._broken:
            self._break_world((), message.reason)
        self._pending_worlds.connect(message.world, after=None)

    def _on_prepare_world(self, message: messages.PrepareWorldMsg) -> None:
        """Connect the proposed world beside the current one, or beside the one that is just being entered."""
        number = message.world.number
        ready = [pending.number for pending in (self._prepared, self._to_enter) if pending is not None]
        if number <= self._ended_up_to or number in ready or self._pending_worlds.is_connecting(number):
            return
        if self._entering is not None and self._entering[0].number == number:
            return
        own_number = self._own_number()
        if self._announced is not None and own_number != message.after == self._announced.number:
            # Another member has crossed already and reported so; handle the proposal when this one has crossed too.
            self._early_proposal = message
            return
        if own_number is not None and own_number != message.after:
            if self._entering is None or not self._entering[0].planned:
                return
            self._stop_entering()  # the proposal that we were about to join was replaced by this one
            own_number = None
        if self._prepared is not self._announced:
            abandon(self._prepared)
        self._prepared = None
        if message.world.rank_of(self.me) is not None:
            self._pending_worlds.connect(message.world, message.after)
        elif own_number is not None:
            self._prepared = PendingWorld(message.world, None, message.after)

    def _own_number(self) -> int | None:
        """Return the number of the world that this member is in, or was told to enter."""
        if self.world is not None and not self._broken:
            return self.world.number
        if self._entering is not None:
            return self._entering[0].number
        if self._to_enter is not None and not self._to_enter.planned:
            return self._to_enter.number
        return self._pending_worlds.immediate

    def _stop_entering(self) -> None:
        if self._entering is not None:
            self._entering[1].set()
        abandon(self._to_enter)
        self._to_enter = None

    def _on_dissolve_world(self, message: messages.DissolveWorldMsg) -> None:
        self._ended_up_to = max(self._ended_up_to, message.number)
        self.reason = message.reason
        self._pending_worlds.cancel_up_to(message.number)
        if self._to_enter is not None and self._to_enter.number <= message.number:
            abandon(self._to_enter)
            self._to_enter = None
        if self._prepared is not None and self._prepared.number <= message.number:
            abandon(self._prepared)
            self._prepared = None
        if self._entering is not None and self._entering[0].number <= message.number:
            self._entering[1].set()
        if self.world is None:
            if self._ready and self._entering is None:
                self._send(self._readiness())
        elif self.world.number <= message.number:
            if not self._broken:
                self._break_world((), message.reason)
            elif self._entering is None:
                self._report_broken()

    def _on_evicted(self, message: messages.EvictedMsg) -> None:
        self._break_world((), message.reason, report=False)
        self._pending_worlds.cancel(planned=False)
        self._stop_entering()
        # A step that is being applied counts first: the next hello then reports the later state.
        self._evicted_while_applying = self._is_silent
        if not self._is_silent:
            self._rejoin()

    def _rejoin(self) -> None:
        self._evicted_while_applying = self._report_due = False
        self.world, self.exchange = None, None
        self._send_hello()

    def _on_restore(self, _message: messages.RestoreMsg) -> None:
        self._restore_requested = True

    def _on_end_training(self, message: messages.EndTrainingMsg) -> None:
        """Note the step at which training ends; do not begin another if that one is committed."""
        self._end_at = message.step
        if self._is_at_end() and not self._applying:
            self._break_world((), message.reason, report=False)
        self.reason = message.reason

    # --- results of the connecting threads

    def _on_connected(self, pending: PendingWorld, cancelled: threading.Event) -> bool:
        with self._changed:
            if cancelled.is_set() or pending.number <= self._ended_up_to:
                return False
            if pending.planned and pending.after == self._own_number():
                self._prepared = pending
            else:
                abandon(self._to_enter)
                self._to_enter = pending
            self._changed.notify_all()
            return True

    def _report_unconnected(self, world: World, after: int | None, broken: ExchangeBroken) -> None:
        if after is not None:
            self._send(messages.PrepareFailedMsg(world.number, broken.suspects, broken.cause))
        else:
            self._send(messages.WorldBrokenMsg(world.number, self.step, broken.suspects, broken.cause))
