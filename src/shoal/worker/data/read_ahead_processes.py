"""Processes that read data, for datasets that hold the GIL; they live as long as their member and never longer."""

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
    """Reads a source in forked processes; a caller waits for a free one."""

    def __init__(self, source: BatchReader, workers: int) -> None:
        self.noun = source.noun
        self._source, self._count, self._owner = source, workers, os.getpid()
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def start(self) -> None:
        """Fork the processes; call this from a thread that lives as long as the member, because they die with it."""
        if self._workers:
            return
        self._workers = [_Worker(self._source) for _ in range(self._count)]
        for worker in self._workers:
            self._free.put(worker)
        # multiprocessing ends its children with SIGTERM, which these ignore: run before it at exit.
        atexit.register(self.close)

    def read(self, key: ReadKey, watch: Watch) -> Any | None:
        """Return the data of this key, read in one of the processes."""
        self.start()
        worker = self._free.get()
        try:
            return worker.read(key) if watch(key.start) else None
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Kill the processes."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(CLOSE_S)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, source: BatchReader) -> None:
        self._pipe, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_serve, args=(source, child_end, os.getpid()), daemon=True)
        self.process.start()
        child_end.close()

    def read(self, key: ReadKey) -> Any:
        try:
            self._pipe.send(key)
            reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.process.join(CLOSE_S)
            code = self.process.exitcode
            why = f"its exit code is {code}" if code is not None else "its pipe is closed"
            raise LoaderDied(f"data worker {self.process.pid} ended", why=why, do=FEWER) from error
        if isinstance(reply, _ReaderError):
            raise reply.error()
        return reply


class _ReaderError:
    """Reply of a worker whose read failed: the error and its notes, which pickling would drop."""

    def __init__(self, error: ShoalError) -> None:
        self._error, self._notes = error, list(getattr(error, "__notes__", ()))

    def error(self) -> ShoalError:
        for note in self._notes:
            self._error.add_note(note)
        return self._error


def _serve(source: BatchReader, pipe: Connection, parent: int) -> None:
    """Read keys from the pipe and reply with their data; ignore signals, and die with the member."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    # A notice reaches the whole process tree; the member still needs its data to finish the step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            key = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(source.read(key, always))
        except ShoalError as error:
            pipe.send(_ReaderError(error))
