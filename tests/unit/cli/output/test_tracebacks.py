"""Tracebacks in the output of members."""

from __future__ import annotations

from shoal.cli.output.tracebacks import TracebackLog, user_frame

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 7, in main',
    "    step()",
    '  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 9, in step',
    "    raise ValueError(x)",
    "ValueError: no data",
)
CONNECTION = ("", "During handling of the above exception, another exception occurred:", "")


def said(member: str, *lines: str) -> list[tuple[str, str]]:
    return [(member, line) for line in lines]


def test_same_traceback_of_another_member_is_one_line() -> None:
    log = TracebackLog()
    assert log.add(said("a/0", "hello", *TRACEBACK)) == said("a/0", "hello", *TRACEBACK)
    assert log.add(said("a/1", *TRACEBACK, "bye")) == said("a/1", "(same traceback as a/0)", "bye")
    assert log.add(said("a/0", *TRACEBACK)) == said("a/0", "(same traceback as before)")
    assert log.of("a/1") == "\n".join(TRACEBACK)


def test_interleaved_tracebacks_are_kept_apart() -> None:
    log = TracebackLog()
    lines = [pair for line in TRACEBACK for pair in said("a/0", line) + said("a/1", line)]
    assert log.add(lines) == said("a/0", *TRACEBACK) + said("a/1", "(same traceback as a/0)")


def test_other_error_is_shown_in_full() -> None:
    log = TracebackLog()
    log.add(said("a/0", *TRACEBACK))
    other = (*TRACEBACK[:-1], "KeyError: 'x'")
    assert log.add(said("a/1", *other)) == said("a/1", *other)


def test_chained_tracebacks_and_long_messages_belong_together() -> None:
    log = TracebackLog()
    chain = (*TRACEBACK, *CONNECTION, *TRACEBACK[:-1], "shoal.errors.X: error[S303] no", "  why    it broke")
    assert log.add(said("a/0", *chain)) == said("a/0", *chain)
    assert log.of("a/0") == "\n".join(chain)
    assert log.add(said("a/1", *chain, "", "  other")) == said("a/1", "(same traceback as a/0)", "  other")


def test_incomplete_traceback_is_shown_at_the_end() -> None:
    log = TracebackLog()
    assert log.add(said("a/0", *TRACEBACK[:3])) == []
    assert log.flush() == said("a/0", *TRACEBACK[:3])
    assert log.flush() == []


def test_nothing_is_collapsed_if_not_wanted() -> None:
    log = TracebackLog(collapse=False)
    log.add(said("a/0", *TRACEBACK))
    assert log.add(said("a/1", *TRACEBACK)) == said("a/1", *TRACEBACK)


def test_user_frame_is_the_innermost_outside_libraries() -> None:
    assert user_frame("\n".join(TRACEBACK)) == "/home/me/train.py:7: step()"
    assert user_frame("ValueError: no") == ""
