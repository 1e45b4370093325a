"""Pool worker: the thread that submits, cancels and lists the allocations of one pool.

It does one kind of thing at a time, so a listing never contradicts an instruction that was carried out before it. The
package docstring explains the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from shoal.core.provisioning import events as pe
from shoal.engines.engine import AllocationRequest, AllocationStatus, Engine
from shoal.errors import AllocationRefused, EngineUnreachable, ShoalError

LIST_S = 1.0
LIST_EMPTY_S = 5.0
AT_ONCE = 16
FIRST_CLEAN_UP_S = 30.0
CLEAN_UP_S = 900.0

Order = pe.SubmitAllocation | pe.CancelAllocation
EndTimes = tuple[tuple[str, float], ...]

log = logging.getLogger("shoal.pools")


class PoolWorker(threading.Thread):
    """The worker of one pool; `report` and `report_ends` are called in its thread.

    `submitting` are allocations whose submission was not confirmed yet, and `allocations` all of the pool, None until
    the provisioner has told. `progress` counts what the engine has done. After the end, `all_released` says that
    nothing is left.
    """

    def __init__(
        self,
        pool: str,
        tag: str,
        engine: Engine,
        request_of: Callable[[pe.SubmitAllocation], AllocationRequest],
        report: Callable[[pe.Event], None],
        report_ends: Callable[[EndTimes], None],
    ) -> None:
        super().__init__(name=f"shoal-pool-{pool}", daemon=True)
        self._pool, self._tag, self._engine = pool, tag, engine
        self._request_of, self._report, self._report_ends = request_of, report, report_ends
        self._orders: queue.Queue[Order | None] = queue.Queue()
        self._stopped = threading.Event()
        self._release_all = False
        self._releasing: int | None = None
        self.submitting: set[str] = set()
        self.allocations: frozenset[str] | None = None
        self.progress = 0
        self.all_released = False

    @property
    def remaining(self) -> int:
        """How many allocations the pool has."""
        return len(self.allocations or ()) if self._releasing is None else self._releasing

    def release_timeout_s(self, grace_s: float) -> float:
        """Return how long it may take to release everything, if agents have a grace period of `grace_s`."""
        return self._engine.cancel_timeout_s(grace_s) * max(1, math.ceil(self.remaining / AT_ONCE))

    def put(self, order: Order) -> None:
        """Queue an instruction."""
        if isinstance(order, pe.SubmitAllocation):
            self.submitting.add(order.allocation)
        self._orders.put(order)

    def stop(self, release_all: bool) -> None:
        """End the thread soon, after releasing everything if asked."""
        self._release_all = release_all
        self._stopped.set()
        self._orders.put(None)

    def run(self) -> None:
        list_at, clean_up_at = 0.0, time.monotonic() + FIRST_CLEAN_UP_S
        while not self._stopped.is_set():
            if time.monotonic() >= list_at:
                self._list()
                empty = self.allocations is not None and not self.allocations
                list_at = time.monotonic() + (LIST_EMPTY_S if empty else LIST_S)
            if time.monotonic() >= clean_up_at:
                self._clean_up()
                clean_up_at = time.monotonic() + CLEAN_UP_S
            try:
                order = self._orders.get(timeout=max(0.01, list_at - time.monotonic()))
            except queue.Empty:
                continue
            for group in group_orders([order, *self._queued()]):
                if not self._stopped.is_set():
                    self._carry_out_group(group)
        if self._release_all:
            self._release_everything()
        self._engine.close()

    def _queued(self) -> list[Order | None]:
        orders = []
        with contextlib.suppress(queue.Empty):
            while True:
                orders.append(self._orders.get_nowait())
        return orders

    def _carry_out_group(self, group: Sequence[Order]) -> None:
        if len(group) == 1:
            self._carry_out(group[0])
            return
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for future in as_completed([threads.submit(self._carry_out, order) for order in group]):
                future.result()
                self.progress += 1

    def _carry_out(self, order: Order) -> None:
        try:
            with _engine_errors():
                if isinstance(order, pe.SubmitAllocation):
                    self._submit(order)
                elif order.handle:
                    self._engine.cancel(order.handle)
                    self._report(pe.AllocationEnded(order.allocation))
        except EngineUnreachable as error:
            # Provisioning repeats cancellations by itself, and submissions when the pool is reachable again.
            self._report(pe.PoolUnreachable(self._pool, *_cause(error)))
            if isinstance(order, pe.SubmitAllocation):
                self._report(pe.AllocationRejected(self._pool, order.allocation, *_cause(error)))
        except ShoalError as error:
            log.warning("pool %s: %s", self._pool, error)
            if isinstance(order, pe.SubmitAllocation):
                final = isinstance(error, AllocationRefused)
                self._report(pe.AllocationRejected(self._pool, order.allocation, *_cause(error), final=final))

    def _submit(self, order: pe.SubmitAllocation) -> None:
        try:
            handle = self._engine.submit(self._request_of(order))
        except OSError as error:
            raise AllocationRefused("the request could not be submitted", why=str(error)) from error
        self._report(pe.AllocationSubmitted(self._pool, order.allocation, handle))

    def _listed(self) -> list[AllocationStatus]:
        """Return the allocations of this pool; another pool may use the same cluster."""
        listed = self._engine.watch(self._tag)
        return sorted((s for s in listed if pe.pool_of(s.allocation) == self._pool), key=lambda s: s.allocation)

    def _list(self) -> None:
        try:
            with _engine_errors():
                statuses = self._listed()
        except ShoalError as error:
            final = isinstance(error, AllocationRefused)
            self._report(pe.PoolUnreachable(self._pool, *_cause(error), final=final))
            return
        active = [status for status in statuses if status.state != "gone"]
        running = {status.allocation for status in active if status.state == "running"}
        listed = tuple(
            pe.ListedAllocation(status.allocation, status.handle, status.allocation in running, status.why)
            for status in active
        )
        ended = tuple((status.allocation, status.why) for status in statuses if status.state == "gone")
        self._report(pe.PoolListed(self._pool, listed, ended))
        ends = ((s.allocation, s.ends_at) for s in active if s.ends_at is not None and s.allocation in running)
        self._report_ends(tuple(ends))

    def _clean_up(self) -> None:
        """Remove files of ended allocations; a failure costs disk space only."""
        try:
            with _engine_errors():
                self._engine.clean_up(self._tag, self.allocations or ())
        except ShoalError as error:
            log.warning("pool %s: files of ended allocations could not be removed: %s", self._pool, error)

    def _release_everything(self) -> None:
        try:
            with _engine_errors():
                statuses = self._listed()
        except ShoalError as error:
            log.error("pool %s may still have allocations of this coordinator: %s", self._pool, error)
            return
        self.progress += 1
        # Ended ones are cancelled as well: their tokens are still on the machine.
        self._releasing = len(statuses)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            futures = [threads.submit(self._release, status) for status in statuses]
            for _ in as_completed(futures):
                self._releasing, self.progress = self._releasing - 1, self.progress + 1
        self.all_released = all(future.result() for future in futures)

    def _release(self, status: AllocationStatus) -> bool:
        """Cancel an allocation and return whether it is gone."""
        try:
            with _engine_errors():
                self._engine.cancel(status.handle)
        except ShoalError as error:
            if status.state != "gone":
                log.error("%s of pool %s may still be running: %s", status.handle, self._pool, error)
                return False
        return True


def group_orders(orders: Iterable[Order | None]) -> list[list[Order]]:
    """Return the instructions in groups that can be carried out together: of one kind, in a row. None is left out."""
    given = [order for order in orders if order is not None]
    return [list(group) for _, group in itertools.groupby(given, key=type)]


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Raise EngineUnreachable for a bug of an engine: it is tried again, because its machines cost money."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        log.exception("the engine failed unexpectedly")
        raise EngineUnreachable("the engine failed", why=f"{type(error).__name__}: {error}") from error


def _cause(error: ShoalError) -> tuple[str, str, str]:
    """Return why, where and what to do."""
    return f"{error.what}: {error.why}" if error.why else error.what, error.where, error.do
