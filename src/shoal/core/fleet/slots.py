"""Slots: which free places on agents the processes of which run get.

Runs of higher priority choose first, then older ones. Each fills its servers, its trainers and its evaluators, in this
order. A run that has not begun takes nothing until it can have its minimum, so that two waiting runs cannot block each
other with half a group each. An agent without a limit gets its processes in groups, the next when half of the last one
has started: thousands at once would keep this machine and the agent's busy for minutes, with nothing to see. Slots that
no run needs are filled with spare members, more than a run's maximum: they are warm and replace a lost member at once.
As soon as any run misses members, spares of other runs make room for it.
"""

from __future__ import annotations

from shoal.core.fleet import requirements
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.state import (
    ACTIVE,
    BACKOFF,
    DONE,
    ENDING,
    MAX_MEMBERS,
    MAX_SPARES,
    MAX_STARTING,
    RUNNING,
    STARTING,
    AgentState,
    DesiredRun,
)
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER


def fill(draft: FleetDraft, run: DesiredRun) -> None:
    """Start the missing processes of a run, as far as there are slots, if it has begun or can begin."""
    if not can_begin(draft, run):
        return
    fill_servers(draft, run)
    if run.has_own_pools(EVALUATOR):
        # Before the trainers, which may use the same pools: the slot was requested for the evaluator.
        fill_evaluators(draft, run)
    fill_trainers(draft, run)
    fill_evaluators(draft, run)


def can_begin(draft: FleetDraft, run: DesiredRun) -> bool:
    """Return whether a run has begun, or has slots enough for its minimum."""
    begun = [p for p in draft.of_run(run.run) if p.role != EVALUATOR]
    if any(p.alive or p.status in (BACKOFF, DONE) for p in begun) or run.unmanaged:
        return True
    agents = usable_agents(draft, run)
    alone = all(other.status != ACTIVE or other.run == run.run for other in draft.runs.values())
    if alone or any(agent.slots is None for agent in agents):
        return True
    free = sum(max(0, free_slots(draft, agent, run)) for agent in agents)
    if not run.has_own_pools(SERVER):
        return free >= run.min_members + run.servers
    for_servers = [agent for agent in usable_agents(draft, run, SERVER) if agent not in agents]
    more = sum(max(0, free_slots(draft, agent, run)) for agent in for_servers)
    return free >= run.min_members and free + more >= run.min_members + run.servers


def missing_slots(draft: FleetDraft, run: DesiredRun) -> int:
    """Return how many more slots a run could use."""
    servers = max(0, run.servers - count(draft, run, SERVER))
    own = run.has_own_pools(EVALUATOR)
    evaluators = max(0, run.evaluators - count(draft, run, EVALUATOR)) if own else 0
    return servers + evaluators + max(0, run.max_members - count(draft, run, TRAINER))


def make_room(draft: FleetDraft, missing: list[DesiredRun], active: list[DesiredRun]) -> None:
    """Stop as many spare members of other runs as the runs that miss members could use."""
    for run in missing:
        roles = [TRAINER, *(role for role in (SERVER, EVALUATOR) if run.has_own_pools(role))]
        agents = {a.name for role in roles for a in usable_agents(draft, run, role) if a.slots is not None}
        wanted = missing_slots(draft, run) - _slots_becoming_free(draft, agents)
        for other in active:
            extra = count(draft, other, TRAINER) - other.max_members
            spares = [p for p in draft.of_run(other.run) if p.agent in agents and p.status in (STARTING, RUNNING)]
            spares = sorted((p for p in spares if p.role == TRAINER), key=lambda p: -p.order)
            for p in spares[: max(0, min(extra, wanted))] if other.run != run.run and not other.compat else ():
                draft.stop(p, f"run {run.run} needs its slot", draft.state.timeouts.grace_s)
                wanted -= 1


def _slots_becoming_free(draft: FleetDraft, agents: set[str]) -> int:
    ending = [p for p in draft.processes.values() if p.status == ENDING and not p.restart_reason]
    return sum(p.agent in agents for p in ending)


def fill_servers(draft: FleetDraft, run: DesiredRun) -> None:
    """Start servers on as many different agents as possible, so that the loss of a machine takes one of them."""
    while count(draft, run, SERVER) < run.servers:
        agents = usable_agents(draft, run, SERVER)
        agents = [a for a in agents if a.slots is None or free_slots(draft, a, run) > 0]
        if not agents:
            return
        taken = [p.agent for p in draft.of_run(run.run) if p.role == SERVER]
        agent = min(agents, key=lambda a: (taken.count(a.name), a.order))
        draft.start(agent, draft.runs[run.run], "the run needs servers", role=SERVER)


def fill_evaluators(draft: FleetDraft, run: DesiredRun) -> None:
    """Start evaluators on the agents with the fewest processes, once trainers were started.

    An evaluator with pools of its own takes a slot there, and need not wait; any other takes no slot.
    """
    own = run.has_own_pools(EVALUATOR)
    while (own or draft.runs[run.run].seen) and count(draft, run, EVALUATOR) < run.evaluators:
        agents = usable_agents(draft, run, EVALUATOR)
        if own:
            agents = [a for a in agents if a.slots is None or free_slots(draft, a, run) > 0]
        if not agents:
            return
        busy = [p.agent for p in draft.processes.values() if p.alive]
        agent = min(agents, key=lambda a: (busy.count(a.name), a.order))
        draft.start(agent, draft.runs[run.run], "the run has an evaluator", role=EVALUATOR)


def fill_trainers(draft: FleetDraft, run: DesiredRun) -> None:
    """Start trainers up to the maximum of the run."""
    missing = run.max_members - count(draft, run, TRAINER)
    for agent in usable_agents(draft, run) if missing > 0 else ():
        startable = min(missing, free_slots(draft, agent, run), _startable(draft, agent))
        for _ in range(startable):
            draft.start(agent, run, "a slot is free")
        missing -= max(0, startable)


def _startable(draft: FleetDraft, agent: AgentState) -> int:
    """Return how many processes an agent may be told to start now: one without a limit starts them in groups."""
    return MAX_MEMBERS if agent.slots is not None else MAX_STARTING - draft.processes.starting(agent.name)


def awaits_next_group(draft: FleetDraft, agent: str) -> bool:
    """Return whether an agent that starts processes in groups has just started half of its present one."""
    known = draft.agents.get(agent)
    return known is not None and known.slots is None and draft.processes.starting(agent) == MAX_STARTING // 2


def fill_spares(draft: FleetDraft, run: DesiredRun) -> None:
    """Start spare trainers in free slots, at most MAX_SPARES: they wait, warm, to replace a lost member."""
    wanted = run.max_members + MAX_SPARES - count(draft, run, TRAINER)
    for agent in usable_agents(draft, run) if not run.compat and can_begin(draft, run) else ():
        while wanted > 0 and agent.slots is not None and free_slots(draft, agent, run) > 0:
            draft.start(agent, run, "a slot is free")
            wanted -= 1


def count(draft: FleetDraft, run: DesiredRun, role: str) -> int:
    """Return how many processes of a role a run has, without those that end for good or whose machine goes away."""
    counts = draft.processes.staying(run.run).items()
    return sum(number for (of_role, agent), number in counts if of_role == role and draft.is_usable(agent))


def usable_agents(draft: FleetDraft, run: DesiredRun, role: str = TRAINER) -> list[AgentState]:
    """Return the agents that a role of a run may use now, in the order in which they first connected."""
    agents = (a for a in draft.agents.values() if a.usable and admits(a, run, role))
    return sorted(agents, key=lambda a: a.order)


def admits(agent: AgentState, run: DesiredRun, role: str) -> bool:
    """Return whether processes of a role may run on an agent."""
    needed = run.requirements_of(role)
    if not needed.pools and agent.pool in run.reserved:
        return False
    return requirements.admits(needed, agent.pool, agent.size)


def free_slots(draft: FleetDraft, agent: AgentState, run: DesiredRun) -> int:
    """Return how many more processes of a run an agent can take.

    Evaluators count only where they have pools of their own. An agent without a limit takes what the run lacks.
    """
    if agent.slots is not None:
        evaluators = draft.processes.evaluators(agent.name)
        with_slot = sum(draft.runs[p.run].has_own_pools(EVALUATOR) for p in evaluators)
        return agent.slots - draft.processes.slots_used(agent.name) - with_slot
    return run.max_members - count(draft, run, TRAINER)


def has_use_for(draft: FleetDraft, agent: AgentState, run: DesiredRun, role: str) -> bool:
    """Return whether a run could use one more process of a role on an agent."""
    if not admits(agent, run, role):
        return False
    if role == EVALUATOR:
        return count(draft, run, role) < run.evaluators
    return free_slots(draft, agent, run) > 0
