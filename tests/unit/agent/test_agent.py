"""Ways of an agent to end, without processes of members."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.agent import agent as agent_module
from shoal.agent.agent import Agent, AgentSettings
from shoal.errors import CoordinatorUnreachable, HomeUnusable, NoCoordinatorAddress
from shoal.wire.agent_messages import MachineNoticeMsg, StartMemberMsg


def settings(path: Path, url: str = "http://127.0.0.1:9", **changes: object) -> AgentSettings:
    (path / "token").write_text("secret\n")
    return AgentSettings(url, str(path / "token"), "lab-1", path / "agent", **changes)  # type: ignore[arg-type]


def with_agent(path: Path, use: Callable[[Agent], object], **changes: object) -> Agent:
    """Create an agent in a running event loop and use it there."""

    async def create() -> Agent:
        agent = Agent(settings(path, **changes), {"SHOAL_HOME": str(path)})
        result = use(agent)
        if asyncio.iscoroutine(result):
            await result
        return agent

    return asyncio.run(create())


def test_first_signal_is_a_notice_and_a_later_one_skips_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def receive(agent: Agent) -> None:
        agent._on_signal(signal.SIGTERM)
        agent._on_signal(signal.SIGTERM)
        assert agent._ending.is_set()
        assert not agent._second_signal.is_set(), "timeout signals a process and its group at once"
        now[0] += 1.1
        agent._on_signal(signal.SIGTERM)

    agent = with_agent(tmp_path, receive, grace_s=12.0)
    assert agent._second_signal.is_set()
    assert agent._outbox.take() == MachineNoticeMsg(12.0, "SIGTERM", "the agent received SIGTERM")
    assert agent._outbox.take() is None


def test_end_of_the_lifeline_ends_the_agent_with_a_short_grace_period(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    async def close_lifeline(agent: Agent) -> None:
        asyncio.get_running_loop().add_reader(reader, agent._on_lifeline, reader)
        os.close(writer)
        await asyncio.wait_for(agent._ending.wait(), 30.0)

    try:
        agent = with_agent(tmp_path, close_lifeline, grace_s=60.0)
    finally:
        os.close(reader)
    assert agent._grace_s == agent_module._ORPHAN_GRACE_S


def test_agent_that_ends_starts_no_member(tmp_path: Path) -> None:
    def refuse(agent: Agent) -> None:
        agent._end("SIGTERM", 1.0)
        agent._carry_out(StartMemberMsg("r", "m", "i", ("train.py",), "/", {}))
        assert not agent._tasks

    with_agent(tmp_path, refuse)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:9", CoordinatorUnreachable),
        ("http://127.0.0.1:9,http://127.0.0.1:10", NoCoordinatorAddress),
    ],
)
def test_idle_agent_gives_up_a_coordinator_that_stays_away(
    url: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(agent: Agent) -> str:
        return "connection refused"

    monkeypatch.setattr(Agent, "_connect_once", refused)
    with pytest.raises(error, match="did not answer"):
        with_agent(tmp_path, lambda agent: agent._stay_connected(), url=url, idle_s=0.0)


def test_clock_that_jumps_does_not_end_an_agent_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    times = count(1e9, 1e6)

    class Enough(BaseException):
        """The agent still waits."""

    async def refused(agent: Agent) -> str:
        tries.append(time.time())
        if len(tries) == 3:
            raise Enough
        return "connection refused"

    monkeypatch.setattr(Agent, "_connect_once", refused)
    monkeypatch.setattr(time, "time", lambda: next(times))
    with pytest.raises(Enough):
        with_agent(tmp_path, lambda agent: agent._stay_connected(), idle_s=3600.0, orphan_timeout_s=1800.0)


def test_directory_that_cannot_be_created_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("a file")
    with pytest.raises(HomeUnusable, match="log directory") as error:
        with_agent(tmp_path, lambda agent: agent._make_directory())
    assert error.value.do == "use another --dir"
