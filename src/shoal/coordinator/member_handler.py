"""What members say, as events of their runs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from shoal.coordinator import dispatch
from shoal.coordinator import live_state as present
from shoal.coordinator.connections import MemberConnection, same_version
from shoal.coordinator.service import CoordinatorService
from shoal.core.fleet import decide as fl
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.membership.state import EVALUATOR
from shoal.core.runs import events as runs_events
from shoal.core.runs.evaluation import EvaluatorState
from shoal.core.runs.state import RunState
from shoal.errors import BadMessage, NameTaken, UnknownRunForMember
from shoal.wire import member_messages as ms

MEASURE_EVERY_S = 1.0
MAX_NAME = 200


class MemberHandler:
    """The members' side of the coordinator."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def said(self, link: MemberConnection, message: ms.FromMember) -> None:
        link.heard_at = self._service.heard_at = self._service.clock.now()
        if isinstance(message, ms.MemberHelloMsg):
            self._service.attempt(partial(self._hello, link, message))
        elif not link.member:
            link.refuse(BadMessage.code, "the first message was not a hello")
        elif isinstance(message, ms.HeartbeatMsg):
            self._beat(link, message)
        else:
            self._service.attempt(partial(self._event, link, message))

    def _hello(self, link: MemberConnection, hello: ms.MemberHelloMsg) -> None:
        if link.closed or not self._may_join(link, hello):
            return
        live = self._service.live(hello.run)
        link.run, link.member, link.incarnation, link.pid = hello.run, hello.member, hello.incarnation, hello.pid
        event = ev.MemberConnected(
            hello.member,
            hello.incarnation,
            hello.address,
            hello.world,
            hello.step,
            hello.broken,
            hello.done,
            hello.role,
            hello.early,
        )
        asked = self._service.record(hello.run, event)
        refusal = next(
            (i for _, i in asked if isinstance(i, ev.RejectMember) and i.incarnation == hello.incarnation), None
        )
        if refusal is not None:
            link.refuse(refusal.code, refusal.what, refusal.why, refusal.do)
            return
        old = live.links.get(hello.member)
        if old is not None and old is not link:
            old.close()
        live.links[hello.member] = link
        live.beats[hello.member] = mb.LastHeartbeat(self._service.clock.now(), hello.world, hello.step)
        live.said.pop(hello.member, None)
        link.expelled = False
        run = self._service.runs.runs[hello.run]
        rules = run.membership.settings
        link.send(ms.WelcomeMsg(run.heartbeat_s, rules.lease_s, self._service.name, run.membership.started))
        self._service.carry_out(asked)

    def _may_join(self, link: MemberConnection, hello: ms.MemberHelloMsg) -> bool:
        run = self._service.runs.runs.get(hello.run)
        process = self._service.runs.fleet.processes.get((hello.run, hello.member))
        if not same_version(link, hello.protocol, hello.version):
            return False
        if run is None or run.over:
            what = f"the run {hello.run} has ended" if run else f"there is no run {hello.run} here"
            link.refuse(UnknownRunForMember.code, what, why=run.reason if run else "", do="shoal ps lists the runs")
        elif process is not None and process.alive and process.incarnation != hello.incarnation:
            why = f"the agent {process.agent} answers for another process of that name"
            link.refuse(NameTaken.code, f"a member named {hello.member} is already in this run", why=why)
        elif not re.fullmatch(r"[\w.:-]+(/[\w.:-]+)*", hello.member) or len(hello.member) > MAX_NAME:
            link.refuse(BadMessage.code, "the name of the member cannot be used", why=repr(hello.member[:80]))
        elif link.member not in ("", hello.member) or link.run not in ("", hello.run):
            link.refuse(BadMessage.code, f"{link.member} cannot become {hello.member} of {hello.run}")
        elif (hello.role == EVALUATOR) != (fl.role_of(hello.member) == EVALUATOR):
            link.refuse(BadMessage.code, f"{hello.member} is no name of a member with the role {hello.role}")
        else:
            return True
        return False

    def _known(self, link: MemberConnection) -> RunState | None:
        """The run of a member that is still in it; others are told that they are out."""
        run = self._service.runs.runs.get(link.run)
        member = _member(run, link.member) if run is not None else None
        if link.expelled or run is None:
            return None
        if run.over and run.membership.finished:
            return run
        if member is None or member.incarnation != link.incarnation:
            link.expelled = True
            link.send(ms.EvictedMsg("its lease ran out, or it has left"))
            return None
        return run

    def _event(self, link: MemberConnection, message: ms.FromMember) -> None:
        run = self._service.runs.runs.get(link.run)
        if isinstance(message, ms.ExceptionRaisedMsg) and run is not None and not run.over:
            raised = runs_events.ExceptionReported(
                link.member, message.kind, message.text, message.traceback[-20_000:], message.code
            )
            self._service.handle(link.run, raised)
            return
        if isinstance(message, ms.EvaluatedMsg) and fl.role_of(link.member) != EVALUATOR:
            link.refuse(BadMessage.code, f"{link.member} is no evaluator")
            return
        run = self._known(link)
        event = dispatch.event_of(link.member, message)
        if run is None or event is None or run.over:
            return
        self._renew(link)
        world = run.membership.world
        if isinstance(message, ms.WorldEnteredMsg) and world is not None and message.world == world.number:
            return  # the first to cross over has said so for all
        asked = self._service.record(link.run, event)
        self._service.carry_out(asked)
        if isinstance(message, ms.LeftMsg):
            link.expelled = True

    def _renew(self, link: MemberConnection) -> None:
        beats = self._service.live(link.run).beats
        beats[link.member] = _renewed(beats.get(link.member), self._service.clock.now())

    def _beat(self, link: MemberConnection, beat: ms.HeartbeatMsg) -> None:
        run = self._known(link)
        if run is None or run.over:
            return
        now, live = self._service.clock.now(), self._service.live(link.run)
        live.beats[link.member] = mb.LastHeartbeat(
            now, beat.world, beat.step, beat.phase, beat.phase_age_s, beat.usual_step_s, beat.waits_for
        )
        live.said[link.member] = beat
        if run.membership.finished or now - live.measured_at >= MEASURE_EVERY_S:
            self._measure(run, live, now)

    def _measure(self, run: RunState, live: present.LiveRun, now: float) -> None:
        found = present.measure(run, live)
        live.measured_at = now
        if found is None or self._service._held or not present.is_news(found, live.measured):
            return
        self._service.attempt(partial(self._service.handle, run.name, ev.ProgressRecorded(found.step)))
        self._service.attempt(partial(self._service.handle, run.name, found))

    def gone(self, link: MemberConnection) -> None:
        self._service.hung_up(link)
        live = self._service.live(link.run) if link.run else None
        if live is not None and live.links.get(link.member) is link:
            del live.links[link.member]
            self._service.attempt(partial(self._disconnected, link))

    def _disconnected(self, link: MemberConnection) -> None:
        run = self._service.runs.runs.get(link.run)
        member = _member(run, link.member) if run is not None and not run.over else None
        back = link.member in self._service.live(link.run).links
        if member is not None and member.incarnation == link.incarnation and not back:
            self._service.handle(link.run, ev.MemberDisconnected(link.member))


def _member(run: RunState, name: str) -> mb.MemberState | EvaluatorState | None:
    return run.membership.members.get(name) or run.evaluation.members.get(name)


def _renewed(old: mb.LastHeartbeat | None, now: float) -> mb.LastHeartbeat:
    return mb.LastHeartbeat(now) if old is None else replace(old, at=now)
