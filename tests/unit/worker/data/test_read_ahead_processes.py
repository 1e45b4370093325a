from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.errors import LoaderDied, SampleFailed
from shoal.worker.data.fetch import ReadKey, Watch, always, sample_failure
from shoal.worker.data.read_ahead_processes import ForkedReaders


class Source:
    """Answers with the process that read; step 1 fails, and step 2 ends the process."""

    noun = "sample"

    def read(self, key: ReadKey, watch: Watch) -> Any:
        if key.step == 1:
            raise sample_failure("sample 1 cannot be read", "dataset[1]", "try it", KeyError("no such file"))
        if key.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), key.start


@contextmanager
def readers(workers: int) -> Iterator[ForkedReaders]:
    forked = ForkedReaders(Source(), workers)
    try:
        yield forked
    finally:
        forked.close()


def key(step: int, start: int = 0) -> ReadKey:
    return ReadKey(step, start, start + 1, None)


def test_data_is_read_in_another_process() -> None:
    with readers(1) as forked:
        pid, start = forked.read(key(0, 7), always)
        assert (pid,) == forked.pids
        assert pid != os.getpid()
        assert start == 7


def test_read_that_is_no_longer_wanted_is_not_begun() -> None:
    with readers(1) as forked:
        assert forked.read(key(2), lambda _: False) is None
        assert forked.read(key(0), always)


def test_error_of_the_dataset_arrives_with_its_traceback() -> None:
    with readers(1) as forked:
        with pytest.raises(SampleFailed, match="sample 1") as caught:
            forked.read(key(1), always)
        assert any("no such file" in note for note in caught.value.__notes__)
        assert forked.read(key(0), always)


def test_process_that_was_killed_is_reported_with_its_exit_code() -> None:
    with readers(1) as forked, pytest.raises(LoaderDied, match="exit code is -9"):
        forked.read(key(2), always)


def test_processes_survive_a_notice_and_end_with_close() -> None:
    with readers(2) as forked:
        served, _ = forked.read(key(0), always)
        os.kill(served, signal.SIGTERM)
        first, second = forked.pids
        # A caller gets the process that has been free for longest: both are asked.
        assert {forked.read(key(0), always)[0] for _ in range(2)} == {first, second}
    with pytest.raises(ProcessLookupError):
        os.kill(served, 0)
