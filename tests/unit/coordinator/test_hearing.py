"""Who is heard first, and what members are told of the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from shoal.coordinator.dispatch import to_members
from shoal.coordinator.http.routes import _converse
from shoal.core.membership.events import StopMembers
from shoal.exit_codes import RESUMABLE
from shoal.wire.member_messages import StopMsg


class Line:
    """A connection on which something comes when the test says so."""

    def __init__(self) -> None:
        self.closed = False
        self.socket = self
        self.come: Callable[[str], None] = lambda _data: None

    async def accept(self) -> None: ...

    def listen(self, come: Callable[[str], None], _over: Callable[[], None]) -> None:
        self.come = come


def test_what_a_member_said_is_heard_before_what_its_agent_says_of_its_end() -> None:
    heard: list[str] = []

    async def both() -> None:
        agent: Any = Line()
        member: Any = Line()
        await _converse(agent, agent, heard.append, lambda: True, lambda: None, last=True)
        await _converse(member, member, heard.append, lambda: True, lambda: None)
        # The loop reads both sockets in one turn, in whichever order.
        agent.come("it has ended")
        member.come("I leave")
        await asyncio.sleep(0)

    asyncio.run(both())
    assert heard == ["I leave", "it has ended"]


def test_nothing_is_heard_of_a_connection_that_was_closed_meanwhile() -> None:
    heard: list[str] = []

    async def closed() -> None:
        agent: Any = Line()
        await _converse(agent, agent, heard.append, lambda: True, lambda: None, last=True)
        agent.come("too late")
        agent.closed = True
        await asyncio.sleep(0)

    asyncio.run(closed())
    assert heard == []


def test_members_end_as_done_or_as_to_be_gone_on_with_whatever_the_run_ends_as() -> None:
    for of_run, of_member in ((0, 0), (6, RESUMABLE), (130, RESUMABLE)):
        told = to_members(StopMembers(("local/0",), "the budget is spent", True, of_run))
        assert told == (("local/0",), StopMsg("the budget is spent", True, of_member))
