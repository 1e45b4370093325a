"""Session and coordinator connection of an evaluator, which is in no world and trains nothing."""

from __future__ import annotations

import sys
import time
from collections import deque

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
    """Session of an evaluator: to the model a standalone one, but it writes no checkpoints and claims no files."""

    is_writer = False

    def __init__(self, environment: MemberEnvironment) -> None:
        super().__init__()
        self.environment = environment
        self.settings = environment.values
        self.me = environment.member
        self.client = EvaluatorClient(environment)

    def set_phase(self, name: str) -> None:
        self.client.set_phase(name)

    def claim(self, name: str) -> bool:  # noqa: ARG002
        return False

    def leave(self, within_s: float, cause: str) -> None:
        """Leave the run on notice; an evaluator has no state to hand off."""
        self.client.leave(within_s, cause)

    def report_exception(self, error: BaseException, text: str) -> None:
        self.client.report_exception(error, text)

    def loaded(self, step: int) -> None:
        """Record that the model is now that of `step`."""
        self.step = self.client.step = step

    def close(self) -> None:
        self.client.close()


class EvaluatorClient(CoordinatorClient):
    """Connection of an evaluator to the coordinator.

    Reports go one at a time: the next is sent when the coordinator has confirmed the one before, and a report that was
    not confirmed is sent again after every hello. So each one arrives, in order, however often the connection breaks;
    and as the coordinator compares a report with the last one only, none counts twice.

    `announced` is the step of the last checkpoint that trainers reported, with the time it was heard of.
    """

    def __init__(self, environment: MemberEnvironment) -> None:
        super().__init__(environment, credentials.read(environment.token_file, environment.url))
        self._handlers |= {
            messages.EvaluationStatusMsg: self._on_evaluation_status,
            messages.CheckpointWrittenMsg: self._on_checkpoint_written,
            messages.EvictedMsg: self._on_evicted,
        }
        self.address = Address(environment.host, 0)
        self.announced: tuple[int, float] | None = None
        self._evaluation_status: messages.EvaluationStatusMsg | None = None
        self._unconfirmed: deque[messages.EvaluatedMsg] = deque()
        self._uplink.open()

    @property
    def training_finished(self) -> bool:
        """Whether training is over, so that no further checkpoint will appear."""
        return self._finished

    def evaluation_status(self) -> messages.EvaluationStatusMsg:
        """Block until the coordinator has sent the state of the evaluation, and return the newest."""
        with self._changed:
            self._wait_until(
                lambda: self._evaluation_status is not None or self._leaving is not None, "the coordinator to answer"
            )
            self.raise_if_leaving()
            assert self._evaluation_status is not None
            return self._evaluation_status

    def report(self, result: messages.EvaluatedMsg) -> None:
        """Send an evaluation, after those that the coordinator has not confirmed yet."""
        with self._changed:
            self._unconfirmed.append(result)
            if len(self._unconfirmed) == 1:
                self._send(result)

    def wait_until_confirmed(self) -> None:
        """Block until the coordinator has confirmed every report, or this process has to leave."""
        with self._changed:
            self._wait_until(lambda: not self._unconfirmed or self._leaving is not None, "the coordinator to answer")

    def pause(self, seconds: float) -> None:
        """Block until a message arrives, but at most `seconds`; raise MemberExit if this process has to leave."""
        with self._changed:
            self.raise_if_leaving()
            self._changed.wait(seconds)
            self.raise_if_leaving()

    def raise_if_leaving(self) -> None:
        """Raise MemberExit, or the connection's error, if this process has to leave the run."""
        if self._error is not None:
            raise self._error
        if self._leaving is not None:
            self._send(messages.LeftMsg(self.step))
            raise self.exit(exit_codes.RESUMABLE, f"left the run: {self._leaving[1]}")

    def exit(self, exit_code: int, reason: str) -> MemberExit:
        """Print why this process ends and return the exception that ends it."""
        sys.stderr.write(f"shoal: {self.me}: {reason}\n")
        return MemberExit(exit_code, reason)

    def close(self) -> None:
        self._uplink.close()

    def _hello(self) -> list[Message]:
        return [*super()._hello(), *list(self._unconfirmed)[:1]]

    # --- messages, in the uplink's thread

    def _on_evaluation_status(self, message: messages.EvaluationStatusMsg) -> None:
        self._evaluation_status = message
        if self._unconfirmed and message.step == self._unconfirmed[0].step:
            self._unconfirmed.popleft()
            if self._unconfirmed:
                self._send(self._unconfirmed[0])

    def _on_checkpoint_written(self, message: messages.CheckpointWrittenMsg) -> None:
        self.announced = (message.step, time.monotonic())

    def _on_evicted(self, _message: messages.EvictedMsg) -> None:
        self._send_hello()
