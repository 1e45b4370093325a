"""Hires machines of pools for a moment, lets them examine each other, and gives all of them back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.core.provisioning.events import PoolInfo
from shoal.doctor import diagnosis
from shoal.doctor.diagnosis import ConnectionReport, MachineReport, MissingMachine, PoolReport
from shoal.engines import pool_config
from shoal.engines.engine import AllocationRequest, Engine
from shoal.errors import PoolCheckFailed, ShoalError
from shoal.launch import address
from shoal.launch import launch_plan as render
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.child_service import ChildService
from shoal.launch.run_lookup import SUPERVISOR
from shoal.launch.settings_layers import ResolvedSettings
from shoal.launch.supervisor import GRACE_S, wait_for
from shoal.wire import credentials
from shoal.wire.api import AgentView
from shoal.wire.machine_check import CheckRequest
from shoal.wire.pool_files import urls_of

LOOK_S = 0.5
ASK_EVERY_S = 2.0
ANSWER_S = 60.0
AT_ONCE = 16
STREAMS_S = 60.0
STREAM_S = 1.0
# Nobody else looks after these agents: without the doctor they end soon, and have nothing worth handing over.
AGENT = ("--preload", "msgspec", "--grace", "2", "--idle", "20", "--orphan", "20")


@dataclass(slots=True)
class _CheckedAllocation:
    agent: str
    pool: str
    engine: Engine
    handle: str = ""
    started: bool = False
    gone: str | None = None
    waits_for: str = ""
    do: str = ""


@dataclass(slots=True)
class PoolCheck:
    """`count` machines of each pool, for which `wait_s` is enough; `say` is told how it goes on."""

    choices: ResolvedSettings
    names: Sequence[str]
    count: int
    directory: Path
    wait_s: float
    say: Callable[[str], object]
    left: list[str] = field(default_factory=list)
    _hires: list[_CheckedAllocation] = field(default_factory=list)

    def examine(self) -> PoolReport:
        """All that can be found out. Everything is given back when this returns, however it does."""
        found = {name: self._pool(name) for name in self.names}
        render.make(self.directory)
        try:
            with contextlib.ExitStack() as undo:
                client = undo.enter_context(self._coordinator([pool.engine for pool, _ in found.values()]))
                undo.callback(self._surely_give_back, [engine for _, engine in found.values()])
                self._hire({name: (engine, min(self.count, pool.limit)) for name, (pool, engine) in found.items()})
                here = self._await(client)
                machines = self._look(here)
                pairs = self._reach(machines)
                missing = tuple(self._missing(here))
                urls, ports = urls_of(self.directory), self.choices.text("ports")
        finally:
            render.unmake(self.directory)
        report = PoolReport(machines, pairs, missing, urls, ports)
        if not machines and not missing:
            raise PoolCheckFailed("no machine was asked for", do="name a pool of shoal.toml")
        return msgspec.structs.replace(report, verdicts=diagnosis.verdicts(report))

    def _pool(self, name: str) -> tuple[PoolInfo, Engine]:
        return pool_config.parse(name, self.choices.pools.get(name, render.LOCAL_POOL), str(self.choices.file or ""))

    @contextlib.contextmanager
    def _coordinator(self, engines: Sequence[str]) -> Iterator[ApiClient]:
        """One of our own, which ends when we do, even without a word."""
        (self.directory / SUPERVISOR).write_text(f"{os.getpid()}\n")
        launch = render.render(self.directory, self.choices, None)
        argv = list(launch.coordinator)
        argv[argv.index("--host") + 1] = self.choices.text("host") or address.of_coordinator(engines)
        service = ChildService("coordinator", argv, self.directory / "coordinator.log")
        service.start()
        try:
            yield wait_for(service, self.directory)
        finally:
            service.end(GRACE_S)

    # --- machines come and go

    def _hire(self, engines: Mapping[str, tuple[Engine, int]]) -> None:
        self._hires = [
            _CheckedAllocation(f"{name}-{number}", name, engine)
            for name, (engine, count) in engines.items()
            for number in range(1, count + 1)
        ]
        self.say(f"asks for {', '.join(one.agent for one in self._hires)}")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(self._submit_all, engines))

    def _submit_all(self, pool: str) -> None:
        """One after another, as hiring does: what a pool says never contradicts what it was asked."""
        access = credentials.read(self.directory / "token")
        url, own = ",".join(urls_of(self.directory)), render.agent_options(self.choices)
        for hire in [one for one in self._hires if one.pool == pool]:
            apart = () if hire.engine.shared else ("--apart",)
            ask = AllocationRequest(hire.agent, self.directory.name, url, access, 0, (*own, *apart, *AGENT))
            try:
                hire.handle = hire.engine.submit(ask)
            except ShoalError as error:
                hire.gone, hire.do = _in_short(error), error.do
            except OSError as error:
                hire.gone = str(error)

    def _await(self, client: ApiClient) -> dict[str, AgentView]:
        """Those that are here when all are, or the rest is gone, or time is over."""
        deadline, ask_at = time.monotonic() + self.wait_s, 0.0
        while True:
            here = {one.agent: one for one in client.agents() if one.connected}
            waiting = [one for one in self._hires if one.agent not in here and one.gone is None]
            if not waiting or time.monotonic() > deadline:
                return here
            if time.monotonic() >= ask_at:
                for engine in dict.fromkeys(one.engine for one in waiting):
                    self._ask_about(engine, waiting)
                ask_at = time.monotonic() + ASK_EVERY_S
            time.sleep(LOOK_S)

    def _ask_about(self, engine: Engine, waiting: Sequence[_CheckedAllocation]) -> None:
        try:
            seen = {one.allocation: one for one in engine.watch(self.directory.name)}
        except ShoalError as error:
            for hire in waiting:
                hire.do = _in_short(error) if hire.engine is engine else hire.do
            return
        for hire in waiting:
            one = seen.get(hire.agent)
            if hire.engine is engine and one is not None:
                hire.started = hire.started or one.state != "waiting"
                hire.gone = one.why or "it ended" if one.state == "gone" else None
                hire.waits_for = one.why if one.state == "waiting" else ""

    def _missing(self, here: Mapping[str, AgentView]) -> Iterator[MissingMachine]:
        for one in self._hires:
            if one.agent not in here:
                waited = f"it waits for {one.waits_for}" if one.waits_for else "nothing was heard of it"
                why = one.gone if one.gone is not None else f"{waited}, after {self.wait_s:g} s"
                yield MissingMachine(one.agent, one.pool, why, one.do, one.started)

    def _surely_give_back(self, engines: Sequence[Engine]) -> None:
        """Also if somebody is impatient while it is done."""
        try:
            self._give_back(engines)
        except KeyboardInterrupt:
            self._give_back(engines)
            raise
        finally:
            for engine in engines:
                engine.close()

    def _give_back(self, engines: Sequence[Engine]) -> None:
        """Cancel what was asked for, then whatever has our tag; `left` is what would not go."""
        self.say("gives all machines back")
        known = [(one.engine, one.handle) for one in self._hires if one.handle]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            trouble = dict(zip((handle for _, handle in known), threads.map(_cancel, known), strict=True))
            seen = [found for engine in engines for found in self._still(engine)]
            trouble |= dict(zip((handle for _, handle in seen), threads.map(_cancel, seen), strict=True))
        self.left += [f"{handle}: {why}" for handle, why in trouble.items() if why]

    def _still(self, engine: Engine) -> list[tuple[Engine, str]]:
        try:
            return [(engine, one.handle) for one in engine.watch(self.directory.name) if one.state != "gone"]
        except ShoalError as error:
            self.left.append(f"pool {engine.pool}: {_in_short(error)}")
            return []

    # --- what they find

    def _question(self, **more: object) -> CheckRequest:
        known = {"ports": self.choices.text("ports"), "interface": self.choices.text("interface")}
        return msgspec.convert({**known, **more}, CheckRequest)

    def _look(self, here: Mapping[str, AgentView]) -> tuple[MachineReport, ...]:
        self.say(f"examines {', '.join(here) or 'nobody: none came'}")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            hired = {one.agent: one.pool for one in self._hires}
            found = list(threads.map(lambda one: self._machine(one, hired.get(one.agent, "")), here.values()))
        return tuple(one for one in found if one is not None)

    def _machine(self, view: AgentView, pool: str) -> MachineReport | None:
        with self._client() as client:
            asked = time.time()
            try:
                found = client.examine(view.agent, self._question())
            except ShoalError as error:
                self.say(str(error))
                return None
            heard = time.time()
        if found.facts is None:
            return None
        skew_s = ((found.received - asked) + (found.sent - heard)) / 2
        within_s = ((heard - asked) - (found.sent - found.received)) / 2
        return MachineReport(view.agent, pool, view.via, found.facts, skew_s, within_s)

    def _reach(self, machines: Sequence[MachineReport]) -> tuple[ConnectionReport, ...]:
        """One pair after another: two streams at a time would share what there is."""
        pairs = [(one, other) for one in machines for other in machines if one is not other and other.facts.listens]
        lasting_s = min(STREAM_S, STREAMS_S / max(1, len(pairs)))
        found = []
        with self._client() as client:
            for one, other in pairs:
                self.say(f"{one.agent} → {other.agent}")
                question = msgspec.structs.replace(
                    self._question(peer=other.agent, lasting_s=lasting_s), addresses=other.facts.listens
                )
                try:
                    attempts = client.examine(one.agent, question).attempts
                    found.append(ConnectionReport(one.agent, other.agent, attempts))
                except ShoalError as error:
                    found.append(ConnectionReport(one.agent, other.agent, trouble=_in_short(error)))
        return tuple(found)

    @contextlib.contextmanager
    def _client(self) -> Iterator[ApiClient]:
        url = (self.directory / "url").read_text("ascii").strip()
        client = open_client(url, str(self.directory / "token"), ANSWER_S)
        try:
            yield client
        finally:
            client.close()


def _cancel(what: tuple[Engine, str]) -> str:
    """Why it may still be there, empty if it is not."""
    engine, handle = what
    try:
        engine.cancel(handle)
    except ShoalError as error:
        return _in_short(error)
    return ""


def _in_short(error: ShoalError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what
