"""The exchange over torch.distributed: Gloo for CPU tensors, NCCL for GPUs.

Sums go through a process group that is built directly, without init_process_group; pulses, barriers, the rendezvous and
the detection of losses ride on our own ring. So a loss is seen, named and passed on in the same way as without torch,
and there is no TCPStore. The connections of Gloo and NCCL themselves know no token: use them on trusted networks only.

The NCCL path is this same code with another device. It needs GPUs and has not been run where this was written.
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
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.sockets import shut

_ROUND_S = 0.002
_device_lock = threading.Lock()


def connect(
    port: Peers,
    world: World,
    timeout_s: float,
    cancelled: threading.Event,
    on_break: OnBreak | None = None,
    backend: str = "gloo",
) -> ProcessGroupExchange:
    """Join a world's process group; return when all of its members have, or raise ExchangeBroken."""
    breakage = _BreakNotifier(on_break)
    ring = connect_ring(port, world, timeout_s, cancelled, breakage)
    try:
        collective = ProcessGroupExchange(ring, port.local_host, timeout_s, backend)
    except (RuntimeError, ExchangeBroken) as error:
        ring.close()
        raise ExchangeBroken(f"could not build the {backend} group: {error}") from error
    breakage.tell(collective)
    return collective


class _BreakNotifier:
    """Passes the news of a broken ring on to a collective that may not be built yet."""

    def __init__(self, on_break: OnBreak | None) -> None:
        self._on_break = on_break
        self._lock = threading.Lock()
        self._collective: ProcessGroupExchange | None = None
        self._news: tuple[tuple[str, ...], str] | None = None

    def __call__(self, suspects: tuple[str, ...], cause: str) -> None:
        with self._lock:
            self._news = (suspects, cause)
            collective = self._collective
        if collective is not None:
            collective.cut()
        if self._on_break is not None:
            self._on_break(suspects, cause)

    def tell(self, collective: ProcessGroupExchange) -> None:
        with self._lock:
            self._collective = collective
            broken = self._news is not None
        if broken:
            collective.cut()


class ProcessGroupWork:
    """One sum of a process group, from its submission to its end."""

    def __init__(self, work: Any, collective: ProcessGroupExchange) -> None:
        self._work, self._collective = work, collective

    def wait(self) -> None:
        """Return when the operation is complete; raise ExchangeBroken if it never will be."""
        if self._work is None:
            self._collective.check()
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            self._collective.abort(f"the process group failed: {str(error).splitlines()[0]}")
            self._collective.check()


class ProcessGroupExchange:
    """An exchange whose sums are made by a process group; everything else goes over a ring, which it then owns."""

    def __init__(self, ring: Ring, host: str, timeout_s: float, backend: str = "gloo") -> None:
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
            with store.travelling(ring):
                self._group = self._build(store, host, timeout_s)
                self._group.allreduce([torch.zeros(1, device="cuda" if backend == "nccl" else "cpu")]).wait()

    @property
    def broken(self) -> ExchangeBroken | None:
        """Why nothing more can be exchanged; None while all is well."""
        return self._ring.broken

    def gather(self, record: NDArray[np.float64]) -> RingWork:
        """Send one small record to all and receive everybody's."""
        return self._ring.gather(record)

    def reduce(
        self, buffer: NDArray[Any] | torch.Tensor, add: Adder | None = None, part: TreePartials | None = None
    ) -> ProcessGroupWork | RingWork:
        """Sum a buffer over all ranks in place: a NumPy view of a CPU tensor, or a tensor.

        The group adds every type by itself; `add` only says that a uint16 buffer holds bfloat16. No group knows a
        fixed order of sums: those over shards go over the ring.
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
        """Return when every rank has come here."""
        self._ring.barrier()

    def abort(self, cause: str) -> None:
        """Fail every operation, pending and future, at once, and let the neighbours see it."""
        self._ring.abort(cause)
        self.cut()

    def close(self) -> None:
        """Let go of the group, its connections and the ring."""
        self._ring.close()
        self.cut()
        self._group = None

    def check(self) -> None:
        """Raise ExchangeBroken if the world has fallen apart."""
        broken = self._ring.broken
        if broken is not None:
            raise ExchangeBroken(broken.cause, broken.suspects)

    def cut(self) -> None:
        """End the group's own connections; Gloo knows no other way to end what is pending."""
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
        # a device of its own for each group: one that outlives a failed construction crashes on a late connection
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
                # never the listener: Gloo ends the process if that fails
                if _is_internet(sock) and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    try:
                        ours, theirs = sock.getsockname(), sock.getpeername()
                    except OSError:
                        continue
                    if ours[1] == self._listener or tuple(theirs[:2]) in self._peers:
                        yield sock


class _RingStore(Store):
    """A store whose entries travel round the ring while a process group is being built."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._finished = False
        self._failure: ExchangeBroken | None = None

    @contextmanager
    def travelling(self, ring: Ring) -> Iterator[None]:
        courier = threading.Thread(target=self._carry, args=(ring,), name="shoal-rendezvous", daemon=True)
        courier.start()
        try:
            yield
        except BaseException:
            ring.abort("could not build the process group")
            raise
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()
            courier.join()

    def _carry(self, ring: Ring) -> None:
        try:
            while True:
                with self._changed:
                    if not self._unsent and not self._finished:
                        self._changed.wait(_ROUND_S)
                    finished, news = self._finished, msgspec.msgpack.encode(self._unsent)
                    self._unsent = {}
                rows = ring.gather(np.array([float(finished), float(len(news))])).result()
                width = (int(rows[:, 1].max()) + 7) // 8
                packed = ring.gather(np.frombuffer(news.ljust(8 * width, b"\0"), np.float64)).result()
                with self._changed:
                    for (_, length), row in zip(rows, packed, strict=True):
                        self._entries |= msgspec.msgpack.decode(row.tobytes()[: int(length)], type=dict[str, bytes])
                    self._changed.notify_all()
                if rows[:, 0].all():
                    return
        except ExchangeBroken as broken:
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
            known = self._changed.wait_for(
                lambda: self._failure is not None or all(key in self._entries for key in keys), limit_s
            )
            if self._failure is not None:
                raise RuntimeError(self._failure.cause)
            if not known:
                raise RuntimeError(f"no {keys} within {limit_s:g} s")

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


def _is_internet(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def _sockets() -> dict[str, int]:
    """This process's sockets: inode to file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found
