"""Group restarts of unmodified scripts (``--compat``).

Such a script knows nothing of membership: its ranks and addresses are fixed when it starts, as torchrun or TF_CONFIG
give them. So its processes are one group that starts together, and every change restarts all of them: a process that
ends, an agent that is lost, slots that appear. A restart waits until the last process of the group has ended, and until
`restart_at` if the restart policy asks for a pause. With parameter servers (``--compat ps``) the chief decides: when it
is done, the workers and servers would wait for it for ever, and are stopped.
"""

from __future__ import annotations

from shoal import exit_codes
from shoal.core import addresses
from shoal.core.fleet import events as fe
from shoal.core.fleet import restart_policy, restarts, run_end
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.launcher_env import ANY_PORTS, RankHost, launcher_environments, tf_tasks
from shoal.core.fleet.slots import usable_agents
from shoal.core.fleet.state import ACTIVE, DONE, FINISHING, TASK_MARKS, AgentState, DesiredRun, ProcessState
from shoal.core.nouns import counted


def align(draft: FleetDraft, run: DesiredRun) -> None:
    """Restart the group if other slots are offered than it uses; start it if none of it is left and slots suffice."""
    processes = draft.of_run(run.run)
    agents = layout(draft, run)
    enough = len(agents) >= run.min_members + run.extra_processes
    if processes and not run.restart_reason and not any(p.status == DONE for p in processes):
        used = sorted(p.agent for p in processes)
        away = any(a.disconnected_since is not None for a in draft.agents.values() if a.name in used)
        if used != sorted(a.name for a in agents) and not away and enough:
            restart_group(
                draft, run, f"the agents now offer {counted(len(agents), 'slot')} instead of {len(processes)}", 0.0
            )
    run = draft.runs[run.run]
    if draft.of_run(run.run) or not enough or draft.now < run.restart_at:
        return
    _start_group(draft, run, agents)


def layout(draft: FleetDraft, run: DesiredRun) -> list[AgentState]:
    """Return the agent of each rank, if the group were started now."""
    agents: list[AgentState] = []
    for agent in usable_agents(draft, run):
        room = run.max_members + run.extra_processes - len(agents)
        if agent.slots is not None:
            others = sum(1 for p in draft.processes.values() if p.agent == agent.name and p.run != run.run)
            room = min(room, agent.slots - others)
        agents += [agent] * max(0, room)
    return agents


def _start_group(draft: FleetDraft, run: DesiredRun, agents: list[AgentState]) -> None:
    reason = "group restart" if run.generation else "the group is complete"
    run = draft.set_run(run.run, generation=run.generation + 1, restart_reason="", restart_at=0.0)
    hosts = [RankHost(agent.name, agent.host or "127.0.0.1") for agent in agents]
    done, most = run.generation - 1, run.restarts.infrastructure
    ports = addresses.port_range(run.ports) or ANY_PORTS
    envs = launcher_environments(run.compat, run.run, draft.state.salt, hosts, done, most, run.servers, ports)
    for agent, env, task in zip(agents, envs, tf_tasks(run.compat, len(agents), run.servers), strict=True):
        draft.start(agent, run, reason, env, mark=TASK_MARKS.get(task.type, ""))


def restart_group(draft: FleetDraft, run: DesiredRun, reason: str, after_s: float) -> None:
    """Stop all processes of a group; it starts again when they have ended and `after_s` have passed."""
    draft.set_run(run.run, restart_reason=reason, restart_at=draft.now + after_s if after_s else 0.0)
    draft.instruct(fe.FleetNote(run.run, f"all members restart: {reason}", kind="GroupRestarted"))
    for p in draft.of_run(run.run):
        draft.stop(p, f"all members restart: {reason}", grace_s=5.0)


def on_exit(draft: FleetDraft, run: DesiredRun, p: ProcessState, cause: str, detail: str) -> None:
    """Restart the group of a process that ended, or fail the run."""
    draft.remove(p)
    if run.status != ACTIVE or run.restart_reason:
        return
    decision = restarts.judge(draft, run, "", cause)
    if isinstance(decision, restart_policy.StopRestarting):
        code = exit_codes.FAILED if cause == "user" else exit_codes.MEMBERS_LOST
        run_end.fail(draft, run.run, f"{p.member}: {detail or cause} ({decision.reason})", code)
    else:
        restart_group(draft, draft.runs[run.run], f"{p.member} ended: {detail or cause}", decision.after_s)


def on_chief_done(draft: FleetDraft, run: DesiredRun) -> None:
    """Stop workers and servers, which would wait for the chief for ever."""
    draft.set_run(run.run, status=FINISHING)
    for p in draft.of_run(run.run):
        if p.status != DONE:
            draft.stop(p, "the chief is done", grace_s=5.0)
