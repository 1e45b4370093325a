"""Processes that read data, for what holds Python up: they live as long as their member, and never longer."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import queue
import signal
from multiprocessing.connection import Connection
from typing import Any

from shoal.errors import LoaderDied, ShoalError
from shoal.worker.data.fetch import BatchReader, ReadKey, Watch, always

PR_SET_PDEATHSIG = 1
CLOSE_S = 2.0
FEWER = "ask for fewer workers, or workers=0 to see the cause"


class ForkedReaders:
    """Reads a source in processes that are forked when it is started; whoever asks waits for one that is free."""

    def __init__(self, source: BatchReader, workers: int) -> None:
        self.noun = source.noun
        self._source, self._count, self._owner = source, workers, os.getpid()
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(one.process.pid or 0 for one in self._workers)

    def start(self) -> None:
        """Fork, from a thread that lives as long as the member: the processes die with it."""
        if self._workers:
            return
        self._workers = [_Worker(self._source) for _ in range(self._count)]
        for one in self._workers:
            self._free.put(one)
        # multiprocessing ends its children by SIGTERM, which they ignore: be there before it at exit.
        atexit.register(self.close)

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        """What the source gives for this key, wherever it is read."""
        self.start()
        worker = self._free.get()
        try:
            return worker.read(key) if watch(key.start) else None
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End the processes."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        for one in self._workers:
            one.process.kill()
        for one in self._workers:
            one.process.join(CLOSE_S)


class _Worker:
    def __init__(self, source: BatchReader) -> None:
        self._here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_serve, args=(source, there, os.getpid()), daemon=True)
        self.process.start()
        there.close()

    def read(self, key: ReadKey) -> Any:
        try:
            self._here.send(key)
            found = self._here.recv()
        except (EOFError, OSError) as error:
            self.process.join(CLOSE_S)
            code = self.process.exitcode
            why = f"its exit code is {code}" if code is not None else "its pipe is closed"
            raise LoaderDied(f"data worker {self.process.pid} ended", why=why, do=FEWER) from error
        if isinstance(found, _ReaderError):
            raise found.error()
        return found


class _ReaderError:
    """What a worker answers instead of batches; notes do not travel with an error."""

    def __init__(self, error: ShoalError) -> None:
        self._told, self._notes = error, list(getattr(error, "__notes__", ()))

    def error(self) -> ShoalError:
        for note in self._notes:
            self._told.add_note(note)
        return self._told


def _serve(source: BatchReader, here: Connection, parent: int) -> None:
    """The life of a worker: it leaves signals to its member, and dies with it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    # A notice reaches the whole process tree; the member still needs its data to finish the step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            key = here.recv()
        except EOFError:
            os._exit(0)
        try:
            here.send(source.read(key, always))
        except ShoalError as error:
            here.send(_ReaderError(error))
