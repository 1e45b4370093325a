"""Worker processes that read batches ahead, and that live as long as their member: no world change restarts them."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.sharedctypes import RawArray
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from shoal.errors import LoaderDied, SampleFailed
from shoal.worker.data.fetch import BatchReader, ReadKey
from shoal.worker.data.share_loader import PredictRead

Handler = Callable[[int, FrameType | None], Any] | int | None

PR_SET_PDEATHSIG = 1
CLOSE_S = 2.0
FEWER = "ask for fewer workers, or workers=0 to see the cause"


class ReadRequest(NamedTuple):
    """A key on its way to a worker; without one the worker has nothing to do and answers at once."""

    serial: int
    key: ReadKey | None


class WorkerError(NamedTuple):
    """What a worker answers instead of batches."""

    error: SampleFailed
    notes: tuple[str, ...]


class WorkerPool:
    """One DataLoader for the life of the member.

    Its sampler asks for the steps ahead as they are foreseen at that moment, always `depth` requests at a time. When
    the foresight changes, requests in flight that no longer fit are marked void, and the workers skip them.
    """

    def __init__(self, source: BatchReader, workers: int, prefetch: int, pin_memory: bool) -> None:
        self._owner = os.getpid()
        self._noun = source.noun
        self._depth = workers * prefetch
        self._void = RawArray(ctypes.c_byte, 2 * self._depth)
        self._reading = RawArray(ctypes.c_int64, [-1] * workers)
        self._pids = RawArray(ctypes.c_int64, workers)
        self._urgent: ReadKey | None = None
        self._flying: dict[int, ReadKey | None] = {}
        self._ready: dict[ReadKey, Any] = {}
        self._serial = 0
        self._now: ReadKey | None = None
        self._foresee: PredictRead = _nothing
        self._loader: DataLoader[Any] | None = DataLoader(
            _WorkerDataset(source, self._void, self._reading),  # type: ignore[arg-type]
            batch_size=None,
            sampler=_RequestSampler(self._next),
            num_workers=workers,
            prefetch_factor=prefetch,
            persistent_workers=True,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            worker_init_fn=_WorkerInit(self._owner, self._pids),
            generator=torch.Generator(),
        )
        self._stream: Iterator[Any] | None = None
        self._processes: list[Any] = []

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def start(self) -> None:
        """Start the workers, from a thread that lives as long as the member: they die with it."""
        if self._stream is not None or self._loader is None:
            return
        before = set(multiprocessing.active_children())
        handler = signal.getsignal(signal.SIGCHLD)
        self._stream = iter(self._loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        # torch's handler raises wherever the main thread happens to be; ours does so only while we wait for data.
        _handle_children(handler)
        # multiprocessing ends its children by SIGTERM, which they ignore: be there before it at exit.
        atexit.register(self.close)

    def get(self, key: ReadKey, foresee: PredictRead) -> Any:
        """What the source gives for `key`; meanwhile the workers go on with the steps that `foresee` names."""
        self._now, self._foresee = key, cache(foresee)
        if key not in self._ready and key not in self._flying.values():
            self._urgent = key
            self._forget()
        self.start()
        while key not in self._ready:
            self._receive()
        self._foresee = _nothing
        answer = self._ready.pop(key)
        self._ready = {other: batches for other, batches in self._ready.items() if other.step > key.step}
        if isinstance(answer, WorkerError):
            for note in answer.notes:
                answer.error.add_note(note)
            raise answer.error
        return answer

    def look_ahead(self, step: int, foresee: PredictRead) -> None:
        """Set idle workers to what is foreseen after `step`, in which nothing is asked of them; waits for nothing."""
        self._now, self._foresee = ReadKey(step, 0, 0, None), cache(foresee)
        self._forget()
        if self._following() is not None:
            self.start()
            while next(iter(self._flying.values())) is None and self._following() is not None:
                self._receive()
        self._foresee = _nothing

    def close(self) -> None:
        """End the workers: politely for a moment, then surely."""
        if os.getpid() != self._owner:
            return  # a forked child that cleans up behind itself
        atexit.unregister(self.close)
        self._void[:] = [1] * len(self._void)
        stragglers = threading.Timer(CLOSE_S, _kill, (self._processes,))
        stragglers.daemon = True
        stragglers.start()
        self._loader = self._stream = None
        stragglers.cancel()
        _kill(self._processes)

    def _forget(self) -> None:
        """Drop what was read or asked for in vain."""
        for serial, key in self._flying.items():
            if key is not None and not self._useful(key):
                self._void[serial % len(self._void)] = 1
                self._flying[serial] = None
        self._ready = {key: answer for key, answer in self._ready.items() if self._useful(key)}

    def _useful(self, key: ReadKey) -> bool:
        assert self._now is not None
        ahead = key.step - self._now.step
        return key == self._now or (0 < ahead <= self._depth and key == self._foresee(key.step))

    def _next(self) -> ReadRequest:
        key, self._urgent = self._urgent or self._following(), None
        request = ReadRequest(self._serial, key)
        self._void[request.serial % len(self._void)] = 0
        self._flying[request.serial] = key
        self._serial += 1
        return request

    def _following(self) -> ReadKey | None:
        """The next step ahead that nobody reads yet."""
        if self._now is None:
            return None
        taken = {*self._ready, *self._flying.values()}
        steps = range(self._now.step + 1, self._now.step + self._depth + 1)
        return next((key for key in map(self._foresee, steps) if key is not None and key not in taken), None)

    def _receive(self) -> None:
        if self._stream is None:
            raise RuntimeError("the loader is closed")
        handler = _handle_children(self._check)
        try:
            self._check()
            serial, answer = next(self._stream)
        except RuntimeError as error:
            self._check()
            raise LoaderDied("the data workers do not answer", why=str(error), do=FEWER) from error
        finally:
            _handle_children(handler)
        key = self._flying.pop(serial)
        if key is not None and answer is not None:
            self._ready[key] = answer

    def _check(self, *_: Any) -> None:
        """Raise if a worker has ended; also what SIGCHLD calls."""
        for process in self._processes:
            if not process.is_alive():
                reading = self._reading[self._pids[:].index(process.pid)] if process.pid in self._pids[:] else -1
                what = f"data worker {process.pid} ended" + (
                    f" while it read {self._noun} {reading}" if reading >= 0 else ""
                )
                raise LoaderDied(what, why=_ending(process.exitcode), do=FEWER)


class _RequestSampler:
    """A sampler without an end: every request is made at the moment it is sent."""

    def __init__(self, following: Callable[[], ReadRequest]) -> None:
        self._following = following

    def __iter__(self) -> Iterator[ReadRequest]:
        while True:
            yield self._following()


class _WorkerDataset:
    """The dataset that the workers see: indexed by requests, gives (serial, answer)."""

    def __init__(self, source: BatchReader, void: Any, reading: Any) -> None:
        self._source = source
        self._void = void
        self._reading = reading

    def __getitem__(self, request: ReadRequest) -> tuple[int, Any]:
        return request.serial, None if request.key is None else self._read(
            request.serial % len(self._void), request.key
        )

    def _read(self, slot: int, key: ReadKey) -> Any:
        info = get_worker_info()
        assert info is not None

        def watch(sample: int) -> bool:
            self._reading[info.id] = sample
            return not self._void[slot]

        try:
            return self._source.read(key, watch)
        except SampleFailed as error:
            return WorkerError(error, tuple(error.__notes__))
        finally:
            self._reading[info.id] = -1


class _WorkerInit:
    """Makes a worker one that never outlives its member, and that leaves signals to it."""

    def __init__(self, parent: int, pids: Any) -> None:
        self._parent = parent
        self._pids = pids

    def __call__(self, worker: int) -> None:
        self._pids[worker] = os.getpid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        # A notice reaches the whole process tree; the member still needs its data to finish the step.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _nothing(_: int) -> None:
    return None


def _unchanged(answer: Any) -> Any:
    return answer


def _handle_children(handler: Handler) -> Handler:
    """Set the handler of SIGCHLD, where that can be done; returns the one before."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGCHLD, handler)


def _ending(exit_code: int) -> str:
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"it exited with code {exit_code}"


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
