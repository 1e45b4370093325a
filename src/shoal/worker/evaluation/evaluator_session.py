"""A process that evaluates the checkpoints of a run: in no world, alone with its model."""

from __future__ import annotations

import sys
import time

from shoal import exit_codes
from shoal.core.world import Address
from shoal.wire import credentials
from shoal.wire import member_messages as messages
from shoal.wire.protocol import Message
from shoal.worker.session.coordinator_client import CoordinatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.session import MemberExit
from shoal.worker.session.standalone import StandaloneSession


class EvaluatorSession(StandaloneSession):
    """What a Session is to a member, to an evaluator: to its model it is alone, and it trains and writes nothing."""

    is_writer = False

    def __init__(self, environment: MemberEnvironment) -> None:
        super().__init__()
        self.environment = environment
        self.settings = environment.values
        self.me = environment.member
        self.line = EvaluatorClient(environment)

    def set_phase(self, name: str) -> None:
        self.line.set_phase(name)

    def claim(self, name: str) -> bool:  # noqa: ARG002
        return False

    def leave(self, within_s: float, cause: str) -> None:
        """We were told to go away; nobody needs anything of us."""
        self.line.leave(within_s, cause)

    def report_exception(self, error: BaseException, text: str) -> None:
        self.line.report_exception(error, text)

    def at(self, step: int) -> None:
        """The model is that of this step now."""
        self.step = self.line.step = step

    def close(self) -> None:
        self.line.close()


class EvaluatorClient(CoordinatorClient):
    """What an evaluator says to the coordinator and hears from it."""

    def __init__(self, environment: MemberEnvironment) -> None:
        super().__init__(environment, credentials.read(environment.token_file))
        self.address = Address(environment.host, 0)
        self.checkpoint: tuple[int, float] | None = None
        self._standing: messages.EvaluationStatusMsg | None = None
        self._unheard: messages.EvaluatedMsg | None = None
        self._link.open()

    @property
    def trained(self) -> bool:
        """Whether nobody trains any more, so that no other checkpoint will come."""
        return self._finished

    def standing(self) -> messages.EvaluationStatusMsg:
        """How the evaluation stood when the coordinator last said so; it is waited for."""
        with self._changed:
            self._wait_until(
                lambda: self._standing is not None or self._leaving is not None, "the coordinator to answer"
            )
            self.raise_if_told_to_go()
            assert self._standing is not None
            return self._standing

    def evaluated(self, found: messages.EvaluatedMsg) -> None:
        """Report an evaluation; it is said again until it was heard."""
        with self._changed:
            self._unheard = found
            self._say(found)

    def wait_until_heard(self) -> None:
        with self._changed:
            self._wait_until(lambda: self._unheard is None or self._leaving is not None, "the coordinator to answer")

    def pause(self, seconds: float) -> None:
        """Wait until something is heard, or for so long."""
        with self._changed:
            self.raise_if_told_to_go()
            self._changed.wait(seconds)
            self.raise_if_told_to_go()

    def raise_if_told_to_go(self) -> None:
        if self._error is not None:
            raise self._error
        if self._leaving is not None:
            self._say(messages.LeftMsg(self.step))
            raise self.goodbye(exit_codes.RESUMABLE, f"left the run: {self._leaving[1]}")

    def goodbye(self, exit_code: int, reason: str) -> MemberExit:
        sys.stderr.write(f"shoal: {self.me}: {reason}\n")
        return MemberExit(exit_code, reason)

    def close(self) -> None:
        self._link.close()

    def _hello(self) -> list[Message]:
        return super()._hello() + ([self._unheard] if self._unheard is not None else [])

    # --- hearing, in the link's thread

    def _on_evaluationstatus(self, message: messages.EvaluationStatusMsg) -> None:
        self._standing = message
        if self._unheard is not None and message.step == self._unheard.step:
            self._unheard = None

    def _on_checkpointwritten(self, message: messages.CheckpointWrittenMsg) -> None:
        self.checkpoint = (message.step, time.monotonic())

    def _on_evicted(self, _message: messages.EvictedMsg) -> None:
        self._say_hello_again()
