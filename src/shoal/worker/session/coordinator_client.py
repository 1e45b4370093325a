"""A member's messages to and from the coordinator, except those about worlds: hello, heartbeats, claims, notices.

Every message is sent under one lock, so that none slips between a hello and the state that it described. What was sent
while the connection was down is sent again after the next hello.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import shoal
from shoal import errors
from shoal.core.world import Address, World
from shoal.settings import RunSettings
from shoal.wire import credentials
from shoal.wire import member_messages as messages
from shoal.wire.protocol import PROTOCOL, Message, RejectedMsg
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.uplink import MemberUplink

# When to print first, and then how often, what a blocked member waits for.
REPORT_WAIT_AFTER_S = (5.0, 30.0)

REQUESTED, GRANTED, COMPLETED, DONE_ELSEWHERE = "requested", "granted", "completed", "done elsewhere"


class CoordinatorClient:
    """One member's exchange of messages with the coordinator; subclasses add handlers to `_handlers`."""

    address: Address

    def __init__(self, environment: MemberEnvironment, access: credentials.Credentials) -> None:
        self.environment = environment
        self.settings: RunSettings = environment.values
        self.me = environment.member
        self.step: int | None = None
        self.world: World | None = None
        self.min_members = 1
        self.micro_batch = 0
        self.on_uncaught: Callable[[BaseException], None] = lambda _error: None
        self.status: Callable[[], dict[str, Any]] = dict
        self._changed = threading.Condition(threading.RLock())
        self._fingerprint = ""
        self._speed = 0.0
        self._ready = False
        self._broken = False
        self._undecided = self._applying = self._evicted_while_applying = self._report_due = False
        self._done = self._left_loop = False
        # Set when the loop was left and it is not known yet whether the script failed: what to do if it did not.
        self._suspended: Callable[[], None] | None = None
        self._end_at: int | None = None
        self._finished = False
        self._stop: messages.StopMsg | None = None
        self._leaving: tuple[float, str] | None = None
        self._claims: dict[str, str] = {}
        self._adjustments: dict[str, messages.AdjustmentMsg] = {}
        self._error: errors.ShoalError | None = None
        self._phase, self._phase_since = "starting", time.monotonic()
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            messages.WelcomeMsg: self._on_welcome,
            RejectedMsg: self._on_rejected,
            messages.StopMsg: self._on_stop,
            messages.RunFinishedMsg: self._on_run_finished,
            messages.LeavingMsg: self._on_leaving,
            messages.ClaimGrantedMsg: self._on_claim_granted,
            messages.ClaimAlreadyDoneMsg: self._on_claim_already_done,
        }
        heartbeat_s, lease_s = self.settings.heartbeat_s, self.settings.lease_s
        self._uplink = MemberUplink(
            environment.url,
            access,
            self._on_connect,
            self._on_message,
            self._heartbeat,
            heartbeat_s,
            lease_s,
            self._on_uplink_failed,
        )

    def set_phase(self, name: str, since: float | None = None) -> None:
        """Set what the main thread is doing, from now on or since a monotonic time; heartbeats report it."""
        self._phase, self._phase_since = name, time.monotonic() if since is None else since

    def leave(self, within_s: float, cause: str) -> None:
        """Note that this member must leave within so many seconds; it does at the next step boundary all agree on.

        Of several notices the one with the earliest deadline counts.
        """
        deadline = time.monotonic() + within_s
        with self._changed:
            if self._leaving is None or deadline < self._leaving[0]:
                self._leaving = (deadline, cause)
                self._send(messages.LeavingMsg(within_s, cause))
                self._changed.notify_all()

    def claim(self, name: str) -> bool:
        """Block until this member may do something once (True), or until another member has done it (False)."""
        self._resolve_suspended()
        with self._changed:
            self._request_claim(name)
            self._wait_until(lambda: self._claims[name] != REQUESTED, f"the member that does {name!r}")
            return self._claims[name] == GRANTED

    def try_claim(self, name: str) -> bool:
        """Request a claim that is never completed; return at once whether this member holds it now."""
        self._resolve_suspended()
        with self._changed:
            self._request_claim(name)
            return self._claims[name] == GRANTED

    def complete_claim(self, name: str) -> None:
        """Report that what was claimed is done, so that no other member does it."""
        with self._changed:
            self._claims[name] = COMPLETED
            self._send(messages.ClaimDoneMsg(name))

    def report_checkpoint(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        self._send(messages.CheckpointWrittenMsg(step, path, size_bytes, seconds))

    def report_adjustment(
        self, step: int, what: str, values: dict[str, int], reason: str, *, send: bool = True
    ) -> None:
        """Record what all members changed alike; `send` it unless another member does."""
        with self._changed:
            self._adjustments[what] = messages.AdjustmentMsg(step, what, values, reason)
            if send:
                self._send(self._adjustments[what])

    def report_exception(self, error: BaseException, text: str) -> None:
        """Report an exception of the user's code, before the process ends and peers see only a lost connection."""
        self._suspended = None
        code = error.code if isinstance(error, errors.ShoalError) else ""
        kind, step = type(error).__name__, self.step or 0
        self._send(messages.ExceptionRaisedMsg(kind, str(error)[:2000], text[-20_000:], code, step))

    def _resolve_suspended(self) -> None:
        """Do nothing: only a session with a training loop can leave it."""

    @property
    def _is_silent(self) -> bool:
        """Whether nothing may be reported about the present step, because it is not decided which step is held."""
        return self._undecided or self._applying

    # --- sending

    def _send(self, message: Message) -> None:
        with self._changed:
            self._uplink.send(message)

    def _on_connect(self, send: Callable[[Message], None], attach: Callable[[], None]) -> None:
        with self._changed:
            for message in self._hello():
                send(message)
            attach()

    def _send_hello(self) -> None:
        with self._changed:
            for message in self._hello():
                self._send(message)

    def _hello(self) -> list[Message]:
        """Return the hello and what must be sent again after it."""
        world = self.world.number if self.world is not None else None
        hello = messages.MemberHelloMsg(
            protocol=PROTOCOL,
            version=shoal.__version__,
            run=self.environment.run,
            member=self.me,
            incarnation=self.environment.incarnation,
            address=self.address,
            pid=os.getpid(),
            world=world,
            step=self.step,
            broken=self._broken and not self._is_silent,
            done=self._done,
            role=self.environment.role,
            early=self._left_loop,
        )
        outgoing: list[Message] = [hello]
        if self._ready and world is None:
            outgoing.append(self._readiness())
        if self._leaving is not None:
            outgoing.append(messages.LeavingMsg(max(0.0, self._leaving[0] - time.monotonic()), self._leaving[1]))
        outgoing += [messages.ClaimMsg(name) for name, state in self._claims.items() if state == REQUESTED]
        outgoing += [messages.ClaimDoneMsg(name) for name, state in self._claims.items() if state == COMPLETED]
        outgoing += self._adjustments.values()
        return outgoing

    def _readiness(self, *, restored: bool = False) -> messages.ReadyMsg:
        return messages.ReadyMsg(self._fingerprint, self.step, restored, self._speed)

    def _heartbeat(self) -> messages.HeartbeatMsg:
        world = self.world
        return messages.HeartbeatMsg(
            world=world.number if world is not None else None,
            step=self.step,
            phase=self._phase,
            phase_age_s=time.monotonic() - self._phase_since,
            **self.status(),
        )

    def _request_claim(self, name: str) -> None:
        if name not in self._claims:
            self._claims[name] = REQUESTED
            self._send(messages.ClaimMsg(name))

    def _on_uplink_failed(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        self._on_fatal(
            errors.MembershipError("the connection to the coordinator failed here", why=cause, where=self.me)
        )

    def _on_fatal(self, error: errors.ShoalError) -> None:
        """Let the main thread raise an error of another thread, without which this member cannot go on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # --- handling messages, in the uplink's thread

    def _on_message(self, message: Any) -> None:
        with self._changed:
            self._handlers[type(message)](message)
            self._changed.notify_all()

    def _on_welcome(self, message: messages.WelcomeMsg) -> None:
        self._uplink.heartbeat_s = message.heartbeat_s
        self.min_members, self.micro_batch = message.min_members, message.micro_batch

    def _on_rejected(self, message: RejectedMsg) -> None:
        self._error = errors.from_code(message.code, message.what, why=message.why, do=message.do, where=self.me)

    def _on_stop(self, message: messages.StopMsg) -> None:
        self._stop = message

    def _on_run_finished(self, _message: messages.RunFinishedMsg) -> None:
        self._finished = True

    def _on_leaving(self, message: messages.LeavingMsg) -> None:
        self.leave(message.within_s, message.cause)

    def _on_claim_granted(self, message: messages.ClaimGrantedMsg) -> None:
        if self._claims.get(message.name) == REQUESTED:
            self._claims[message.name] = GRANTED

    def _on_claim_already_done(self, message: messages.ClaimAlreadyDoneMsg) -> None:
        self._claims[message.name] = DONE_ELSEWHERE

    # --- waiting

    def _wait_until(self, ready: Callable[[], bool], awaited: str) -> None:
        """Block on the lock that the caller holds; print what is awaited when it takes long.

        There is no other limit while the coordinator answers: it knows whom the run waits for, and gives up members
        that are lost or hung. Raise a rejection, and CoordinatorUnreachable if it is gone for `orphan_timeout_s`.
        """
        since = time.monotonic()
        report_at = since + REPORT_WAIT_AFTER_S[0]
        while not ready() and self._error is None:
            self._changed.wait(0.2)
            now, down_s = time.monotonic(), self._uplink.down_for_s
            if down_s > self.settings.orphan_timeout_s:
                raise errors.CoordinatorUnreachable(
                    f"{self.me} gives up: the coordinator has not answered for {down_s:.0f} s",
                    why=f"it was waiting for {awaited}, which only a coordinator can decide",
                    do="start the coordinator again and resume the run; orphan_timeout_s sets how long members wait",
                )
            if now >= report_at:
                report_at = now + REPORT_WAIT_AFTER_S[1]
                where = f"; no connection for {down_s:.0f} s" if down_s else ""
                sys.stderr.write(f"shoal: {self.me}: waiting for {awaited} since {now - since:.0f} s{where}\n")
        if self._error is not None:
            raise self._error
