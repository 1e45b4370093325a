"""Pool of worker processes that read batches ahead and live as long as their member.

Starting workers takes seconds, so a change of world must not restart them, although it changes which samples this
member needs. A torch DataLoader with persistent workers is used in an unusual way: its sampler never ends and decides
what to request at the moment a request is sent. The states of a request:

- *in flight*: sent to a worker, by serial number; always `depth` of them, as the DataLoader demands. One without a key
  asks for nothing and is answered at once.
- *void*: its batch is no longer needed, because shares or the world changed. It is marked in shared memory, and the
  worker stops reading at the next sample.
- *ready*: received and kept until `get` is called for its step.

Failures: a worker that dies raises LoaderDied in the member's main thread, but only while it waits for data. Data that
cannot be pickled raise SampleFailed there. Workers die with their member (PR_SET_PDEATHSIG), and ignore SIGTERM and
SIGINT, because a member with notice still needs its data to finish the step.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.queues import Queue
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
FEWER_WORKERS = "pass fewer workers, or workers=0 to see the cause"


class ReadRequest(NamedTuple):
    """Request to a worker; one without a key is answered at once."""

    serial: int
    key: ReadKey | None


class WorkerError(NamedTuple):
    """Answer of a worker whose source raised SampleFailed."""

    error: SampleFailed
    notes: tuple[str, ...]


class WorkerPool:
    """Read-ahead in worker processes, over one DataLoader for the life of the member.

    `predict` functions, passed to `get` and `look_ahead`, return the key of a later step as far as it is known now.
    """

    def __init__(self, source: BatchReader, workers: int, prefetch: int, pin_memory: bool) -> None:
        self._owner = os.getpid()
        self._noun = source.noun
        self._depth = workers * prefetch
        self._void = RawArray(ctypes.c_byte, 2 * self._depth)
        self._reading = RawArray(ctypes.c_int64, [-1] * workers)
        self._pids = RawArray(ctypes.c_int64, workers)
        self._urgent: ReadKey | None = None
        self._in_flight: dict[int, ReadKey | None] = {}
        self._ready: dict[ReadKey, Any] = {}
        self._serial = 0
        self._current: ReadKey | None = None
        self._predict: PredictRead = _no_prediction
        self._loader: DataLoader[Any] | None = DataLoader(
            _WorkerDataset(source, self._void, self._reading),  # type: ignore[arg-type]
            batch_size=None,
            sampler=_RequestSampler(self._next_request),
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
        """Start the workers; call it from a thread that lives as long as the member, because they die with it."""
        if self._stream is not None or self._loader is None:
            return
        before = set(multiprocessing.active_children())
        handler = signal.getsignal(signal.SIGCHLD)
        self._stream = iter(self._loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        # torch's SIGCHLD handler raises wherever the main thread is; ours raises only while it waits for data.
        _set_sigchld(handler)
        # At exit multiprocessing ends its children by SIGTERM, which they ignore: close them before that.
        atexit.register(self.close)

    def get(self, key: ReadKey, predict: PredictRead) -> Any:
        """Block for what the source reads for `key`; meanwhile the workers read the steps that `predict` returns."""
        self._current, self._predict = key, cache(predict)
        if key not in self._ready and key not in self._in_flight.values():
            self._urgent = key
            self._drop_useless()
        self.start()
        while key not in self._ready:
            self._receive()
        self._predict = _no_prediction
        answer = self._ready.pop(key)
        self._ready = {other: batches for other, batches in self._ready.items() if other.step > key.step}
        if isinstance(answer, WorkerError):
            for note in answer.notes:
                answer.error.add_note(note)
            raise answer.error
        return answer

    def look_ahead(self, step: int, predict: PredictRead) -> None:
        """Make idle workers read ahead of `step`, in which this member needs no data; never blocks for data."""
        self._current, self._predict = ReadKey(step, 0, 0, None), cache(predict)
        self._drop_useless()
        if self._next_key() is not None:
            self.start()
            while next(iter(self._in_flight.values())) is None and self._next_key() is not None:
                self._receive()
        self._predict = _no_prediction

    def close(self) -> None:
        """End the workers; kill those that have not ended after CLOSE_S seconds."""
        if os.getpid() != self._owner:
            return  # a forked child at its own exit
        atexit.unregister(self.close)
        self._void[:] = [1] * len(self._void)
        stragglers = threading.Timer(CLOSE_S, _kill, (self._processes,))
        stragglers.daemon = True
        stragglers.start()
        self._loader = self._stream = None
        stragglers.cancel()
        _kill(self._processes)

    def _drop_useless(self) -> None:
        """Void requests and drop answers that no step will need."""
        for serial, key in self._in_flight.items():
            if key is not None and not self._useful(key):
                self._void[serial % len(self._void)] = 1
                self._in_flight[serial] = None
        self._ready = {key: answer for key, answer in self._ready.items() if self._useful(key)}

    def _useful(self, key: ReadKey) -> bool:
        assert self._current is not None
        ahead = key.step - self._current.step
        return key == self._current or (0 < ahead <= self._depth and key == self._predict(key.step))

    def _next_request(self) -> ReadRequest:
        key, self._urgent = self._urgent or self._next_key(), None
        request = ReadRequest(self._serial, key)
        self._void[request.serial % len(self._void)] = 0
        self._in_flight[request.serial] = key
        self._serial += 1
        return request

    def _next_key(self) -> ReadKey | None:
        """Return the key of the next step ahead that is neither read nor in flight."""
        if self._current is None:
            return None
        taken = {*self._ready, *self._in_flight.values()}
        steps = range(self._current.step + 1, self._current.step + self._depth + 1)
        return next((key for key in map(self._predict, steps) if key is not None and key not in taken), None)

    def _receive(self) -> None:
        if self._stream is None:
            raise RuntimeError("the loader is closed")
        handler = _set_sigchld(self._check_workers)
        try:
            self._check_workers()
            serial, answer = next(self._stream)
        except RuntimeError as error:
            self._check_workers()
            raise LoaderDied("the data workers do not answer", why=str(error), do=FEWER_WORKERS) from error
        finally:
            _set_sigchld(handler)
        key = self._in_flight.pop(serial)
        if key is not None and answer is not None:
            self._ready[key] = answer

    def _check_workers(self, *_: Any) -> None:
        """Raise LoaderDied if a worker has ended; also the handler of SIGCHLD."""
        for process in self._processes:
            if not process.is_alive():
                reading = self._reading[self._pids[:].index(process.pid)] if process.pid in self._pids[:] else -1
                what = f"data worker {process.pid} ended" + (
                    f" while it read {self._noun} {reading}" if reading >= 0 else ""
                )
                raise LoaderDied(what, why=_exit_text(process.exitcode), do=FEWER_WORKERS)


class _RequestSampler:
    """Endless sampler: each request is made at the moment it is sent."""

    def __init__(self, next_request: Callable[[], ReadRequest]) -> None:
        self._next_request = next_request

    def __iter__(self) -> Iterator[ReadRequest]:
        while True:
            yield self._next_request()


class _WorkerDataset:
    """Dataset that the workers see: indexed by requests, returns (serial, answer)."""

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
            return WorkerError(error, tuple(getattr(error, "__notes__", ())))
        finally:
            self._reading[info.id] = -1


class _WorkerInit:
    """Initialisation of a worker: it dies with its member and ignores signals that are meant for the member."""

    def __init__(self, parent: int, pids: Any) -> None:
        self._parent = parent
        self._pids = pids

    def __call__(self, worker: int) -> None:
        self._pids[worker] = os.getpid()
        # The queue pickles answers in a thread, which only prints its errors: the member would wait for ever.
        Queue._on_queue_feeder_error = _send_error_instead  # type: ignore[attr-defined]
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        # A notice reaches the whole process tree, but the member still needs data to finish the step.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def _send_error_instead(queue: Queue[Any], error: Exception, message: tuple[int, Any]) -> None:
    """Answer a request whose data cannot be sent by the error; end the worker if it is no answer of ours."""
    place, answer = message
    if not isinstance(answer, tuple):
        traceback.print_exception(error)
        os._exit(1)
    serial, _ = answer
    failure = SampleFailed(
        "the data workers cannot send this batch",
        why=f"{type(error).__name__}: {error}",
        do="let the dataset return tensors, arrays, numbers and strings, or pass workers=0",
    )
    queue.put((place, (serial, WorkerError(failure, ()))))


def _no_prediction(_: int) -> None:
    return None


def _unchanged(answer: Any) -> Any:
    return answer


def _set_sigchld(handler: Handler) -> Handler:
    """Set the handler of SIGCHLD and return the previous one; do nothing outside the main thread."""
    if handler is None or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGCHLD, handler)


def _exit_text(exit_code: int) -> str:
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"it exited with code {exit_code}"


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
