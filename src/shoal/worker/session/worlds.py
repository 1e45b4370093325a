"""The worlds that a member hears of: one that it is in, one that it is about to enter, one that is prepared.

Messages and broken connections arrive in threads of their own and change this under the lock; only the main thread, in
`shoal.worker.session.session`, enters a world. What is said to the coordinator and what is applied to the model are
decided under the same lock: a member that has answered with step k does not apply step k afterwards.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Protocol

from shoal.core import step_report as pulses
from shoal.core.world import World
from shoal.settings import port_range
from shoal.wire import credentials
from shoal.wire import member_messages as messages
from shoal.worker.collectives.catch_up import CatchUpExchange, ZeroBuffer
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.session.coordinator_client import CoordinatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.pending_worlds import PendingWorld, PendingWorlds, drop
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.snapshot import Bytes, Snapshot


class StateProvider(Protocol):
    """Whoever holds the state that is trained: a framework's side of a session."""

    def capture(self) -> tuple[bytes, list[Bytes]]:
        """The state now, as a header and views of live memory."""

    def load(self, header: bytes, buffers: list[Bytes]) -> None:
        """Take over a state."""

    def restore(self) -> int | None:
        """Load the newest good checkpoint; its step, or None if there is none."""

    def checkpoint_now(self) -> None:
        """Write a durable checkpoint before returning."""

    def zero_buffers(self) -> list[ZeroBuffer] | None:
        """The buffers of one step's exchange, filled with nothing; None if they cannot be known beforehand."""

    def is_last_step(self, everybody: tuple[pulses.StepReport, ...]) -> bool:
        """Whether no step follows the one of these pulses."""


class MemberWorlds(CoordinatorClient):
    """A member's place among worlds, kept up by whoever brings news."""

    def __init__(self, environment: MemberEnvironment) -> None:
        access = credentials.read(environment.token_file)
        super().__init__(environment, access)
        self.rank = 0
        self.exchange: Exchange | None = None
        self.reason = ""
        self._keeper: StateProvider | None = None
        self._agreed: int | None = None
        self._stop_agreed = False
        self._finishing = False
        self._prepared: PendingWorld | None = None
        self._announced: PendingWorld | None = None
        self._formed: PendingWorld | None = None
        self._retired: Exchange | None = None
        self._entering: tuple[PendingWorld, threading.Event] | None = None
        self._early: messages.PrepareWorldMsg | None = None
        self._over_up_to = 0
        self._offered: Snapshot | None = None
        self._restore_asked = False
        self._may_shadow = True
        self._why: tuple[tuple[str, ...], str] = ((), "")
        self.peers = Peers(
            access.token.encode(),
            environment.run,
            self.me,
            environment.incarnation,
            environment.host,
            port_range(self.settings.ports),
            others=environment.others,
        )
        self.address = self.peers.address
        self._entrances = PendingWorlds(
            partial(connect_ring, self.peers),
            self.settings.connect_timeout_s,
            self._opened,
            self._tell_unconnected,
            self._world_broke,
        )
        self._link.open()

    # --- breaking, from any thread

    def _break_world(self, suspects: tuple[str, ...], cause: str, answer: bool = True) -> None:
        with self._changed:
            if self.world is None or self._broken:
                return
            self._broken = True
            self._why = (suspects, cause)
            if isinstance(self.exchange, CatchUpExchange) and self.exchange.following:
                self._may_shadow = (
                    False  # it may have misjudged what the others exchange: next time, wait for the state
                )
            if self.exchange is not None:
                self.exchange.abort(cause)
            self._forget_prepared()
            self.peers.end_worlds(self.world.number)
            if self._offered is not None:
                self._offered.abandon()
                self._offered = None
            if answer and not self._applying:
                self._answer()
            self._changed.notify_all()

    def _answer(self) -> None:
        if self.world is not None:
            self._say(messages.WorldBrokenMsg(self.world.number, self.step, *self._why))

    def _world_broke(self, number: int, suspects: tuple[str, ...], cause: str) -> None:
        """A neighbour was lost while nothing was being exchanged; at an agreed end that is no loss."""
        with self._changed:
            current = self.world is not None and self.world.number == number
            ending = self._finishing or self._stop_agreed or self._agreed is not None
            if current and not ending:
                self._break_world(suspects, cause)

    def _forget_prepared(self) -> None:
        self._entrances.give_up(planned=True)
        drop(self._prepared)
        drop(self._announced)
        self._prepared = self._announced = self._early = None

    # --- hearing the coordinator, in the link's thread

    def _on_enterworld(self, message: messages.EnterWorldMsg) -> None:
        current = self.world.number if self.world is not None else 0
        if message.world.number <= max(current, self._number_of_ours() or 0, self._over_up_to):
            return
        self.reason = message.reason
        self._stop_entering()
        if self.world is not None and not self._broken:
            self._break_world((), message.reason)
        self._entrances.connect(message.world, after=None)

    def _on_prepareworld(self, message: messages.PrepareWorldMsg) -> None:
        """Connect the next world beside ours, or beside the one that we are just entering."""
        number = message.world.number
        known = [e.number for e in (self._prepared, self._formed) if e is not None]
        if number <= self._over_up_to or number in known or self._entrances.connects(number):
            return
        if self._entering is not None and self._entering[0].number == number:
            return
        ours = self._number_of_ours()
        if self._announced is not None and ours != message.after == self._announced.number:
            # Another has crossed and said so before we did; it is heard again when we are there.
            self._early = message
            return
        if ours is not None and ours != message.after:
            if self._entering is None or not self._entering[0].planned:
                return
            self._stop_entering()  # the proposal that we were about to join was replaced by this one
            ours = None
        if self._prepared is not self._announced:
            drop(self._prepared)
        self._prepared = None
        if message.world.rank_of(self.me) is not None:
            self._entrances.connect(message.world, message.after)
        elif ours is not None:
            self._prepared = PendingWorld(message.world, None, message.after)

    def _number_of_ours(self) -> int | None:
        """The world that we are in, or that we were told to enter."""
        if self.world is not None and not self._broken:
            return self.world.number
        if self._entering is not None:
            return self._entering[0].number
        if self._formed is not None and not self._formed.planned:
            return self._formed.number
        return self._entrances.at_once

    def _stop_entering(self) -> None:
        if self._entering is not None:
            self._entering[1].set()
        drop(self._formed)
        self._formed = None

    def _on_dissolveworld(self, message: messages.DissolveWorldMsg) -> None:
        self._over_up_to = max(self._over_up_to, message.number)
        self.reason = message.reason
        self._entrances.give_up_to(message.number)
        for entrance in (self._formed, self._prepared):
            if entrance is not None and entrance.number <= message.number:
                drop(entrance)
                if entrance is self._formed:
                    self._formed = None
                else:
                    self._prepared = None
        if self._entering is not None and self._entering[0].number <= message.number:
            self._entering[1].set()
        if self.world is None:
            if self._ready and self._entering is None:
                self._say(self._readiness())
        elif self.world.number <= message.number:
            if not self._broken:
                self._break_world((), message.reason)
            elif not self._applying and self._entering is None:
                self._answer()

    def _on_evicted(self, message: messages.EvictedMsg) -> None:
        self._break_world((), message.reason, answer=False)
        self._entrances.give_up(planned=False)
        self._stop_entering()
        # A step that is being applied counts first; whoever is out then has a later state to tell of.
        self._expelled = self._applying
        if not self._applying:
            self._come_anew()

    def _come_anew(self) -> None:
        self._expelled = False
        self.world, self.exchange = None, None
        self._say_hello_again()

    def _on_restore(self, _message: messages.RestoreMsg) -> None:
        self._restore_asked = True

    # --- what the threads that connect worlds tell

    def _opened(self, entrance: PendingWorld, cancelled: threading.Event) -> bool:
        with self._changed:
            if cancelled.is_set() or entrance.number <= self._over_up_to:
                return False
            if entrance.planned and entrance.after == self._number_of_ours():
                self._prepared = entrance
            else:
                drop(self._formed)
                self._formed = entrance
            self._changed.notify_all()
            return True

    def _tell_unconnected(self, world: World, after: int | None, broken: ExchangeBroken) -> None:
        if after is not None:
            self._say(messages.PrepareFailedMsg(world.number, broken.suspects, broken.cause))
        else:
            self._say(messages.WorldBrokenMsg(world.number, self.step, broken.suspects, broken.cause))
