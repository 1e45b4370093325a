"""Provisioner: passes instructions to the workers of the pools, and what they report to the journal.

Everything but the workers runs on the event loop; what happens in a worker's thread says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from shoal.coordinator.pools.pool_worker import EndTimes, PoolWorker
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage.blobs import ENVIRONMENT_BLOBS, Blobs
from shoal.core.fleet.events import AgentNotice
from shoal.core.provisioning import budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as pe
from shoal.core.provisioning.decide import REQUESTED
from shoal.engines import grace_period, pool_config
from shoal.engines.engine import AllocationRequest, Engine, agent_options
from shoal.pack.environments import recipe
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.wire import credentials
from shoal.wire.pool_files import RELEASING, ReleaseProgress, read_pools, read_urls, write_release_progress

JOIN_S = 45.0
REPORT_PROGRESS_S = 0.2
NOTICE_S = 60.0
TAG = "tag"
# The memory of an agent and its warm process, besides the members.
AGENT_BYTES = 512 << 20

log = logging.getLogger("shoal.pools")


class Provisioner:
    """The pools of one coordinator, whose allocations carry its `tag`.

    `request_of` turns an instruction to submit into a request that an engine understands.
    """

    def __init__(
        self,
        service: CoordinatorService,
        tag: str,
        engines: Mapping[str, Engine],
        request_of: Callable[[pe.SubmitAllocation], AllocationRequest],
        grace_s: float = grace_period.USUAL_S,
    ) -> None:
        self._service, self._grace_s = service, grace_s
        self._loop = asyncio.get_running_loop()
        self._budget_checked_at = 0.0
        self._workers = {
            name: PoolWorker(name, tag, engine, request_of, self._report, self._report_ends)
            for name, engine in engines.items()
        }
        service.provision = self.carry_out
        for worker in self._workers.values():
            worker.start()

    def carry_out(self, instruction: pe.Instruction) -> None:
        """Queue an instruction at the worker of its pool."""
        if isinstance(instruction, pe.SubmitAllocation | pe.CancelAllocation) and instruction.pool in self._workers:
            self._workers[instruction.pool].put(instruction)

    def tick(self, now: float) -> None:
        """Record the expired timers of provisioning, and now and then check the budgets; called on every tick."""
        state = self._service.state.provisioning
        events = provisioning.expired_timers(state, now)
        if now - self._budget_checked_at >= budget.CHECK_INTERVAL_S:
            self._budget_checked_at = now
            events += provisioning.expired_budget_timer(state, now)
        for event in events:
            self._record(event)
        for name, worker in self._workers.items():
            worker.allocations = frozenset(a.name for a in state.allocations.values() if a.pool == name)

    def _record(self, event: pe.Event | AgentNotice) -> None:
        self._service.attempt(partial(self._service.handle, "", event))

    # --- reports of the workers

    def _report(self, event: pe.Event) -> None:
        """Pass an event to the event loop; called in a worker's thread."""
        self._loop.call_soon_threadsafe(self._on_report, event)

    def _report_ends(self, ends: EndTimes) -> None:
        """Pass the end times of machines to the event loop; called in a worker's thread."""
        self._loop.call_soon_threadsafe(self._give_notice, ends)

    def _on_report(self, event: pe.Event) -> None:
        """Record an event of a worker, unless it says nothing new."""
        state = self._service.state.provisioning
        if isinstance(event, pe.PoolListed):
            submitting = self._workers[event.pool].submitting
            requested = (a.name for a in state.allocations.values() if a.pool == event.pool and a.status == REQUESTED)
            unsubmitted = tuple(name for name in requested if name not in submitting)
            event = pe.PoolListed(event.pool, event.listed, event.ended, unsubmitted)
            if not provisioning.is_new_information(state, event):
                return
        elif isinstance(event, pe.PoolUnreachable):
            health = state.health.get(event.pool)
            if health is not None and health.unreachable_since is not None:
                return
        elif isinstance(event, pe.AllocationSubmitted | pe.AllocationRejected):
            self._workers[event.pool].submitting.discard(event.allocation)
        self._record(event)

    def _give_notice(self, ends: EndTimes) -> None:
        """Record a notice for machines that their engine ends soon, whether or not their agents know."""
        now = time.time()
        for allocation, ends_at in ends:
            agent = self._service.state.fleet.agents.get(allocation)
            if agent is not None and agent.usable and ends_at - now < NOTICE_S:
                remaining_s = max(0.0, ends_at - now)
                self._record(AgentNotice(allocation, remaining_s, f"its engine ends it in {remaining_s:.0f} s"))

    # --- the end

    async def close(self, release_all: bool) -> None:
        """Stop the workers; with `release_all`, when no coordinator comes after this one, release every machine."""
        for worker in self._workers.values():
            worker.stop(release_all)
        await asyncio.to_thread(self._await_release if release_all else self._join)
        # On the event loop, as everything that is journaled: agents still send messages meanwhile.
        for name, worker in self._workers.items():
            if worker.all_released:
                # The next coordinator may start much later, and must not charge for the time until then.
                self._service.attempt(partial(self._service.record, "", pe.PoolClosed(name)))

    def _join(self) -> None:
        deadline = time.monotonic() + JOIN_S
        for worker in self._workers.values():
            worker.join(max(0.0, deadline - time.monotonic()))

    def _await_release(self) -> None:
        """Block until everything is released, or no worker has made progress for as long as the rest may take."""
        deadlines: dict[PoolWorker, tuple[int, float]] = {}
        while busy := [worker for worker in self._workers.values() if worker.is_alive()]:
            now = time.monotonic()
            for worker in busy:
                if worker not in deadlines or deadlines[worker][0] != worker.progress:
                    deadlines[worker] = (worker.progress, now + worker.release_timeout_s(self._grace_s))
            remaining = sum(worker.remaining for worker in busy)
            remaining_s = max(deadlines[worker][1] for worker in busy) - now
            if remaining_s <= 0:
                log.error("%d allocations may still be running: their engines do not respond", remaining)
                break
            with contextlib.suppress(OSError):  # a full disk must not keep machines from being released
                write_release_progress(self._service.directory, ReleaseProgress(remaining, time.time() + remaining_s))
            busy[0].join(REPORT_PROGRESS_S)
        (self._service.directory / RELEASING).unlink(missing_ok=True)


class PoolEnvironments:
    """The environments of pools, published as blobs when the first machine needs them; used by all workers."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._published: dict[str, PublishedEnvironment] = {}
        self._lock = threading.Lock()

    def get(self, text: str) -> PublishedEnvironment | None:
        """Return the environment that a pool names, None if it names none; called in a worker's thread."""
        if not text:
            return None
        with self._lock:
            if text not in self._published:
                self._published[text] = recipe.publish(text, self._blobs.add)
            return self._published[text]


def open_pools(service: CoordinatorService, directory: Path) -> Provisioner | None:
    """Start provisioning from the pools that the coordinator's directory describes; return None without pools."""
    config = read_pools(directory)
    if config is None:
        return None
    pools = {name: pool_config.parse(name, table, str(directory)) for name, table in config.pools.items()}
    (directory / RELEASING).unlink(missing_ok=True)
    token, tag = credentials.read(directory / "token"), tag_of(directory)
    url = ",".join(read_urls(directory))

    if not service.state.provisioning.allocations:
        # Only machines download environments, also machines that were requested before this coordinator started.
        shutil.rmtree(directory / ENVIRONMENT_BLOBS, ignore_errors=True)
    environments = PoolEnvironments(Blobs(directory / ENVIRONMENT_BLOBS))

    def request_of(submit: pe.SubmitAllocation) -> AllocationRequest:
        engine = pools[submit.pool][1]
        options = agent_options(config.agent, engine)
        memory_bytes = submit.memory_bytes * submit.slots + AGENT_BYTES if submit.memory_bytes else 0
        size, environment = (submit.cpus * submit.slots, memory_bytes), environments.get(engine.options.environment)
        return AllocationRequest(submit.allocation, tag, url, token, submit.slots, options, *size, environment)

    engines = {name: engine for name, (_, engine) in pools.items()}
    provisioner = Provisioner(service, tag, engines, request_of, grace_period.in_options(config.agent))
    configured = tuple(
        replace(pool, limit=0, retired=True) if name in config.retired else pool for name, (pool, _) in pools.items()
    )
    if configured != tuple(service.state.provisioning.pools.values()):
        service.handle("", pe.PoolsConfigured(configured))
    return provisioner


def tag_of(directory: Path) -> str:
    """Return the tag of this coordinator's allocations, created once and kept in its directory.

    The directory's name alone is not enough: two may have the same, and a shell or Slurm may not accept it.
    """
    path = directory / TAG
    if not path.exists():
        name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")[:24] or "coordinator"
        part = path.with_suffix(".part")
        part.write_text(f"{name}-{secrets.token_hex(3)}\n", "ascii")
        part.replace(path)
    return path.read_text("ascii").strip()
