"""A member's reactions to messages of the coordinator, and what it sends again after a new hello."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from shoal import errors
from shoal.core.world import Address
from shoal.settings import RunSettings
from shoal.wire import member_messages as messages
from shoal.wire.credentials import Credentials
from shoal.worker.session.coordinator_client import CoordinatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.uplink import MemberUplink

ENVIRONMENT = MemberEnvironment(
    "http://127.0.0.1:9", "token", "r", "local/0", "1", "127.0.0.1", {}, RunSettings(), "/runs/r"
)


class Client(CoordinatorClient):
    """A client whose messages are kept in `sent`."""

    def __init__(self) -> None:
        super().__init__(ENVIRONMENT, Credentials("token"))
        self.address = Address("127.0.0.1", 9)
        self.sent: list[Any] = []

    def _send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def client() -> Client:
    return Client()


def test_heartbeat_interval_follows_the_welcome(client: Client) -> None:
    client._on_message(messages.WelcomeMsg(heartbeat_s=0.75, lease_s=3.0, coordinator="c", started=False))
    assert client._uplink.heartbeat_s == 0.75


def test_later_notice_counts_if_its_deadline_is_earlier(client: Client) -> None:
    client.leave(60.0, "Slurm has sent its signal")
    client.leave(8.0, "another job takes its place")
    client.leave(30.0, "its engine ends it")
    assert [(round(message.within_s), message.cause) for message in client.sent] == [
        (60, "Slurm has sent its signal"),
        (8, "another job takes its place"),
    ]
    assert client._leaving is not None
    assert client._leaving[1] == "another job takes its place"


def test_claim_blocks_until_it_is_granted(client: Client) -> None:
    granted = messages.ClaimGrantedMsg("model.pt")
    threading.Timer(0.05, client._on_message, [granted]).start()
    assert client.claim("model.pt")
    assert client.sent == [messages.ClaimMsg("model.pt")]


def test_claim_that_another_member_completed_is_refused(client: Client) -> None:
    threading.Timer(0.05, client._on_message, [messages.ClaimAlreadyDoneMsg("model.pt")]).start()
    assert not client.claim("model.pt")


def test_wait_for_a_coordinator_that_is_gone_for_good_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    client.settings = msgspec.structs.replace(client.settings, orphan_timeout_s=0.05)
    with pytest.raises(errors.CoordinatorUnreachable, match="local/0 gives up: the coordinator has not answered"):
        client.claim("model.pt")
    monkeypatch.setattr(MemberUplink, "down_for_s", 0.0)
    threading.Timer(0.1, client._on_message, [messages.ClaimGrantedMsg("best.pt")]).start()
    assert client.claim("best.pt"), "a coordinator that answers is waited for"


def test_hello_repeats_open_claims_notices_and_adjustments(client: Client) -> None:
    assert not client.try_claim("writer")
    client.complete_claim("model.pt")
    client.leave(30.0, "spot")
    client.report_adjustment(7, "shares", {"local/0": 3}, "it is slower", send=False)
    hello, *repeated = client._hello()
    assert isinstance(hello, messages.MemberHelloMsg)
    assert [type(message) for message in repeated] == [
        messages.LeavingMsg,
        messages.ClaimMsg,
        messages.ClaimDoneMsg,
        messages.AdjustmentMsg,
    ]
