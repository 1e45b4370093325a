"""Outbox: messages that wait to be sent to the coordinator. Exits are never lost; log lines may be, with a mark."""

from __future__ import annotations

import asyncio
from collections import deque

from shoal.core.nouns import counted
from shoal.wire.agent_messages import FromAgent, LogLinesMsg, MemberExitedMsg

MAX_EVENTS = 10_000
MAX_LOG_BATCHES = 500
RESEND_S = 60.0


class Outbox:
    """Two queues: events first, then log lines.

    A message that was sent just before the connection broke may never have arrived. So exits of the last minute are
    sent again after a reconnect; the coordinator recognises repetitions by the incarnation. A member's log lines
    overtake other events when it exits, because readers look for the cause before the exit.
    """

    def __init__(self, resend_s: float = RESEND_S) -> None:
        self._events: deque[FromAgent] = deque(maxlen=MAX_EVENTS)
        self._logs: deque[LogLinesMsg] = deque()
        self._sent_exits: deque[tuple[float, MemberExitedMsg]] = deque()
        self._resend_s = resend_s
        self._dropped_lines = 0
        self._not_empty = asyncio.Event()

    def put(self, message: FromAgent) -> None:
        if isinstance(message, LogLinesMsg):
            self._logs.append(message)
            if len(self._logs) > MAX_LOG_BATCHES:
                self._dropped_lines += len(self._logs.popleft().lines)
        else:
            if isinstance(message, MemberExitedMsg):
                self._put_logs_first(message)
            self._events.append(message)
        self._not_empty.set()

    def __len__(self) -> int:
        return len(self._events) + len(self._logs)

    async def wait(self) -> None:
        """Wait until there is something to send."""
        await self._not_empty.wait()

    def take(self) -> FromAgent | None:
        """Remove and return the next message; None if there is none."""
        if self._events:
            return self._events.popleft()
        if not self._logs:
            self._not_empty.clear()
            return None
        first = self._logs.popleft()
        if self._dropped_lines:
            mark = f"… {counted(self._dropped_lines, 'line')} not sent while the coordinator was away"
            first = LogLinesMsg(first.run, first.member, (mark, *first.lines))
            self._dropped_lines = 0
        return first

    def put_back(self, message: FromAgent) -> None:
        """Return a message that could not be sent to the front."""
        self._events.appendleft(message)
        self._not_empty.set()

    def sent(self, message: FromAgent, now: float) -> None:
        """Record that a message was sent at time `now`."""
        if isinstance(message, MemberExitedMsg):
            self._sent_exits.append((now, message))
        self._drop_old(now)

    def connection_lost(self, now: float) -> None:
        """Return exits that may have been lost with the connection to the front."""
        self._drop_old(now)
        self._events.extendleft(message for _, message in reversed(self._sent_exits))
        self._sent_exits.clear()
        if self._events:
            self._not_empty.set()

    def _put_logs_first(self, exit_: MemberExitedMsg) -> None:
        """Move a member's waiting log lines before its exit."""
        own = [batch for batch in self._logs if (batch.run, batch.member) == (exit_.run, exit_.member)]
        self._events.extend(own)
        self._logs = deque(batch for batch in self._logs if (batch.run, batch.member) != (exit_.run, exit_.member))

    def _drop_old(self, now: float) -> None:
        while self._sent_exits and now - self._sent_exits[0][0] > self._resend_s:
            self._sent_exits.popleft()
