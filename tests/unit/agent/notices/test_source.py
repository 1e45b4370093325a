"""Notice sources by name."""

from __future__ import annotations

import asyncio

import pytest

from shoal.agent.notices.source import Notice, PollingSource, open_source
from shoal.errors import BadNoticeSource


def test_unknown_source_is_refused():
    with pytest.raises(BadNoticeSource, match="unknown notice source 'oracle'"):
        open_source("oracle")


def test_each_notice_is_yielded_once_and_errors_are_no_notice():
    polls = iter([None, OSError("away"), Notice(30, "x", "", "1"), Notice(29, "x", "", "1"), Notice(9, "x", "", "2")])

    def poll() -> Notice | None:
        result = next(polls)
        if isinstance(result, OSError):
            raise result
        return result

    async def first_two() -> list[float]:
        deadlines: list[float] = []
        async for notice in PollingSource(poll, 0.0).notices():
            deadlines.append(notice.within_s)
            if len(deadlines) == 2:
                break
        return deadlines

    assert asyncio.run(first_two()) == [30, 9]
