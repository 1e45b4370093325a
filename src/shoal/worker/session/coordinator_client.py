"""What a member says to its coordinator and hears from it, apart from worlds: hello, beats, claims, notices, the end.

Everything is said under one lock, so that nothing is said between a hello and the state that it described. What was
said while the line was down is said again with the next hello.
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

TELL_AFTER_S = (5.0, 30.0)


class CoordinatorClient:
    """One member's exchange of messages with the coordinator; a session adds the worlds."""

    address: Address

    def __init__(self, environment: MemberEnvironment, access: credentials.Credentials) -> None:
        self.environment = environment
        self.settings: RunSettings = environment.values
        self.me = environment.member
        self.step: int | None = None
        self.world: World | None = None
        self.status: Callable[[], dict[str, Any]] = dict
        self._changed = threading.Condition(threading.RLock())
        self._fingerprint = ""
        self._speed = 0.0
        self._ready = False
        self._broken = False
        self._applying = self._expelled = False
        self._done = self._quit = False
        self._finished = False
        self._stop: messages.StopMsg | None = None
        self._leaving: tuple[float, str] | None = None
        self._claims: dict[str, str] = {}
        self._decided: dict[str, messages.AdjustmentMsg] = {}
        self._error: errors.ShoalError | None = None
        self._phase, self._phase_since = "starting", time.monotonic()
        heartbeat_s, lease_s = self.settings.heartbeat_s, self.settings.lease_s
        self._link = MemberUplink(environment.url, access, self._greet, self._heard, self._beat, heartbeat_s, lease_s)

    def set_phase(self, name: str, since: float | None = None) -> None:
        """Say what the main thread is doing from now on, or since then."""
        self._phase, self._phase_since = name, time.monotonic() if since is None else since

    def leave(self, within_s: float, cause: str) -> None:
        """We were told to go away: hand over and go, at the next step boundary that all agree on.

        Of several notices the one that leaves the least time counts.
        """
        by = time.monotonic() + within_s
        with self._changed:
            if self._leaving is None or by < self._leaving[0]:
                self._leaving = (by, cause)
                self._say(messages.LeavingMsg(within_s, cause))
                self._changed.notify_all()

    def claim(self, name: str) -> bool:
        """Wait until it is our turn to do something once (True), or until somebody has done it (False)."""
        with self._changed:
            if name not in self._claims:
                self._claims[name] = "asked"
                self._say(messages.ClaimMsg(name))
            self._wait_until(lambda: self._claims[name] != "asked", f"the member that does {name!r}")
            return self._claims[name] == "granted"

    def try_claim(self, name: str) -> bool:
        """Whether it is our turn to do something that is never done; asks for it, and does not wait."""
        with self._changed:
            if name not in self._claims:
                self._claims[name] = "asked"
                self._say(messages.ClaimMsg(name))
            return self._claims[name] == "granted"

    def complete_claim(self, name: str) -> None:
        with self._changed:
            self._claims[name] = "fulfilled"
            self._say(messages.ClaimDoneMsg(name))

    def report_checkpoint(self, step: int, path: str, size_bytes: int, seconds: float) -> None:
        self._say(messages.CheckpointWrittenMsg(step, path, size_bytes, seconds))

    def report_adjustment(
        self, step: int, what: str, values: dict[str, int], reason: str, *, send: bool = True
    ) -> None:
        """Remember what the members have changed by themselves, and tell it, unless somebody else does."""
        with self._changed:
            self._decided[what] = messages.AdjustmentMsg(step, what, values, reason)
            if send:
                self._say(self._decided[what])

    def report_exception(self, error: BaseException, text: str) -> None:
        """The user's code raised: say so before its effects are felt."""
        code = error.code if isinstance(error, errors.ShoalError) else ""
        self._say(messages.ExceptionRaisedMsg(type(error).__name__, str(error)[:2000], text[-20_000:], code))

    # --- saying

    def _say(self, message: Message) -> None:
        with self._changed:
            self._link.send(message)

    def _greet(self, say: Callable[[Message], None], attach: Callable[[], None]) -> None:
        with self._changed:
            for message in self._hello():
                say(message)
            attach()

    def _say_hello_again(self) -> None:
        with self._changed:
            for message in self._hello():
                self._say(message)

    def _hello(self) -> list[Message]:
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
            broken=self._broken and not self._applying,
            done=self._done,
            role=self.environment.role,
            early=self._quit,
        )
        said: list[Message] = [hello]
        if self._ready and world is None:
            said.append(self._readiness())
        if self._leaving is not None:
            said.append(messages.LeavingMsg(max(0.0, self._leaving[0] - time.monotonic()), self._leaving[1]))
        said += [messages.ClaimMsg(name) for name, state in self._claims.items() if state == "asked"]
        said += [messages.ClaimDoneMsg(name) for name, state in self._claims.items() if state == "fulfilled"]
        said += self._decided.values()
        return said

    def _readiness(self, *, restored: bool = False) -> messages.ReadyMsg:
        return messages.ReadyMsg(self._fingerprint, self.step, restored, self._speed)

    def _beat(self) -> messages.HeartbeatMsg:
        world = self.world
        return messages.HeartbeatMsg(
            world=world.number if world is not None else None,
            step=self.step,
            phase=self._phase,
            phase_age_s=time.monotonic() - self._phase_since,
            **self.status(),
        )

    # --- hearing, in the link's thread

    def _heard(self, message: Any) -> None:
        with self._changed:
            handler = getattr(self, f"_on_{type(message).__name__.removesuffix('Msg').lower()}")
            handler(message)
            self._changed.notify_all()

    def _on_welcome(self, message: messages.WelcomeMsg) -> None:
        self._link.heartbeat_s = message.heartbeat_s

    def _on_rejected(self, message: RejectedMsg) -> None:
        self._error = errors.from_code(message.code, message.what, why=message.why, do=message.do, where=self.me)

    def _on_stop(self, message: messages.StopMsg) -> None:
        self._stop = message

    def _on_runfinished(self, _message: messages.RunFinishedMsg) -> None:
        self._finished = True

    def _on_leaving(self, message: messages.LeavingMsg) -> None:
        self.leave(message.within_s, message.cause)

    def _on_claimgranted(self, message: messages.ClaimGrantedMsg) -> None:
        if self._claims.get(message.name) == "asked":
            self._claims[message.name] = "granted"

    def _on_claimalreadydone(self, message: messages.ClaimAlreadyDoneMsg) -> None:
        self._claims[message.name] = "elsewhere"

    # --- waiting

    def _wait_until(self, ready: Callable[[], bool], whom: str) -> None:
        """Wait on the lock that the caller holds; say whom we wait for when it takes long."""
        since = time.monotonic()
        tell_at = since + TELL_AFTER_S[0]
        while not ready() and self._error is None:
            self._changed.wait(0.2)
            now = time.monotonic()
            if now >= tell_at:
                tell_at = now + TELL_AFTER_S[1]
                where = f"; not reached for {self._link.down_for_s:.0f} s" if self._link.down_for_s else ""
                sys.stderr.write(f"shoal: {self.me}: waiting for {whom} since {now - since:.0f} s{where}\n")
        if self._error is not None:
            raise self._error
