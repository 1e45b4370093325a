"""Threads that read batches ahead, for data that is read without holding the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shoal.core.validation import checked_int
from shoal.worker.data.fetch import BatchReader, ReadKey, always
from shoal.worker.data.read_ahead_processes import ForkedReaders
from shoal.worker.data.share_loader import PredictRead


class ReadAheadThreads:
    """`workers` threads that live as long as their member and read up to `workers * prefetch` steps ahead.

    When the prediction changes, reads that no longer fit are dropped in the middle. A read that no thread has begun
    when it is requested is done by the requesting thread.
    """

    def __init__(self, source: BatchReader, workers: int, prefetch: int) -> None:
        self._source, self._workers, self._depth = source, workers, depth(workers, prefetch)
        self._tasks: dict[ReadKey, _ReadTask] = {}
        self._queue: deque[_ReadTask] = deque()
        self._changed = threading.Condition()
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

    def get(self, key: ReadKey, predict: PredictRead) -> Any:
        """Return the data of `key`; meanwhile the threads continue with the steps that `predict` names."""
        if key.bare:
            return self._source.read(key, always)
        task = self._tasks.pop(key, None)
        self._plan(key.step, predict)
        if task is None or task.take():
            return self._source.read(key, always)
        return task.future.result()

    def look_ahead(self, step: int, predict: PredictRead) -> None:
        """Start reading what is predicted after `step`, for which nothing is requested; return at once."""
        self._plan(step, predict)

    def close(self) -> None:
        """End the threads, without waiting for a read that may block."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for task in self._tasks.values():
            task.dropped = True
        self._tasks.clear()
        if isinstance(self._source, ForkedReaders):
            self._source.close()

    def _plan(self, step: int, predict: PredictRead) -> None:
        self.start()
        wanted = [key for key in map(predict, range(step + 1, step + self._depth + 1)) if key is not None]
        for key in self._tasks.keys() - set(wanted):
            self._tasks.pop(key).dropped = True
        for key in wanted:
            if key not in self._tasks:
                self._tasks[key] = task = _ReadTask(key)
                with self._changed:
                    self._queue.append(task)
                    self._changed.notify()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            if task.take():
                task.read(self._source.read)
            # Or its batches would stay in memory until the next task arrives.
            del task

    def _next(self) -> _ReadTask | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            return None if self._closed else self._queue.popleft()


class _ReadTask:
    """A key to be read by the first thread that takes it."""

    def __init__(self, key: ReadKey) -> None:
        self.key, self.dropped = key, False
        self.future: Future[Any] = Future()
        self._free = threading.Lock()

    def take(self) -> bool:
        return not self.dropped and self._free.acquire(blocking=False)

    def read(self, read: Callable[[ReadKey, Callable[[int], bool]], Any]) -> None:
        try:
            self.future.set_result(read(self.key, lambda _: not self.dropped))
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is requested
            self.future.set_exception(error)


def depth(workers: int, prefetch: int) -> int:
    """Return how many steps are read ahead."""
    return checked_int("workers", workers, 0) * checked_int("prefetch", prefetch)
