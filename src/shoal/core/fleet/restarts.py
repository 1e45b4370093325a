"""Restarts: what follows when a process ends that was not meant to end."""

from __future__ import annotations

from shoal import exit_codes
from shoal.core.exit_causes import is_hopeless
from shoal.core.fleet import events as fe
from shoal.core.fleet import restart_policy, run_end
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.state import ACTIVE, BACKOFF, DONE, FINISHING, GIVEN_UP, DesiredRun, ProcessState
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER

KEPT_EXITS = 100


def on_unplanned_exit(draft: FleetDraft, p: ProcessState, exited: fe.ProcessExited) -> None:
    """Restart a process at once or after a back-off, give it up, or fail its run."""
    run, cause, detail = draft.runs[p.run], exited.cause, exited.detail
    if run.status != ACTIVE and not (p.role == EVALUATOR and run.status == FINISHING):
        draft.remove(p)
        if run.status == FINISHING and cause == "user":
            run_end.fail(draft, p.run, f"{p.member}: {detail}", exit_codes.FAILED)
        elif run.status == FINISHING and p.role == TRAINER:
            draft.set_run(p.run, died_after_training=f"{p.member}: {detail or cause}")
        return
    agent = draft.agents.get(p.agent)
    if cause == "preempted" and (agent is None or agent.notice):
        draft.remove(p)
        draft.set_run(p.run, preempted=run.preempted or p.role != EVALUATOR)
        return
    if cause == "refused":
        give_up(draft, p, cause, f"{p.member}: {detail}", "it does not fit into this run")
        return
    early = exited.before_first_step and cause == "user" and p.role != EVALUATOR
    # The others train well without a member that cannot join them: then it alone is given up.
    given_up_as = "refused" if cause == "user" and exited.joining else cause
    if cause == "user" and is_hopeless(detail, before_first_step=exited.before_first_step):
        give_up(draft, p, given_up_as, f"{p.member}: {detail}", "not restarted: the run cannot work like this")
        return
    decision = judge_early(draft, run, p.member, detail) if early else judge(draft, run, p.member, cause, detail)
    if isinstance(decision, restart_policy.StopRestarting):
        give_up(draft, p, given_up_as, f"{p.member}: {detail or cause}", decision.reason)
    elif decision.after_s > 0.0 or agent is None or not agent.usable:
        # An agent that is disconnected, or has notice, may be usable again; the back-off ends no earlier.
        until = draft.now + decision.after_s
        draft.update(p, status=BACKOFF, until=until, restart_reason="", unresponsive_since=None, missing_since=None)
        if decision.after_s > 0.0:
            text = f"{p.member} restarts in {decision.after_s:.1f} s: {decision.reason}"
            draft.instruct(fe.FleetNote(p.run, text, p.member))
    else:
        draft.restart(p, decision.reason)


def judge(draft: FleetDraft, run: DesiredRun, member: str, cause: str, error: str = "") -> restart_policy.Decision:
    """Record an exit and return what the restart policy says; a member of "" stands for a whole group."""
    kind: restart_policy.Cause = (
        "user" if cause == "user" else "preempted" if cause == "preempted" else "infrastructure"
    )
    _record(draft, run, member, restart_policy.PastExit(draft.now, kind, error))
    return restart_policy.decide(run.losses.get(member, ()), kind, draft.now, run.restarts)


def judge_early(draft: FleetDraft, run: DesiredRun, member: str, error: str) -> restart_policy.Decision:
    """Record an error of the user's code before the first committed step; return what the restart policy says."""
    _record(draft, run, member, restart_policy.PastExit(draft.now, "user", error))
    present = {p.member for p in draft.of_run(run.run) if p.role != EVALUATOR} | set(run.unmanaged)
    if len(present) == 1 < run.max_members:
        present.add("")  # the only member so far: others may come
    return restart_policy.decide_before_first_step(run.losses, member, error, present, draft.now, run.restarts)


def _record(draft: FleetDraft, run: DesiredRun, member: str, past: restart_policy.PastExit) -> None:
    exits = (*run.losses.get(member, ())[1 - KEPT_EXITS :], past)
    draft.set_run(run.run, losses={**run.losses, member: exits})


def give_up(draft: FleetDraft, p: ProcessState, cause: str, what: str, why: str) -> None:
    """Stop restarting a process for a while; fail the run if it cannot do without it."""
    if p.role == EVALUATOR:
        pause_s = draft.state.timeouts.give_up_s if cause == "infrastructure" else float("inf")
        draft.update(p, status=GIVEN_UP, until=draft.now + pause_s, restart_reason="")
        text = f"training continues without its evaluator: {what} ({why})"
        draft.instruct(fe.FleetNote(p.run, text, p.member, "MemberGivenUp"))
        return
    if cause == "user":
        draft.remove(p)
        run_end.fail(draft, p.run, f"{what} ({why})", exit_codes.FAILED)
        return
    draft.update(p, status=GIVEN_UP, until=draft.now + draft.state.timeouts.give_up_s, restart_reason="")
    run = draft.runs[p.run]
    remaining = sum(q.status not in (GIVEN_UP, DONE) and q.role == p.role for q in draft.of_run(p.run))
    needed, kind = (1, "servers") if p.role == SERVER else (run.min_members, "members")
    if p.role != SERVER:
        remaining += len(run.unmanaged)
    if remaining < needed:
        code = exit_codes.FAILED if cause == "refused" else exit_codes.MEMBERS_LOST
        run_end.fail(draft, p.run, f"{what} ({why}); fewer than {needed} {kind} are left", code)
    else:
        text = f"{p.member} is not restarted for now: {why}"
        draft.instruct(fe.FleetNote(p.run, text, p.member, "MemberGivenUp"))
