"""The shell around the decisions: events come in, are journaled, decided, and carried out, one at a time.

Everything here runs on one event loop and handles an event to its end before the next, so there is no queue to wait in.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import shoal
from shoal.config import parse_settings
from shoal.coordinator import deliver, history, present, records
from shoal.coordinator.links import AgentLink, MemberLink
from shoal.coordinator.logs import Logs
from shoal.coordinator.runs import Asked, Run, Runs
from shoal.core import events as ev
from shoal.core import fleet as fl
from shoal.core import membership as mb
from shoal.errors import (
    AmbiguousRun,
    BadCount,
    BadMessage,
    BadRequest,
    BadScript,
    JournalUnwritable,
    NameTaken,
    NotOver,
    RunOver,
    UnknownRun,
    VersionMismatch,
    WrongRun,
)
from shoal.store.journal import Entry, Journal, event_of, last_at
from shoal.store.views import Views
from shoal.wire import messages as ms
from shoal.wire.views import AgentView, RunSpec, RunView, ScaleAsk, StopAsk, StoryLine

log = logging.getLogger("shoal.coordinator")

MAX_HELD = 100_000
TICK_S = 0.05
OVERSLEPT_S = 1.0
LISTEN_AGAIN_S = 0.5
FLUSH_S = 0.2
MEASURE_EVERY_S = 1.0
AGENT_SILENT_S = 10.0
AGENT_BEAT_S = 1.0
ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


class Clock:
    """Wall-clock time that never jumps: read once, then counted."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._start = max(time.time(), not_before)
        self._mark = time.monotonic()

    def now(self) -> float:
        return self._start + time.monotonic() - self._mark


class Service:
    """The state of all runs of one coordinator, and its members and agents."""

    def __init__(self, directory: Path, journal: Journal, views: Views, name: str) -> None:
        self.directory = directory
        self.name = name
        self.runs = Runs()
        self.agents: dict[str, AgentLink] = {}
        self.trouble: JournalUnwritable | None = None
        self.logs = Logs(directory)
        self._journal = journal
        self._views = views
        self._live: dict[str, present.Live] = {}
        self._held: deque[Callable[[], object]] = deque()
        self._changed: set[str] = set()
        self._fired: dict[tuple[str, str], float] = {}
        self.clock = Clock(last_at(journal.entries))
        self._ticked_at = self.clock.now()
        self._deaf_until = 0.0

    # --- the one way in

    def record(self, run: str, event: Any) -> Asked:
        """Journal an event and decide about it; carrying out is left to the caller."""
        at = self.clock.now()
        entry = self._journal.append(run, event, at)
        return self._take_in(entry, event, at)

    def handle(self, run: str, event: Any) -> None:
        self.carry_out(self.record(run, event))

    def _take_in(self, entry: Entry, event: Any, at: float, *, shown: bool = False) -> Asked:
        run = getattr(event, "run", "") or entry.run
        asked = self.runs.apply(entry.run, event, at)
        if isinstance(event, records.Measured):
            self.live(run).measured = event
        if not shown:
            history.put(self._views, entry, event, asked, self.runs.runs.get(run))
        self._changed.update(name for name, _ in asked)
        self._changed.add(run)
        return asked

    def replay(self) -> None:
        """Be what the journal says, and begin anew: all connections are gone."""
        shown = self._views.seq
        if shown > self._journal.seq:
            shown = self._views.forget()
        for entry in self._journal.entries:
            event = event_of(entry, records.KINDS)
            # As when it happened: an event that could not be handled then cannot be handled now.
            self._try(partial(self._take_in, entry, event, entry.at, shown=entry.seq <= shown))
        self._journal.entries.clear()
        self.handle("", fl.Opened(secrets.token_hex(4)))
        for run in self.runs.runs.values():
            if not run.over:
                self.handle(run.name, ev.CoordinatorRestarted())

    def live(self, run: str) -> present.Live:
        return self._live.setdefault(run, present.Live())

    def attempt(self, action: Callable[[], object]) -> None:
        """Do something that is journaled; while the journal cannot be written, it waits in line."""
        if self._held:
            if len(self._held) < MAX_HELD:
                self._held.append(action)
        elif not self._try(action):
            self._held.append(action)

    def _try(self, action: Callable[[], object]) -> bool:
        """Whether it is done with; False while the journal cannot be written."""
        try:
            action()
        except JournalUnwritable as error:
            if self.trouble is None:
                log.error("%s", error)
            self.trouble = error
            return False
        except Exception:
            # One event that we got wrong must not cost all others the coordinator.
            log.exception("an event could not be handled")
        return True

    def _retry(self) -> None:
        while self._held:
            if not self._try(self._held[0]):
                return
            self._held.popleft()
        self.trouble = None

    # --- carrying out

    def carry_out(self, asked: Asked) -> None:
        for run, instruction in asked:
            if isinstance(instruction, fl.StartProcess):
                self._start_process(instruction)
            elif isinstance(instruction, fl.EndProcess):
                link = self.agents.get(instruction.agent)
                if link is not None:
                    link.send(deliver.end_member(instruction))
            elif isinstance(instruction, ev.Refuse):
                self._refuse(run, instruction)
            else:
                self._tell_members(run, instruction)

    def _tell_members(self, run: str, instruction: Any) -> None:
        links = self.live(run).links
        for member, message in deliver.to_members(instruction):
            link = links.get(member)
            if link is not None:
                link.send(message)
                if isinstance(message, ms.Expelled):
                    link.expelled = member not in self.runs.runs[run].membership.members

    def _refuse(self, run: str, refusal: ev.Refuse) -> None:
        link = self.live(run).links.get(refusal.member)
        if link is not None and link.incarnation == refusal.incarnation:
            del self.live(run).links[refusal.member]
            link.refuse(refusal.code, refusal.what, refusal.why, refusal.do)

    def _start_process(self, asked: fl.StartProcess) -> None:
        link, run = self.agents.get(asked.agent), self.runs.runs[asked.run]
        if link is not None:
            link.send(deliver.start_member(asked, run.spec, run.settings, link.base_url, self.run_dir(asked.run)))

    # --- members

    def member_said(self, link: MemberLink, message: ms.FromMember) -> None:
        link.heard_at = self.clock.now()
        if isinstance(message, ms.MemberHello):
            self.attempt(partial(self._member_hello, link, message))
        elif not link.member:
            link.refuse(BadMessage.code, "the first message was not a hello")
        elif isinstance(message, ms.Beat):
            self._beat(link, message)
        else:
            self.attempt(partial(self._member_event, link, message))

    def _member_hello(self, link: MemberLink, hello: ms.MemberHello) -> None:
        if link.closed or not self._may_join(link, hello):
            return
        live = self.live(hello.run)
        link.run, link.member, link.incarnation, link.pid = hello.run, hello.member, hello.incarnation, hello.pid
        event = ev.Hello(
            hello.member, hello.incarnation, hello.address, hello.world, hello.step, hello.broken, hello.done
        )
        asked = self.record(hello.run, event)
        refusal = next((i for _, i in asked if isinstance(i, ev.Refuse) and i.incarnation == hello.incarnation), None)
        if refusal is not None:
            link.refuse(refusal.code, refusal.what, refusal.why, refusal.do)
            return
        old = live.links.get(hello.member)
        if old is not None and old is not link:
            old.close()
        live.links[hello.member] = link
        live.beats[hello.member] = mb.Beat(self.clock.now(), hello.world, hello.step)
        live.said.pop(hello.member, None)
        link.expelled = False
        run = self.runs.runs[hello.run]
        beat_s, rules = float(run.settings.get("beat_s", 0.5)), run.membership.rules
        link.send(ms.Welcome(beat_s, rules.lease_s, self.name, run.membership.started))
        self.carry_out(asked)

    def _may_join(self, link: MemberLink, hello: ms.MemberHello) -> bool:
        run = self.runs.runs.get(hello.run)
        process = self.runs.fleet.processes.get((hello.run, hello.member))
        if not self._same_version(link, hello.protocol, hello.version):
            return False
        if run is None or run.over:
            what = f"the run {hello.run} has ended" if run else f"there is no run {hello.run} here"
            link.refuse(WrongRun.code, what, why=run.reason if run else "", do="shoal ps lists the runs")
        elif process is not None and process.alive and process.incarnation != hello.incarnation:
            why = f"the agent {process.agent} answers for another process of that name"
            link.refuse(NameTaken.code, f"a member named {hello.member} is already in this run", why=why)
        elif not re.fullmatch(r"[\w.:-]+(/[\w.:-]+)*", hello.member) or len(hello.member) > 200:
            link.refuse(BadMessage.code, "the name of the member cannot be used", why=repr(hello.member[:80]))
        else:
            return True
        return False

    def _same_version(self, link: MemberLink | AgentLink, protocol: int, version: str) -> bool:
        if protocol == ms.PROTOCOL and version == shoal.__version__:
            return True
        ours = f"{shoal.__version__} (protocol {ms.PROTOCOL})"
        what = f"the coordinator runs Shoal {ours}, this process {version} (protocol {protocol})"
        link.refuse(VersionMismatch.code, what, do=f"install Shoal {shoal.__version__} on both machines")
        return False

    def _known(self, link: MemberLink) -> Run | None:
        """The run of a member that is still in it; others are told that they are out."""
        run = self.runs.runs.get(link.run)
        member = run.membership.members.get(link.member) if run is not None else None
        if link.expelled or run is None:
            return None
        if run.over and run.membership.finished:
            return run
        if member is None or member.incarnation != link.incarnation:
            link.expelled = True
            link.send(ms.Expelled("its lease ran out, or it has left"))
            return None
        return run

    def _member_event(self, link: MemberLink, message: ms.FromMember) -> None:
        run = self.runs.runs.get(link.run)
        if isinstance(message, ms.Raised) and run is not None and not run.over:
            raised = records.MemberRaised(
                link.member, message.kind, message.text, message.traceback[-20_000:], message.code
            )
            self.handle(link.run, raised)
            return
        run = self._known(link)
        event = deliver.event_of(link.member, message)
        if run is None or event is None or run.over:
            return
        self._renew(link)
        asked = self.record(link.run, event)
        self.carry_out(asked)
        if isinstance(message, ms.Left):
            link.expelled = True

    def _renew(self, link: MemberLink) -> None:
        beats = self.live(link.run).beats
        beats[link.member] = _renewed(beats.get(link.member), self.clock.now())

    def _beat(self, link: MemberLink, beat: ms.Beat) -> None:
        run = self._known(link)
        if run is None or run.over:
            return
        now, live = self.clock.now(), self.live(link.run)
        live.beats[link.member] = mb.Beat(now, beat.world, beat.step, beat.phase, beat.phase_age_s, beat.usual_step_s)
        live.said[link.member] = beat
        if now - live.measured_at >= MEASURE_EVERY_S:
            self._measure(run, live, now)

    def _measure(self, run: Run, live: present.Live, now: float) -> None:
        found = present.measure(run, live)
        live.measured_at = now
        if found is None or self._held or (live.measured is not None and found.step == live.measured.step):
            return
        self.attempt(partial(self.handle, run.name, ev.Progressed(found.step)))
        self.attempt(partial(self.handle, run.name, found))

    def member_gone(self, link: MemberLink) -> None:
        link.closed = True
        live = self.live(link.run) if link.run else None
        if live is not None and live.links.get(link.member) is link:
            del live.links[link.member]
            self.attempt(partial(self._disconnected, link))

    def _disconnected(self, link: MemberLink) -> None:
        run = self.runs.runs.get(link.run)
        member = run.membership.members.get(link.member) if run is not None and not run.over else None
        back = link.member in self.live(link.run).links
        if member is not None and member.incarnation == link.incarnation and not back:
            self.handle(link.run, ev.Disconnected(link.member))

    # --- agents

    def agent_said(self, link: AgentLink, message: ms.FromAgent) -> None:
        link.heard_at = self.clock.now()
        if isinstance(message, ms.AgentHello):
            self.attempt(partial(self._agent_hello, link, message))
        elif not link.agent:
            link.refuse(BadMessage.code, "the first message was not a hello")
        elif isinstance(message, ms.AgentBeat):
            link.load, link.memory_free_bytes = message.load, message.memory_free_bytes
        elif isinstance(message, ms.LogLines):
            self._log(message)
        else:
            self.attempt(partial(self._agent_event, link, message))

    def _agent_hello(self, link: AgentLink, hello: ms.AgentHello) -> None:
        if link.closed or not self._same_version(link, hello.protocol, hello.version):
            return
        old = self.agents.get(hello.agent)
        if old is not None and old is not link:
            if old.pid != hello.pid and self.clock.now() - old.heard_at < 3 * AGENT_BEAT_S:
                do = "give this one another name with --name"
                link.refuse(NameTaken.code, f"an agent named {hello.agent} is already connected", do=do)
                return
            old.close()
        if not re.fullmatch(r"[\w.:-]+", hello.agent) or len(hello.agent) > 100:
            link.refuse(BadMessage.code, "the name of the agent cannot be used", why=repr(hello.agent[:80]))
            return
        host = link.peer if link.peer not in ("127.0.0.1", "::1") else "127.0.0.1"
        known, told = (
            self.runs.machines.get(hello.agent),
            records.MachineKnown(hello.agent, hello.machine, hello.pid),
        )
        successor = known is not None and known.pid != hello.pid
        joined = fl.AgentJoined(hello.agent, hello.slots, host, hello.members, successor)
        if known != told:
            self.handle("", told)
        asked = self.record("", joined)
        link.agent, link.pid = hello.agent, hello.pid
        self.agents[hello.agent] = link
        link.send(ms.AgentWelcome(AGENT_BEAT_S, self.name))
        self.carry_out(asked)

    def _agent_event(self, link: AgentLink, message: ms.FromAgent) -> None:
        if isinstance(message, ms.MemberStarted):
            started = fl.ProcessStarted(message.run, message.member, message.incarnation, message.pid, message.warm)
            self.handle(message.run, started)
        elif isinstance(message, ms.MemberExited):
            if self._is_news(message):
                self.handle(message.run, _exited(message))
        elif isinstance(message, ms.MachineNotice):
            self._notice(link, message)

    def _is_news(self, message: ms.MemberExited) -> bool:
        """Agents tell exits again after a reconnect; the second telling is not worth a line."""
        process = self.runs.fleet.processes.get((message.run, message.member))
        return process is not None and process.incarnation == message.incarnation and process.alive

    def _notice(self, link: AgentLink, message: ms.MachineNotice) -> None:
        cause = f"{message.source}: {message.detail}" if message.detail else message.source
        asked = self.record("", fl.AgentNotice(link.agent, message.within_s, cause))
        for process in self.runs.fleet.processes.values():
            member = self.live(process.run).links.get(process.member)
            if process.agent == link.agent and process.alive and member is not None:
                member.send(ms.Leaving(message.within_s, cause))
        self.carry_out(asked)

    def _log(self, message: ms.LogLines) -> None:
        if message.run in self.runs.runs:
            try:
                self.logs.append(message.run, message.member, message.lines)
            except OSError:
                # The agent keeps the full file on its machine; here the lines are only a copy.
                return

    def agent_gone(self, link: AgentLink) -> None:
        link.closed = True
        if link.agent and self.agents.get(link.agent) is link:
            del self.agents[link.agent]
            self.attempt(partial(self.handle, "", fl.AgentAway(link.agent)))

    # --- time

    def tick(self) -> None:
        """Whatever is due."""
        if self._held:
            self._retry()
            if self._held:
                return
        now = self.clock.now()
        self._forgive_own_sleep(now)
        if now < self._deaf_until:
            return
        for run in list(self.runs.runs.values()):
            if not run.over and not run.spec.compat:
                for event in mb.due(run.membership, self.live(run.name).beats, now):
                    if self._is_fresh(run.name, event, now):
                        self.attempt(partial(self.handle, run.name, event))
        for wait in fl.due(self.runs.fleet, now):
            self.attempt(partial(self.handle, wait.run, wait))
        for link in list(self.agents.values()):
            if now - link.heard_at > AGENT_SILENT_S:
                link.close()
                self.agent_gone(link)

    def _forgive_own_sleep(self, now: float) -> None:
        """Silence while this process did not run (stopped, swapped out, a suspended machine) is nobody's silence."""
        slept_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        if slept_s < OVERSLEPT_S:
            return
        self._deaf_until = now + LISTEN_AGAIN_S
        for live in self._live.values():
            for member, beat in live.beats.items():
                live.beats[member] = replace(beat, at=min(now, beat.at + slept_s + LISTEN_AGAIN_S))
        for link in self.agents.values():
            link.heard_at = now

    def _is_fresh(self, run: str, event: ev.Event, now: float) -> bool:
        """A timer that changes nothing is not journaled at every tick."""
        if not isinstance(event, ev.TimerFired):
            return True
        key = (run, event.what)
        if now - self._fired.get(key, 0.0) < 1.0 and self._fired.get(key) is not None:
            return False
        self._fired[key] = now
        return True

    async def keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    async def keep_views(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write the views in another thread, so that no member waits for SQLite."""
        self._show_changes()
        batch = self._views.take()
        if not batch.rows:
            return
        try:
            await asyncio.to_thread(self._views.write, batch)
        except sqlite3.Error:
            self._views.give_back(batch)

    def _show_changes(self) -> None:
        for name in self._changed & self.runs.runs.keys():
            self._views.put_run(self.view(name))
            if self.runs.runs[name].over:
                self.logs.close(name)
        if self._changed:
            for view in self.agent_views():
                self._views.put_agent(view)
        self._changed.clear()

    def close(self) -> None:
        self._show_changes()
        self._views.close()
        self.logs.close()
        self._journal.close()

    # --- what the API asks

    def find(self, text: str) -> Run:
        """A run by id, by name, or by the beginning of its id."""
        runs = self.runs.runs
        if text in runs:
            return runs[text]
        named = [run for run in runs.values() if run.spec.name == text]
        matching = named or [run for run in runs.values() if run.name.startswith(text)]
        going = [run for run in matching if not run.over]
        if len(matching) > 1 and len(going) == 1:
            matching = going
        if not matching:
            raise UnknownRun(f"there is no run {text}", do="shoal ps lists the runs")
        if len(matching) > 1:
            names = ", ".join(run.name for run in matching)
            raise AmbiguousRun(f"several runs are meant by {text}", why=names, do="use more of the id")
        return matching[0]

    def run_dir(self, run: str) -> str:
        return str(self.directory / "runs" / run)

    def view(self, name: str) -> RunView:
        run = self.runs.runs[name]
        return present.run_view(run, self.runs, self.live(name), self.run_dir(name), self.clock.now())

    def run_views(self) -> list[RunView]:
        return [self.view(name) for name in self.runs.runs]

    def agent_views(self) -> list[AgentView]:
        return present.agent_views(self.runs, self.agents, self.clock.now())

    def _writable(self) -> None:
        if self._held:
            self._retry()
        if self.trouble is not None:
            raise self.trouble

    def create(self, spec: RunSpec) -> RunView:
        low, high = spec.members
        if not 1 <= low <= high:
            raise BadCount(f"{low}:{high} members cannot be", why="it must be 1 ≤ MIN ≤ MAX")
        if not spec.argv:
            raise BadScript("there is nothing to run", do="name a script")
        if spec.compat not in ("", "torchrun", "tf"):
            raise BadRequest(f"{spec.compat!r} is no kind of script", do="use torchrun or tf")
        settings = msgspec.to_builtins(parse_settings(spec.settings))
        self._writable()
        name = self._new_id(spec.name)
        Path(self.run_dir(name)).mkdir(parents=True, exist_ok=True)
        self.handle(name, records.RunCreated(spec, settings))
        return self.view(name)

    def _new_id(self, name: str) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "run"
        while True:
            found = f"{slug}-{''.join(secrets.choice(ALPHABET) for _ in range(4))}"
            if found not in self.runs.runs:
                return found

    def stop(self, run: Run, ask: StopAsk) -> RunView:
        if run.over:
            raise RunOver(f"the run {run.name} has ended", why=run.reason)
        self._writable()
        self.handle(run.name, records.StopRequested(ask.reason, ask.checkpoint, ask.grace_s))
        return self.view(run.name)

    def scale(self, run: Run, ask: ScaleAsk) -> RunView:
        if run.over:
            raise RunOver(f"the run {run.name} has ended", why=run.reason)
        if not 1 <= ask.min <= ask.max:
            raise BadCount(f"{ask.min}:{ask.max} members cannot be", why="it must be 1 ≤ MIN ≤ MAX")
        self._writable()
        self.handle(run.name, ev.ScaleAsked(ask.min, ask.max))
        return self.view(run.name)

    def resume(self, run: Run, ask: ScaleAsk | None) -> RunView:
        if not run.over:
            raise NotOver(f"the run {run.name} is {run.state_name}", do="shoal stop ends it")
        if run.status == "done":
            raise RunOver(f"the run {run.name} is done", why=run.reason)
        rules = run.membership.rules
        self._writable()
        low, high = (ask.min, ask.max) if ask is not None else (rules.min_members, rules.max_members)
        self.handle(run.name, records.RunResumed(low, high))
        return self.view(run.name)

    async def story(self, run: Run, member: str, after: int, limit: int) -> list[StoryLine]:
        await self.flush()
        return await asyncio.to_thread(self._views.story, run.name, run.created, member, after, limit)

    @property
    def busy(self) -> bool:
        """Whether a process that an agent answers for is still alive."""
        return any(process.alive and process.agent in self.agents for process in self.runs.fleet.processes.values())

    def shut_down(self, reason: str) -> None:
        """End what goes on here, so that it can be resumed, and send the agents away."""
        for run in self.runs.runs.values():
            if not run.over:
                self.attempt(partial(self.handle, run.name, records.StopRequested(reason, False, 0.0, "resumable")))
        for link in list(self.agents.values()):
            link.send(ms.ShutDown(reason))


def _renewed(old: mb.Beat | None, now: float) -> mb.Beat:
    return mb.Beat(now) if old is None else replace(old, at=now)


def _exited(message: ms.MemberExited) -> fl.ProcessExited:
    return fl.ProcessExited(
        message.run,
        message.member,
        message.incarnation,
        message.cause,
        message.detail,
        message.exit_code,
        message.signal,
    )
