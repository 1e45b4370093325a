"""The pool check: allocates machines for a moment, lets them check each other, and releases all of them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.doctor import diagnosis
from shoal.doctor.diagnosis import ConnectionReport, MachineReport, MissingMachine, PoolReport
from shoal.engines import pool_config
from shoal.engines.engine import AllocationRequest, Engine
from shoal.errors import PoolCheckFailed, ServiceFailed, ShoalError
from shoal.launch import launch_plan
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.child_service import ChildService
from shoal.launch.run_lookup import SUPERVISOR_FILE
from shoal.launch.settings_layers import ResolvedSettings
from shoal.launch.supervisor import COORDINATOR_LOG, GRACE_S, wait_until_ready
from shoal.pack.environments import recipe
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.wire import credentials
from shoal.wire.api import AgentView
from shoal.wire.machine_check import CheckRequest
from shoal.wire.pool_files import read_urls

WAIT_S, BUILD_WAIT_S = 90.0, 900.0
POLL_S = 0.5
WATCH_EVERY_S = 2.0
REPLY_TIMEOUT_S = 60.0
THREADS = 16
# All bandwidth measurements together take at most STREAMS_S, each of them at most STREAM_S.
STREAMS_S = 60.0
STREAM_S = 1.0
# If the doctor dies, nothing else ends these agents; they have no members, so they may end soon by themselves.
AGENT_OPTIONS = ("--preload", "msgspec", "--grace", "2", "--idle", "20", "--orphan", "20")


@dataclass(slots=True)
class _CheckedAllocation:
    """One requested machine; `ended` says why it is gone, None while it may still join."""

    agent: str
    pool: str
    engine: Engine
    handle: str = ""
    started: bool = False
    ended: str | None = None
    waits_for: str = ""
    do: str = ""


@dataclass(slots=True)
class PoolCheck:
    """A check of `count` machines of each pool; `note` receives the progress.

    Machines may take `wait_s` to join, None for the default, which is longer if they build an environment. `unreleased`
    names what may still run after the check.
    """

    settings: ResolvedSettings
    names: Sequence[str]
    count: int
    directory: Path
    wait_s: float | None
    note: Callable[[str], object]
    unreleased: list[str] = field(default_factory=list)
    _allocations: list[_CheckedAllocation] = field(default_factory=list)
    _environments: dict[str, PublishedEnvironment] = field(default_factory=dict)

    @property
    def _limit_s(self) -> float:
        """How long to wait for machines, in seconds."""
        return self.wait_s if self.wait_s is not None else BUILD_WAIT_S if self._environments else WAIT_S

    def run(self) -> PoolReport:
        """Return the report; all machines are released when this returns or raises."""
        tables = launch_plan.coordinator_pools(self.settings, self.names).pools
        where = str(self.settings.file or "")
        pools = {name: pool_config.parse(name, tables[name], where) for name in self.names}
        launch_plan.create_directory(self.directory)
        keep_directory = False
        try:
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(self._coordinator([pool.engine for pool, _ in pools.values()]))
                stack.callback(self._release_and_close, [engine for _, engine in pools.values()])
                self._publish_environments(client, [engine for _, engine in pools.values()])
                self._allocate({name: (engine, min(self.count, pool.limit)) for name, (pool, engine) in pools.items()})
                joined = self._wait_for_agents(client)
                machines = self._describe_machines(joined)
                pairs = self._connect_pairs(machines)
                missing = tuple(self._missing(joined))
                urls, ports = read_urls(self.directory), self.settings.text("ports")
        except ServiceFailed:
            # The error names a log in it.
            keep_directory = True
            raise
        finally:
            if not keep_directory:
                launch_plan.remove_directory(self.directory)
        report = PoolReport(machines, pairs, missing, urls, ports)
        if not machines and not missing:
            raise PoolCheckFailed("no machine was requested", do="name a pool of shoal.toml")
        return msgspec.structs.replace(report, verdicts=diagnosis.verdicts(report))

    @contextlib.contextmanager
    def _coordinator(self, engines: Sequence[str]) -> Iterator[ApiClient]:
        """Run a coordinator of our own, whose lifeline ends it even if we are killed."""
        (self.directory / SUPERVISOR_FILE).write_text(f"{os.getpid()}\n")
        argv = list(launch_plan.plan_launch(self.directory, self.settings, None).coordinator)
        argv[argv.index("--host") + 1] = self.settings.text("host") or launch_plan.listen_host(engines)
        service = ChildService("coordinator", argv, self.directory / COORDINATOR_LOG)
        service.start()
        try:
            yield wait_until_ready(service, self.directory)
        finally:
            service.stop(GRACE_S)

    # --- allocating and releasing machines

    def _publish_environments(self, client: ApiClient, engines: Sequence[Engine]) -> None:
        """Upload what machines need to build the environments of their pools, as a run would."""
        blobs: dict[str, Path | bytes] = {}

        def put(source: Path | bytes) -> str:
            digest = hashlib.sha256(source if isinstance(source, bytes) else source.read_bytes()).hexdigest()
            blobs[digest] = source
            return digest

        for text in dict.fromkeys(engine.options.environment for engine in engines if engine.options.environment):
            self.note(f"publishing the environment {text}; machines that lack it build it, which may take minutes")
            self._environments[text] = recipe.publish(text, put)
        if blobs:
            client.send(blobs)

    def _allocate(self, engines: Mapping[str, tuple[Engine, int]]) -> None:
        self._allocations = [
            _CheckedAllocation(f"{name}-{number}", name, engine)
            for name, (engine, count) in engines.items()
            for number in range(1, count + 1)
        ]
        self.note(f"requesting {', '.join(allocation.agent for allocation in self._allocations)}")
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._submit_all, engines))

    def _submit_all(self, pool: str) -> None:
        """Request the machines of one pool, one after another, as a provisioner does."""
        access = credentials.read(self.directory / "token")
        url, options = ",".join(read_urls(self.directory)), launch_plan.agent_options(self.settings)
        for allocation in [allocation for allocation in self._allocations if allocation.pool == pool]:
            apart = () if allocation.engine.shared else ("--apart",)
            agent = (*options, *apart, *AGENT_OPTIONS)
            environment = self._environments.get(allocation.engine.options.environment)
            request = AllocationRequest(
                allocation.agent, self.directory.name, url, access, 0, agent, environment=environment
            )
            try:
                allocation.handle = allocation.engine.submit(request)
            except ShoalError as error:
                allocation.ended, allocation.do = _summary(error), error.do
            except OSError as error:
                allocation.ended = str(error)

    def _wait_for_agents(self, client: ApiClient) -> dict[str, AgentView]:
        """Return the connected agents once all have joined, the others have ended, or the time is up."""
        deadline, watch_at = time.monotonic() + self._limit_s, 0.0
        while True:
            joined = {agent.agent: agent for agent in client.agents() if agent.connected}
            waiting = [
                allocation
                for allocation in self._allocations
                if allocation.agent not in joined and allocation.ended is None
            ]
            if not waiting or time.monotonic() > deadline:
                return joined
            if time.monotonic() >= watch_at:
                for engine in dict.fromkeys(allocation.engine for allocation in waiting):
                    self._watch(engine, [allocation for allocation in waiting if allocation.engine is engine])
                watch_at = time.monotonic() + WATCH_EVERY_S
            time.sleep(POLL_S)

    def _watch(self, engine: Engine, waiting: Sequence[_CheckedAllocation]) -> None:
        """Record what the engine reports about the machines that have not joined yet."""
        try:
            statuses = {status.allocation: status for status in engine.watch(self.directory.name)}
        except ShoalError as error:
            for allocation in waiting:
                allocation.do = _summary(error)
            return
        for allocation in waiting:
            status = statuses.get(allocation.agent)
            if status is not None:
                allocation.started = allocation.started or status.state != "waiting"
                allocation.ended = status.why or "it ended" if status.state == "gone" else None
                allocation.waits_for = status.why if status.state == "waiting" else ""

    def _missing(self, joined: Mapping[str, AgentView]) -> Iterator[MissingMachine]:
        for allocation in self._allocations:
            if allocation.agent not in joined:
                waits = f"still waiting for {allocation.waits_for}" if allocation.waits_for else "no sign of it"
                why = allocation.ended if allocation.ended is not None else f"{waits} after {self._limit_s:g} s"
                yield MissingMachine(allocation.agent, allocation.pool, why, allocation.do, allocation.started)

    def _release_and_close(self, engines: Sequence[Engine]) -> None:
        """Release all machines, also if the user presses Ctrl-C meanwhile, and close the engines."""
        try:
            self._release(engines)
        except KeyboardInterrupt:
            self._release(engines)
            raise
        finally:
            for engine in engines:
                engine.close()

    def _release(self, engines: Sequence[Engine]) -> None:
        """Cancel the requested machines, then any other with our tag; record in `unreleased` what still runs."""
        self.note("releasing all machines")
        requested = [(allocation.engine, allocation.handle) for allocation in self._allocations if allocation.handle]
        with ThreadPoolExecutor(THREADS) as threads:
            failures = dict(zip((handle for _, handle in requested), threads.map(_cancel, requested), strict=True))
            running = [pair for engine in engines for pair in self._still_running(engine)]
            failures |= dict(zip((handle for _, handle in running), threads.map(_cancel, running), strict=True))
        self.unreleased += [f"{handle}: {why}" for handle, why in failures.items() if why]

    def _still_running(self, engine: Engine) -> list[tuple[Engine, str]]:
        try:
            return [(engine, status.handle) for status in engine.watch(self.directory.name) if status.state != "gone"]
        except ShoalError as error:
            self.unreleased.append(f"pool {engine.pool}: {_summary(error)}")
            return []

    # --- checking machines

    def _request(self, **fields: object) -> CheckRequest:
        common = {"ports": self.settings.text("ports"), "interface": self.settings.text("interface")}
        return msgspec.convert({**common, **fields}, CheckRequest)

    def _describe_machines(self, joined: Mapping[str, AgentView]) -> tuple[MachineReport, ...]:
        self.note(f"checking {', '.join(joined) or 'nothing: no machine joined'}")
        pools = {allocation.agent: allocation.pool for allocation in self._allocations}
        with ThreadPoolExecutor(THREADS) as threads:
            reports = threads.map(lambda view: self._describe(view, pools.get(view.agent, "")), joined.values())
            return tuple(report for report in reports if report is not None)

    def _describe(self, view: AgentView, pool: str) -> MachineReport | None:
        with self._client() as client:
            sent = time.time()
            try:
                reply = client.examine(view.agent, self._request())
            except ShoalError as error:
                self.note(str(error))
                return None
            received = time.time()
        if reply.facts is None:
            return None
        # As in NTP: the mean of both directions cancels the latency if it is the same both ways.
        skew_s = ((reply.received - sent) + (reply.sent - received)) / 2
        within_s = ((received - sent) - (reply.sent - reply.received)) / 2
        return MachineReport(view.agent, pool, view.via, reply.facts, skew_s, within_s)

    def _connect_pairs(self, machines: Sequence[MachineReport]) -> tuple[ConnectionReport, ...]:
        """Check each ordered pair, one at a time: concurrent streams would share the bandwidth."""
        pairs = [
            (source, target)
            for source in machines
            for target in machines
            if source is not target and target.facts.listens
        ]
        lasting_s = min(STREAM_S, STREAMS_S / max(1, len(pairs)))
        reports = []
        with self._client() as client:
            for source, target in pairs:
                self.note(f"{source.agent} → {target.agent}")
                request = self._request(peer=target.agent, lasting_s=lasting_s)
                request = msgspec.structs.replace(request, addresses=target.facts.listens)
                try:
                    attempts = client.examine(source.agent, request).attempts
                    reports.append(ConnectionReport(source.agent, target.agent, attempts))
                except ShoalError as error:
                    reports.append(ConnectionReport(source.agent, target.agent, error=_summary(error)))
        return tuple(reports)

    @contextlib.contextmanager
    def _client(self) -> Iterator[ApiClient]:
        url = (self.directory / "url").read_text("ascii").strip()
        client = open_client(url, str(self.directory / "token"), REPLY_TIMEOUT_S)
        try:
            yield client
        finally:
            client.close()


def _cancel(allocation: tuple[Engine, str]) -> str:
    """Cancel an allocation (engine, handle); return why it may still run, empty if it does not."""
    engine, handle = allocation
    try:
        engine.cancel(handle)
    except ShoalError as error:
        return _summary(error)
    return ""


def _summary(error: ShoalError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what
