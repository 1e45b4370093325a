"""Lines of members: clean, complete, bounded."""

from __future__ import annotations

import os

import pytest

from shoal.agent.log_tail import BATCH_CHARACTERS, BATCH_LINES, LAST_LINES, LineSplitter, LogRateLimit, LogTail, batches


def test_lines_are_complete_however_the_bytes_arrive():
    lines = LineSplitter()
    assert lines.feed(b"on") == []
    assert lines.feed(b"e\ntwo\nth") == ["one", "two"]
    assert lines.feed("ré\n".encode()[:2]) == []
    assert lines.finish() == ["thr\ufffd"]
    assert lines.finish() == []


def test_characters_split_between_reads_are_joined():
    lines = LineSplitter()
    data = "größe\n".encode()
    assert lines.feed(data[:3]) + lines.feed(data[3:]) == ["größe"]


def test_progress_bar_shows_its_last_state_and_takes_no_memory():
    lines = LineSplitter()
    for percent in range(1000):
        assert lines.feed(b"\r%d%% " % percent + b"#" * 1000) == []
    (shown,) = lines.feed(b"\r100%\n")
    assert shown == "100%"


def test_windows_line_ends_are_removed():
    assert LineSplitter().feed(b"a\r\nb\r\n") == ["a", "b"]


def test_control_characters_are_replaced_but_tabs_and_colours_stay():
    assert LineSplitter().feed(b"a\x00b\x08\tc\x1b[31m\x7f\xff\n") == ["a\ufffdb\ufffd\tc\x1b[31m\ufffd\ufffd"]


def test_endless_line_takes_bounded_memory_and_says_how_much_is_missing():
    lines = LineSplitter()
    for _ in range(100):
        assert lines.feed(b"x" * 100_000) == []
    (line,) = lines.feed(b"\n")
    assert line == "x" * 2000 + f"… ({100 * 100_000 - 2000} more)"


def test_batches_are_bounded_by_lines_and_by_size():
    assert batches([]) == []
    assert [len(batch) for batch in batches(["x"] * (BATCH_LINES + 1))] == [BATCH_LINES, 1]
    assert all(sum(map(len, batch)) <= BATCH_CHARACTERS for batch in batches(["y" * 2000] * 100))


def test_excess_lines_are_dropped_with_a_mark():
    rate_limit = LogRateLimit(per_s=10.0, burst=5.0)
    assert rate_limit.admit(["a"] * 7, now=100.0) == ["a"] * 5
    assert rate_limit.admit(["b"], now=100.0) == []
    assert rate_limit.admit(["c"], now=100.2) == ["… 3 lines are in the member's file only", "c"]


def test_last_lines_are_never_dropped():
    rate_limit = LogRateLimit(per_s=10.0, burst=5.0)
    lines = [str(number) for number in range(1000)]
    admitted = rate_limit.admit(lines, now=1.0, last=True)
    assert admitted == [*lines[:5], f"… {995 - LAST_LINES} lines are in the member's file only", *lines[-LAST_LINES:]]


def test_dropped_last_lines_are_sent_at_the_end():
    rate_limit = LogRateLimit(per_s=10.0, burst=5.0)
    rate_limit.admit(["a"] * 5, now=1.0)
    assert rate_limit.admit(["b", "ValueError: bad"], now=1.0) == []
    assert rate_limit.admit([], now=1.0, last=True) == ["b", "ValueError: bad"]


def test_no_mark_without_dropped_lines():
    assert LogRateLimit().admit(["a", "b"], now=1.0, last=True) == ["a", "b"]


def test_tail_follows_a_file_that_does_not_exist_yet(tmp_path):
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read(1.0) == []
    path.write_bytes(b"one\ntwo")
    assert tail.read(1.1) == ["one"]
    with path.open("ab") as file:
        file.write(b"!\n\n")
    assert tail.read(1.2) == ["two!", ""]
    assert tail.last_line == "two!"
    tail.close()


def test_tail_far_behind_skips_with_a_mark(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"start\n")
    tail = LogTail(path)
    tail.read(1.0)
    with path.open("ab") as file:
        file.write(b"x" * 99 + b"\n")
        file.truncate(10 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nend\n")
    lines = tail.read(2.0, last=True)
    assert "bytes are in the member's file only" in lines[0]
    assert lines[-1] == "end"
    tail.close()


@pytest.mark.parametrize("data", [b"", b"\n", b"\r", b"\r\n", b"\n\n\n"])
def test_empty_and_unfinished_input_is_accepted(data):
    lines = LineSplitter()
    lines.feed(data)
    lines.finish()
