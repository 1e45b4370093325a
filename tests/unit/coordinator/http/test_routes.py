"""WebSocket routes: the order in which messages are handled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.coordinator.http.routes import _serve


class FakeSocket:
    """A connection and its socket, on which the test receives messages."""

    def __init__(self) -> None:
        self.closed = False
        self.socket = self
        self.receive: Callable[[str], None] = lambda _data: None

    async def accept(self) -> None: ...

    def listen(self, on_message: Callable[[str], None], _on_close: Callable[[], None]) -> None:
        self.receive = on_message


def test_message_of_a_member_is_handled_before_its_agent_reports_the_exit() -> None:
    handled: list[str] = []

    async def both() -> None:
        agent: Any = FakeSocket()
        member: Any = FakeSocket()
        await _serve(agent, agent, handled.append, lambda: True, lambda: None, last=True)
        await _serve(member, member, handled.append, lambda: True, lambda: None)
        # The loop reads both sockets in one turn, in whichever order.
        agent.receive("it has ended")
        member.receive("I leave")
        await asyncio.sleep(0)

    asyncio.run(both())
    assert handled == ["I leave", "it has ended"]


def test_message_on_a_closed_connection_is_dropped() -> None:
    handled: list[str] = []

    async def closed() -> None:
        agent: Any = FakeSocket()
        await _serve(agent, agent, handled.append, lambda: True, lambda: None, last=True)
        agent.receive("too late")
        agent.closed = True
        await asyncio.sleep(0)

    asyncio.run(closed())
    assert handled == []
