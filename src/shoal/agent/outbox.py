"""What the agent still has to tell the coordinator. Exits are never forgotten; log lines may be, with a mark."""

from __future__ import annotations

import asyncio
from collections import deque

from shoal.wire.agent_messages import FromAgent, LogLinesMsg, MemberExitedMsg

MAX_EVENTS = 10_000
MAX_LOG_BATCHES = 500
TELL_AGAIN_S = 60.0


class Outbox:
    """Two queues in order of urgency: events, then log lines.

    A message that was sent just before the connection broke may never have arrived, so exits of the last minute
    are told again after a reconnect; the incarnation makes the second telling harmless.
    """

    def __init__(self, tell_again_s: float = TELL_AGAIN_S) -> None:
        self._events: deque[FromAgent] = deque(maxlen=MAX_EVENTS)
        self._logs: deque[LogLinesMsg] = deque()
        self._told: deque[tuple[float, MemberExitedMsg]] = deque()
        self._tell_again_s = tell_again_s
        self._lost_lines = 0
        self._filled = asyncio.Event()

    def put(self, message: FromAgent) -> None:
        if isinstance(message, LogLinesMsg):
            self._logs.append(message)
            if len(self._logs) > MAX_LOG_BATCHES:
                self._lost_lines += len(self._logs.popleft().lines)
        else:
            if isinstance(message, MemberExitedMsg):
                self._logs_first(message)
            self._events.append(message)
        self._filled.set()

    def __len__(self) -> int:
        return len(self._events) + len(self._logs)

    async def wait(self) -> None:
        """Until there is something to send."""
        await self._filled.wait()

    def take(self) -> FromAgent | None:
        """The next message to send; None if there is none."""
        if self._events:
            return self._events.popleft()
        if not self._logs:
            self._filled.clear()
            return None
        first = self._logs.popleft()
        if self._lost_lines:
            mark = f"… {self._lost_lines} lines were not sent while the coordinator was away"
            first = LogLinesMsg(first.run, first.member, (mark, *first.lines))
            self._lost_lines = 0
        return first

    def put_back(self, message: FromAgent) -> None:
        """It could not be sent: it is the next one again."""
        self._events.appendleft(message)
        self._filled.set()

    def sent(self, message: FromAgent, now: float) -> None:
        """This message is on its way."""
        if isinstance(message, MemberExitedMsg):
            self._told.append((now, message))
        self._forget_old(now)

    def connection_lost(self, now: float) -> None:
        """Put the exits that may have been lost with it back in front."""
        self._forget_old(now)
        self._events.extendleft(message for _, message in reversed(self._told))
        self._told.clear()
        if self._events:
            self._filled.set()

    def _logs_first(self, exit_: MemberExitedMsg) -> None:
        """A member's last words go before its exit: that is where its reader looks for the cause."""
        last = [batch for batch in self._logs if (batch.run, batch.member) == (exit_.run, exit_.member)]
        self._events.extend(last)
        self._logs = deque(batch for batch in self._logs if (batch.run, batch.member) != (exit_.run, exit_.member))

    def _forget_old(self, now: float) -> None:
        while self._told and now - self._told[0][0] > self._tell_again_s:
            self._told.popleft()
