"""Carries out what the supply decides: each pool has a desk, and what is said there becomes events."""

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
from functools import partial
from pathlib import Path

from shoal.coordinator.pools.pool_worker import Ends, PoolWorker
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage.blobs import STOWED, Blobs
from shoal.core.fleet import events as fe
from shoal.core.provisioning import budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.decide import REQUESTED
from shoal.engines import grace_period, pool_config
from shoal.engines.engine import AllocationRequest, Engine, agent_options
from shoal.pack.environments import recipe
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.wire import credentials
from shoal.wire.pool_files import LEAVING, ReleaseProgress, hiring_of, say_leaving, urls_of

CLOSE_S = 45.0
TELL_S = 0.2
NOTICE_S = 60.0
TAG = "tag"
# What an agent and its warm process hold themselves, besides the members.
AGENT_BYTES = 512 << 20

log = logging.getLogger("shoal.hiring")


class Provisioner:
    """The pools of one coordinator, whose hires have this `tag`.

    `ask_of` makes what the supply asks for into what is to be started.
    """

    def __init__(
        self,
        service: CoordinatorService,
        tag: str,
        engines: Mapping[str, Engine],
        ask_of: Callable[[se.SubmitAllocation], AllocationRequest],
        grace_s: float = grace_period.USUAL_S,
    ) -> None:
        self._service, self._grace_s = service, grace_s
        self._loop = asyncio.get_running_loop()
        self._money_at = 0.0
        self._desks = {
            name: PoolWorker(name, tag, engine, ask_of, self._said, self._told_ends) for name, engine in engines.items()
        }
        service.hire = self.carry_out
        service.at_every_tick(self._look_out)
        for desk in self._desks.values():
            desk.start()

    def carry_out(self, instruction: se.Instruction) -> None:
        if isinstance(instruction, se.SubmitAllocation | se.CancelAllocation) and instruction.pool in self._desks:
            self._desks[instruction.pool].put(instruction)

    async def close(self, end_all: bool) -> None:
        """Stop asking; if nobody is to come after us, end whatever was hired."""
        for desk in self._desks.values():
            desk.stop(end_all)
        await asyncio.to_thread(self._give_back if end_all else self._join)
        # Here, as everything that is journaled: agents still say goodbye meanwhile.
        for name, desk in self._desks.items():
            if desk.all_ended:
                # It may be long until somebody looks again, and nothing of it is paid for until then.
                self._service.attempt(partial(self._service.record, "", se.PoolClosed(name)))

    def _join(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        for desk in self._desks.values():
            desk.join(max(0.0, deadline - time.monotonic()))

    def _give_back(self) -> None:
        """Until nothing is left, or nothing has ended for as long as all that is left may take."""
        heard: dict[PoolWorker, tuple[int, float]] = {}
        while busy := [desk for desk in self._desks.values() if desk.is_alive()]:
            now = time.monotonic()
            for desk in busy:
                if desk not in heard or heard[desk][0] != desk.done:
                    heard[desk] = (desk.done, now + desk.leave_s(self._grace_s))
            left, left_s = sum(desk.left for desk in busy), max(heard[desk][1] for desk in busy) - now
            if left_s <= 0:
                log.error("%d hires may be left of this coordinator: its engines do not answer", left)
                break
            with contextlib.suppress(OSError):  # a full disk keeps nothing from being given back
                say_leaving(self._service.directory, ReleaseProgress(left, time.time() + left_s))
            busy[0].join(TELL_S)
        (self._service.directory / LEAVING).unlink(missing_ok=True)

    def _look_out(self, now: float) -> None:
        state = self._service.runs.supply
        due = provisioning.expired_timers(state, now)
        if now - self._money_at >= budget.CHECK_INTERVAL_S:
            self._money_at = now
            due += provisioning.expired_budget_timer(state, now)
        for event in due:
            self._service.attempt(partial(self._service.handle, "", event))
        for name, desk in self._desks.items():
            desk.known = frozenset(hire.name for hire in state.allocations.values() if hire.pool == name)

    def _said(self, event: se.Event) -> None:
        """In the thread of a desk."""
        self._loop.call_soon_threadsafe(self._take, event)

    def _told_ends(self, ends: Ends) -> None:
        """In the thread of a desk."""
        self._loop.call_soon_threadsafe(self._warn, ends)

    def _warn(self, ends: Ends) -> None:
        """A machine that its engine is about to end has a notice, whether or not anybody there has heard of it."""
        now = time.time()
        for hire, until in ends:
            agent = self._service.runs.fleet.agents.get(hire)
            if agent is not None and agent.usable and until - now < NOTICE_S:
                left_s = max(0.0, until - now)
                notice = fe.AgentNotice(hire, left_s, f"its engine ends it in {left_s:.0f} s")
                self._service.attempt(partial(self._service.handle, "", notice))

    def _take(self, event: se.Event) -> None:
        state = self._service.runs.supply
        if isinstance(event, se.PoolListed):
            asking = self._desks[event.pool].asking
            mine = [hire for hire in state.allocations.values() if hire.pool == event.pool]
            unanswered = tuple(h.name for h in mine if h.status == REQUESTED and h.name not in asking)
            event = se.PoolListed(event.pool, event.listed, event.ended, unanswered)
            if not provisioning.is_new_information(state, event):
                return
        elif isinstance(event, se.PoolUnreachable):
            standing = state.health.get(event.pool, provisioning.PoolHealth())
            if standing.unreachable_since is not None:
                return
        if isinstance(event, se.AllocationSubmitted | se.AllocationRejected):
            self._desks[event.pool].asking.discard(event.allocation)
        self._service.attempt(partial(self._service.handle, "", event))


class PoolEnvironments:
    """The environments of pools, put where machines can fetch them when one is first asked for."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._made: dict[str, PublishedEnvironment] = {}
        self._lock = threading.Lock()

    def get(self, text: str) -> PublishedEnvironment | None:
        """The environment that a pool names, None if it names none; in the thread of a desk."""
        if not text:
            return None
        with self._lock:
            if text not in self._made:
                self._made[text] = recipe.stow(text, self._blobs.add)
            return self._made[text]


def open_pools(service: CoordinatorService, directory: Path) -> Provisioner | None:
    """Hire from the pools that the coordinator's directory describes; None if there are none."""
    hires = hiring_of(directory)
    if hires is None:
        return None
    found = {name: pool_config.parse(name, table, str(directory)) for name, table in hires.pools.items()}
    (directory / LEAVING).unlink(missing_ok=True)
    token, tag = credentials.read(directory / "token"), tag_of(directory)
    url = ",".join(urls_of(directory))

    if not service.runs.supply.allocations:
        # Only hires fetch from there, also those that were queued before this coordinator was started.
        shutil.rmtree(directory / STOWED, ignore_errors=True)
    wardrobe = PoolEnvironments(Blobs(directory / STOWED))

    def ask_of(asked: se.SubmitAllocation) -> AllocationRequest:
        engine = found[asked.pool][1]
        options = agent_options(hires.agent, engine)
        memory_bytes = asked.memory_bytes * asked.slots + AGENT_BYTES if asked.memory_bytes else 0
        size, made = (asked.cpus * asked.slots, memory_bytes), wardrobe.get(engine.options.environment)
        return AllocationRequest(asked.allocation, tag, url, token, asked.slots, options, *size, made)

    engines = {name: engine for name, (_, engine) in found.items()}
    hiring = Provisioner(service, tag, engines, ask_of, grace_period.in_options(hires.agent))
    known = tuple(pool for pool, _ in found.values())
    if known != tuple(service.runs.supply.pools.values()):
        service.handle("", se.PoolsConfigured(known))
    return hiring


def tag_of(directory: Path) -> str:
    """What tells the hires of a coordinator from those of all others; made once and kept in its directory.

    The name of the directory is not enough: others may be called the same, and it may be no word for a shell or Slurm.
    """
    path = directory / TAG
    if not path.exists():
        name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")[:24] or "coordinator"
        part = path.with_suffix(".part")
        part.write_text(f"{name}-{secrets.token_hex(3)}\n", "ascii")
        part.replace(path)
    return path.read_text("ascii").strip()
