"""Threads that read batches ahead, for data that is read without holding Python up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shoal.core.validation import checked_int
from shoal.worker.data.fetch import BatchReader, ReadKey, always
from shoal.worker.data.read_ahead_processes import ForkedReaders
from shoal.worker.data.share_loader import Foresight


class Threads:
    """`workers` threads that live as long as their member, and read up to `workers * prefetch` steps ahead.

    When the foresight changes, what no longer fits is dropped, and is not read to its end. What nobody has begun to
    read when it is asked for is read by who asks.
    """

    def __init__(self, source: BatchReader, workers: int, prefetch: int) -> None:
        self._source, self._workers, self._depth = source, workers, depth(workers, prefetch)
        self._asked: dict[ReadKey, _ReadTask] = {}
        self._queue: deque[_ReadTask] = deque()
        self._some = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        return self._source.pids if isinstance(self._source, ForkedReaders) else ()

    def start(self) -> None:
        """Start the threads; none of them keeps the process from ending."""
        if not self._threads and not self._closed:
            if isinstance(self._source, ForkedReaders):
                self._source.start()
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._workers)]
            for thread in self._threads:
                thread.start()

    def get(self, key: ReadKey, foresee: Foresight) -> Any:
        """What the source gives for `key`; meanwhile the threads go on with the steps that `foresee` names."""
        if key.bare:
            return self._source.read(key, always)
        reading = self._asked.pop(key, None)
        self._plan(key.step, foresee)
        if reading is None or reading.take():
            return self._source.read(key, always)
        return reading.future.result()

    def look_ahead(self, step: int, foresee: Foresight) -> None:
        """Read what is foreseen after `step`, in which nothing is asked for; waits for nothing."""
        self._plan(step, foresee)

    def close(self) -> None:
        """End the threads, without waiting for what one of them may be held up by."""
        with self._some:
            self._closed = True
            self._queue.clear()
            self._some.notify_all()
        for reading in self._asked.values():
            reading.void = True
        self._asked.clear()
        if isinstance(self._source, ForkedReaders):
            self._source.close()

    def _plan(self, step: int, foresee: Foresight) -> None:
        self.start()
        wanted = [key for key in map(foresee, range(step + 1, step + self._depth + 1)) if key is not None]
        for key in self._asked.keys() - set(wanted):
            self._asked.pop(key).void = True
        for key in wanted:
            if key not in self._asked:
                self._asked[key] = reading = _ReadTask(key)
                with self._some:
                    self._queue.append(reading)
                    self._some.notify()

    def _work(self) -> None:
        while (reading := self._next()) is not None:
            if reading.take():
                reading.read(self._source.read)
            # Or it would be held until the next one comes.
            del reading

    def _next(self) -> _ReadTask | None:
        with self._some:
            self._some.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()


class _ReadTask:
    """A key that somebody may read; who takes it first does."""

    def __init__(self, key: ReadKey) -> None:
        self.key, self.void = key, False
        self.future: Future[Any] = Future()
        self._free = threading.Lock()

    def take(self) -> bool:
        return not self.void and self._free.acquire(blocking=False)

    def read(self, read: Callable[[ReadKey, Callable[[int], bool]], Any]) -> None:
        try:
            self.future.set_result(read(self.key, lambda _: not self.void))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the batch is asked for
            self.future.set_exception(error)


def depth(workers: int, prefetch: int) -> int:
    """How many steps are read ahead."""
    return checked_int("workers", workers, 0) * checked_int("prefetch", prefetch)
