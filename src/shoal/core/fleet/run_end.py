"""End of a run: when all its processes are done, have stopped, failed or cannot be replaced."""

from __future__ import annotations

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.state import BACKOFF, DONE, ENDED, FINISHING, STOPPING, DesiredRun, ProcessState
from shoal.core.membership.state import EVALUATOR, TRAINER

ALL_DONE = ("all members are done", exit_codes.OK)


def end_if_over(draft: FleetDraft, name: str) -> None:
    """End a run that has nothing left to wait for; start the timer of a run that has lost all its agents."""
    run = draft.runs[name]
    processes = [p for p in draft.of_run(name) if p.role != EVALUATOR]
    if run.unmanaged or run.status == ENDED or any(p.alive for p in processes):
        draft.set_run(name, no_agents_since=None)
        return
    evaluators = [p for p in draft.of_run(name) if p.role == EVALUATOR and (p.alive or p.status == BACKOFF)]
    reached_end = any(p.status == DONE and p.role == TRAINER for p in processes)
    waiting = any(p.status == BACKOFF for p in processes)
    if evaluators and run.status == FINISHING:
        if not run.trained:
            draft.set_run(name, trained=True)
            draft.instruct(fe.MarkTrainingFinished(name))
    elif run.status == STOPPING:
        if not evaluators:
            # A run that was told to stop in its last step may have reached its end first.
            outcome = ALL_DONE if run.finished and reached_end else (run.reason, run.exit_code)
            end(draft, name, *outcome)
    elif run.status == FINISHING or (not waiting and any(p.status == DONE for p in processes)):
        _end_trained(draft, run, evaluators, reached_end=reached_end)
    elif run.requirements_of(TRAINER).pools:
        return  # machines are requested for it
    elif run.seen and run.no_agents_since is None and not _has_agent(draft):
        draft.set_run(name, no_agents_since=draft.now)


def _has_agent(draft: FleetDraft) -> bool:
    return any(agent.disconnected_since is None for agent in draft.agents.values())


def _end_trained(draft: FleetDraft, run: DesiredRun, evaluators: list[ProcessState], *, reached_end: bool) -> None:
    for p in evaluators:
        draft.stop(p, "training finished", grace_s=5.0)
    if run.died_after_training and not reached_end:
        # The rest of the script, such as saving the model, may not have run.
        reason = f"training finished, but no member reached the end of the script: {run.died_after_training}"
        end(draft, run.run, reason, exit_codes.RESUMABLE)
    else:
        end(draft, run.run, *ALL_DONE)


def end(draft: FleetDraft, name: str, reason: str, exit_code: int) -> None:
    """Mark a run as ended and forget its processes that are not alive."""
    _close(draft, name)
    draft.instruct(fe.MarkRunEnded(name, reason, exit_code))


def fail(draft: FleetDraft, name: str, reason: str, exit_code: int) -> None:
    """Stop all processes of a run and mark it as failed."""
    for p in draft.of_run(name):
        draft.stop(p, f"the run failed: {reason}", grace_s=5.0)
    _close(draft, name)
    draft.instruct(fe.MarkRunFailed(name, reason, exit_code))


def _close(draft: FleetDraft, name: str) -> None:
    draft.set_run(name, status=ENDED, end_by=None, no_agents_since=None)
    for p in draft.of_run(name):
        if not p.alive:
            draft.remove(p)
