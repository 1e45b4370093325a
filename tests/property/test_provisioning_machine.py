"""Late pools, dying machines, a crashing coordinator: every job that costs money is in the state.

The machine simulates engines that hold jobs, and everything that can happen between them and provisioning: replies
lost in a crash of the coordinator, jobs that start or vanish on their own. Once all is quiet, every demand that can be
served is served, and no job is left without an allocation.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.assignment import assign
from shoal.core.provisioning.decide import RELEASING, REQUESTED, ProvisioningState
from shoal.core.provisioning.events import ListedAllocation, MachineDemand, PoolInfo

POOLS = (PoolInfo("spot", "a", limit=3, max_wait_s=20.0), PoolInfo("lab", "b", limit=2, slots=2, max_wait_s=20.0))
NAMES = tuple(pool.name for pool in POOLS)
WAITING, RUNNING = "waiting", "running"


class ProvisioningMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.state = ProvisioningState()
        self.jobs: dict[str, dict[str, str]] = {name: {} for name in NAMES}
        self.agents: set[str] = set()
        self.leaving: set[str] = set()
        self.queue: deque[se.Instruction] = deque()
        self.reachable = dict.fromkeys(NAMES, True)
        self.submits: dict[str, int] = {}
        self.handle(se.PoolsConfigured(POOLS))

    # --- the shell

    def handle(self, event: se.Event) -> None:
        self.state, instructions = provisioning.decide(self.state, event, self.now)
        self.queue.extend(i for i in instructions if not isinstance(i, se.ProvisioningNote))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for event in provisioning.expired_timers(self.state, self.now):
            self.handle(event)

    def carry_out(self) -> None:
        """Let the engine carry out the next instruction and reply."""
        instruction = self.queue.popleft()
        jobs = self.jobs[instruction.pool]
        if not self.reachable[instruction.pool]:
            if isinstance(instruction, se.SubmitAllocation):
                self.handle(se.AllocationRejected(instruction.pool, instruction.allocation, "cannot be reached"))
            return
        if isinstance(instruction, se.SubmitAllocation):
            jobs.setdefault(instruction.allocation, WAITING)
            self.handle(se.AllocationSubmitted(instruction.pool, instruction.allocation, instruction.allocation))
        elif instruction.handle:
            jobs.pop(instruction.handle, None)
            self.agents.discard(instruction.handle)
            self.handle(se.AllocationEnded(instruction.allocation))

    def list_pool(self, pool: str) -> None:
        if not self.reachable[pool]:
            self.handle(se.PoolUnreachable(pool, "cannot be reached"))
            return
        listed = tuple(
            ListedAllocation(name, name, state == RUNNING) for name, state in sorted(self.jobs[pool].items())
        )
        submitting = {i.allocation for i in self.queue if isinstance(i, se.SubmitAllocation)}
        existing = [a for a in self.state.allocations.values() if a.pool == pool]
        event = se.PoolListed(
            pool, listed, (), tuple(a.name for a in existing if a.status == REQUESTED and a.name not in submitting)
        )
        if provisioning.is_new_information(self.state, event):
            self.handle(event)

    # --- incidents

    @rule(slots=st.lists(st.integers(0, 6), min_size=1, max_size=2), reverse=st.booleans())
    def demand_changes(self, slots: list[int], reverse: bool) -> None:
        pools = tuple(reversed(NAMES)) if reverse else NAMES
        demands = tuple(MachineDemand(f"run{number}", pools, count) for number, count in enumerate(slots) if count)
        self.handle(se.DemandChanged(demands))

    @precondition(lambda self: self.queue)
    @rule()
    def instruction_is_carried_out(self) -> None:
        self.carry_out()

    @precondition(lambda self: self.queue)
    @rule(reached=st.booleans())
    def coordinator_crashes(self, reached: bool) -> None:
        """Drop all instructions; the first may or may not have reached the engine."""
        instruction = self.queue[0]
        if reached and isinstance(instruction, se.SubmitAllocation) and self.reachable[instruction.pool]:
            self.jobs[instruction.pool].setdefault(instruction.allocation, WAITING)
        self.queue.clear()

    @rule(pool=st.sampled_from(NAMES))
    def pool_is_listed(self, pool: str) -> None:
        self.list_pool(pool)

    @rule(pool=st.sampled_from(NAMES))
    def pool_reachability_changes(self, pool: str) -> None:
        self.reachable[pool] = not self.reachable[pool]

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9))
    def job_starts_and_its_agent_connects(self, pool: str, pick: int) -> None:
        jobs = sorted(self.jobs[pool])
        if jobs:
            name = jobs[pick % len(jobs)]
            self.jobs[pool][name] = RUNNING
            self.agents.add(name)
            self.handle(se.AgentArrived(name))

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9), works=st.booleans())
    def setup_is_reported(self, pool: str, pick: int, works: bool) -> None:
        jobs = sorted(self.jobs[pool].keys() - self.agents)
        if jobs:
            name = jobs[pick % len(jobs)]
            self.jobs[pool][name] = RUNNING
            self.handle(se.SetupProgressed(name, "builds") if works else se.SetupFailed(name, "the build failed"))

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9))
    def machine_gets_notice(self, pool: str, pick: int) -> None:
        agents = sorted(self.agents & self.jobs[pool].keys())
        if agents:
            self.leaving.add(agents[pick % len(agents)])
            self.handle(se.AgentLeaving(agents[pick % len(agents)], "preempted soon"))

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9))
    def job_is_requeued(self, pool: str, pick: int) -> None:
        jobs = sorted(name for name, state in self.jobs[pool].items() if state == RUNNING)
        if jobs:
            self.jobs[pool][jobs[pick % len(jobs)]] = WAITING
            self.agents.discard(jobs[pick % len(jobs)])

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9), reported=st.booleans())
    def job_vanishes(self, pool: str, pick: int, reported: bool) -> None:
        jobs = sorted(self.jobs[pool])
        if jobs:
            name = jobs[pick % len(jobs)]
            del self.jobs[pool][name]
            self.agents.discard(name)
            if reported:
                self.handle(se.AgentLost(name, "no heartbeat"))

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    # --- invariants

    @invariant()
    def no_pool_exceeds_its_limit(self) -> None:
        for pool in POOLS:
            assert sum(a.pool == pool.name for a in self.state.allocations.values()) <= pool.limit

    @invariant()
    def no_time_is_charged_twice(self) -> None:
        total = self.state.account.total
        assert total.machine_s <= self.now * sum(pool.limit for pool in POOLS) + 1e-6

    def teardown(self) -> None:
        """Make every pool reachable, let every job start, and check that the state converges."""
        self.reachable = dict.fromkeys(NAMES, True)
        for _ in range(12):
            self._calm_down()
        missing = {demand.run: demand.slots for demand in self.state.demands}
        for slots in assign(self.state, self.state.demands).slots.values():
            for run, count in slots.items():
                missing[run] -= count
        room = sum(pool.limit * pool.slots for pool in POOLS) - sum(demand.slots for demand in self.state.demands)
        assert room < 0 or not any(missing.values()), f"{missing} slots are missing"
        expected = {a.name for a in self.state.allocations.values() if a.status != RELEASING}
        assert {name for jobs in self.jobs.values() for name in jobs} == expected
        self.handle(se.DemandChanged(()))
        for _ in range(6):
            self._calm_down()
        assert not self.state.allocations
        assert not any(self.jobs.values()), "a job is left without an allocation"

    def _calm_down(self) -> None:
        self.pass_time(700.0)
        for jobs in self.jobs.values():
            for name in self.leaving & jobs.keys():
                del jobs[name]
        for pool in NAMES:
            self.list_pool(pool)
        while self.queue:
            self.carry_out()
        for pool in NAMES:
            for name in self.jobs[pool]:
                self.jobs[pool][name] = RUNNING
                if name in self.state.allocations and name not in self.agents:
                    self.agents.add(name)
                    self.handle(se.AgentArrived(name))
        while self.queue:
            self.carry_out()


TestProvisioning = ProvisioningMachine.TestCase
TestProvisioning.settings = settings(max_examples=150, stateful_step_count=40)
