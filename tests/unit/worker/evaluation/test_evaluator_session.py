"""Reports of an evaluator: each one reaches the coordinator, once and in order, whatever the connection does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import exit_codes
from shoal.core.membership import events as ev
from shoal.core.runs import evaluation
from shoal.core.world import Address
from shoal.settings import RunSettings
from shoal.wire import member_messages as messages
from shoal.worker.evaluation.evaluator_session import EvaluatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.session import MemberExit


class Client(EvaluatorClient):
    """A client that talks to a coordinator's evaluation state while `connected`; `answer` lets that reply."""

    def __init__(self, token_file: Path) -> None:
        self.connected = True
        self.state = evaluation.EvaluationState()
        self.recorded: list[int] = []
        self._arrived: list[Any] = []
        environment = MemberEnvironment(
            "http://127.0.0.1:9", str(token_file), "r", "local/evaluator-0", "1", "h", {}, RunSettings(), "/r"
        )
        super().__init__(environment)

    def _send(self, message: Any) -> None:
        if self.connected:
            self._arrived.append(message)

    def answer(self, *, lose_replies: bool = False) -> None:
        while self._arrived:
            message = self._arrived.pop(0)
            event: Any = None
            if isinstance(message, messages.MemberHelloMsg):
                event = ev.MemberConnected(self.me, "1", Address("h", 0))
            elif isinstance(message, messages.EvaluatedMsg):
                event = evaluation.EvaluationReported(self.me, message.step, message.metrics)
            before = self.state.status.evaluations
            self.state, instructions = evaluation.decide(self.state, event, 0.0)
            if self.state.status.evaluations > before:
                self.recorded.append(message.step)
            for reply in instructions:
                if isinstance(reply, evaluation.SendEvaluationStatus) and not lose_replies:
                    self._on_message(messages.EvaluationStatusMsg(reply.status.step))

    def reconnect(self) -> None:
        self.connected = True
        self._send_hello()
        self.answer()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    token = tmp_path / "token"
    token.write_text("secret")
    made = Client(token)
    yield made
    made.close()


def report(client: Client, *steps: int) -> None:
    for step in steps:
        client.report(messages.EvaluatedMsg(step, {"loss": 1.0}))


def test_reports_made_without_a_connection_are_all_sent_later(client: Client) -> None:
    report(client, 10)
    client.answer()
    client.connected = False
    report(client, 20, 30, 40)
    client.reconnect()
    report(client, 50)
    client.answer()
    client.wait_until_confirmed()
    assert client.recorded == [10, 20, 30, 40, 50]


def test_report_whose_confirmation_is_lost_counts_once(client: Client) -> None:
    report(client, 10, 20)
    client.answer(lose_replies=True)
    assert client.recorded == [10]
    client.reconnect()
    client.wait_until_confirmed()
    assert client.recorded == [10, 20]


def test_status_of_an_earlier_evaluator_confirms_nothing(client: Client) -> None:
    client.connected = False
    report(client, 20)
    client._on_message(messages.EvaluationStatusMsg(10))
    assert client.evaluation_status().step == 10
    client.reconnect()
    assert client.recorded == [20]


def test_evaluator_with_notice_leaves_instead_of_waiting(client: Client) -> None:
    client.leave(30.0, "spot")
    with pytest.raises(MemberExit) as left:
        client.pause(60.0)
    assert left.value.code == exit_codes.RESUMABLE
