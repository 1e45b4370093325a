"""Exchange over torch.distributed: Gloo for CPU tensors, NCCL for GPUs.

Only the sums of gradients go through a process group, which is built directly, without `init_process_group`. Step
reports, barriers, the rendezvous and the detection of lost members use Shoal's own ring, which exists beside the group.
So a lost member is detected, named and reported in the same way as without torch, and there is no TCPStore.

*Building.* Gloo and NCCL need a key-value store for their rendezvous. `_RingStore` is one whose entries travel round
the ring while the group is being built.

*Breaking.* A Gloo operation whose peer is gone blocks until its timeout, and Gloo has no call to cancel it. When the
ring breaks, `cut` shuts down the group's own TCP connections instead, which are found among the process's sockets by
the port of the group's listener; the pending operations then fail at once. NCCL has `abort`.

Limits: the connections of Gloo and NCCL are not authenticated, so use them on trusted networks only. The NCCL path is
the same code with another device; it needs GPUs and has never been run.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import Store

from shoal.core.world import World
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.collectives.exchange import Adder, OnBreak, TreePartials
from shoal.worker.collectives.ring import Ring, RingWork
from shoal.worker.transport.connect import POLL_S, ConnectDeadline
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.sockets import shut

_STORE_POLL_S = 0.002
LATE = "some member did not join the rendezvous of the process group"
_device_lock = threading.Lock()


def connect(
    peers: Peers,
    world: World,
    timeout_s: float,
    cancelled: threading.Event,
    on_break: OnBreak | None = None,
    backend: str = "gloo",
) -> ProcessGroupExchange:
    """Return the exchange of a world once all of its members have connected; raise ExchangeBroken if they do not."""
    notifier = _BreakNotifier(on_break)
    ring = connect_ring(peers, world, timeout_s, cancelled, notifier)
    try:
        exchange = ProcessGroupExchange(ring, peers.local_host, timeout_s, backend, cancelled)
    except (RuntimeError, ExchangeBroken) as error:
        broken = ring.broken
        ring.close()
        suspects = broken.suspects if broken is not None else ()
        raise ExchangeBroken(f"could not build the {backend} group: {error}", suspects) from error
    notifier.set_exchange(exchange)
    return exchange


class _BreakNotifier:
    """Callback for a broken ring that cuts the exchange, which may not be built yet when the ring breaks."""

    def __init__(self, on_break: OnBreak | None) -> None:
        self._on_break = on_break
        self._lock = threading.Lock()
        self._exchange: ProcessGroupExchange | None = None
        self._broken = False

    def __call__(self, suspects: tuple[str, ...], cause: str) -> None:
        with self._lock:
            self._broken = True
            exchange = self._exchange
        if exchange is not None:
            exchange.cut()
        if self._on_break is not None:
            self._on_break(suspects, cause)

    def set_exchange(self, exchange: ProcessGroupExchange) -> None:
        """Cut this exchange when the ring breaks, or now if it already has."""
        with self._lock:
            self._exchange = exchange
            broken = self._broken
        if broken:
            exchange.cut()


class ProcessGroupWork:
    """One sum of a process group in progress."""

    def __init__(self, work: Any, exchange: ProcessGroupExchange) -> None:
        self._work, self._exchange = work, exchange

    def wait(self) -> None:
        """Block until the operation is complete; raise ExchangeBroken if it cannot complete."""
        if self._work is None:
            self._exchange.check()
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            self._exchange.abort(f"the process group failed: {str(error).splitlines()[0]}")
            self._exchange.check()


class ProcessGroupExchange:
    """Exchange that sums in a process group; everything else goes over a ring, which it owns."""

    def __init__(
        self, ring: Ring, host: str, timeout_s: float, backend: str = "gloo", cancelled: threading.Event | None = None
    ) -> None:
        self.rank, self.size = ring.rank, ring.size
        self.takes_tensors = backend == "nccl"
        self._ring = ring
        self._backend = backend
        self._group: Any = None
        self._listener = 0
        self._peers: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        if self.size > 1:
            store = _RingStore()
            with store.shared_over(ring, ConnectDeadline(timeout_s, cancelled or threading.Event())):
                self._group = self._build(store, host, timeout_s)
                self._group.allreduce([torch.zeros(1, device="cuda" if backend == "nccl" else "cpu")]).wait()

    @property
    def broken(self) -> ExchangeBroken | None:
        """Why nothing can be exchanged any more; None while the exchange works."""
        return self._ring.broken

    def gather(self, record: NDArray[np.float64]) -> RingWork:
        """Start to all-gather one small record of each member."""
        return self._ring.gather(record)

    def reduce(
        self, buffer: NDArray[Any] | torch.Tensor, add: Adder | None = None, part: TreePartials | None = None
    ) -> ProcessGroupWork | RingWork:
        """Start to sum a buffer over all ranks in place: a NumPy view of a CPU tensor, or a tensor.

        The group adds every dtype by itself; `add` only says that a uint16 buffer holds bfloat16. A group does not sum
        in a fixed order, so exact mode's sums (with `part`) go over the ring.
        """
        if part is not None and not isinstance(buffer, torch.Tensor):
            return self._ring.reduce(buffer, add, part)
        tensor = buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)
        if add is not None and tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        if self._group is None or self._ring.broken is not None:
            return ProcessGroupWork(None, self)
        return ProcessGroupWork(self._group.allreduce([tensor]), self)

    def barrier(self) -> None:
        """Block until every rank has called this."""
        self._ring.barrier()

    def abort(self, cause: str) -> None:
        """Fail all pending and future operations at once, here and, by closing the ring, on the other members."""
        self._ring.abort(cause)
        self.cut()

    def close(self) -> None:
        """Release the group, its connections and the ring."""
        self._ring.close()
        self.cut()
        self._group = None

    def check(self) -> None:
        """Raise ExchangeBroken if the ring is broken."""
        broken = self._ring.broken
        if broken is not None:
            raise ExchangeBroken(broken.cause, broken.suspects)

    def cut(self) -> None:
        """Shut down the group's connections; Gloo has no other way to cancel pending operations."""
        with self._lock:
            group = self._group
            if group is None:
                return
            if self._backend == "nccl":
                group.abort()
                return
            for sock in self._connections():
                shut(sock)

    def _build(self, store: Store, host: str, timeout_s: float) -> Any:
        if self._backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=timeout_s)
            return dist.ProcessGroupNCCL(store, self.rank, self.size, nccl)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # Each group has its own device: a shared one that survives a failed construction crashes on a late connection.
        options._devices = [self._device(host)]
        options._timeout = timedelta(seconds=timeout_s)
        store.set(f"shoal/{self.rank}", f"{host} {self._listener}")
        group = gloo(store, self.rank, self.size, options)
        group._set_default_timeout(timedelta(days=1))
        for rank in range(self.size):
            if rank != self.rank:
                name, number = store.get(f"shoal/{rank}").decode().split(" ")
                self._peers.add((str(socket.getaddrinfo(name, None)[0][4][0]), int(number)))
        return group

    def _device(self, host: str) -> Any:
        with _device_lock:
            before = set(_sockets())
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            for inode, fd in _sockets().items():
                if inode not in before:
                    with socket.socket(fileno=os.dup(fd)) as sock:
                        if _is_internet(sock) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            self._listener = sock.getsockname()[1]
        return device

    def _connections(self) -> Iterator[socket.socket]:
        for fd in _sockets().values():
            try:
                sock = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue
            with sock:
                # Never the listener: Gloo aborts the process if that fails.
                if _is_internet(sock) and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    try:
                        local, remote = sock.getsockname(), sock.getpeername()
                    except OSError:
                        continue
                    if local[1] == self._listener or tuple(remote[:2]) in self._peers:
                        yield sock


class _RingStore(Store):
    """Key-value store of a rendezvous; a thread all-gathers new entries over the ring while a group is being built."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._finished = False
        self._failure: ExchangeBroken | None = None

    @contextmanager
    def shared_over(self, ring: Ring, deadline: ConnectDeadline) -> Iterator[None]:
        """Share entries with all members inside the block; leave it when all members have, or at the deadline."""
        thread = threading.Thread(target=self._share, args=(ring, deadline), name="shoal-rendezvous", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            ring.abort("could not build the process group")
            raise
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()
            thread.join()

    def _share(self, ring: Ring, deadline: ConnectDeadline) -> None:
        try:
            while True:
                with self._changed:
                    if not self._unsent and not self._finished:
                        self._changed.wait(_STORE_POLL_S)
                    finished, entries = self._finished, msgspec.msgpack.encode(self._unsent)
                    self._unsent = {}
                rows = _gathered(ring, np.array([float(finished), float(len(entries))]), deadline)
                width = (int(rows[:, 1].max()) + 7) // 8
                packed = _gathered(ring, np.frombuffer(entries.ljust(8 * width, b"\0"), np.float64), deadline)
                with self._changed:
                    for (_, length), row in zip(rows, packed, strict=True):
                        self._entries |= msgspec.msgpack.decode(row.tobytes()[: int(length)], type=dict[str, bytes])
                    self._changed.notify_all()
                if rows[:, 0].all():
                    return
        except ExchangeBroken as broken:
            ring.abort(broken.cause)
            with self._changed:
                self._failure = broken
                self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            data = value.encode() if isinstance(value, str) else bytes(value)
            self._entries[key] = self._unsent[key] = data
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = timeout.total_seconds() if timeout is not None else 60.0
        with self._changed:
            complete = self._changed.wait_for(
                lambda: self._failure is not None or all(key in self._entries for key in keys), limit_s
            )
            if self._failure is not None:
                raise RuntimeError(self._failure.cause)
            if not complete:
                raise RuntimeError(f"{LATE} within {limit_s:g} s (no {keys})")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        del timeout


def _gathered(ring: Ring, record: NDArray[np.float64], deadline: ConnectDeadline) -> NDArray[np.float64]:
    """Return the records of all ranks; raise ExchangeBroken if some rank does not take part in time."""
    work = ring.gather(record)
    while not work.done(POLL_S):
        deadline.check((), LATE)
    return work.result()


def _is_internet(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def _sockets() -> dict[str, int]:
    """Return the sockets of this process: inode to file descriptor."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            sockets[target] = int(name)
    return sockets
