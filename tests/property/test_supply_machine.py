"""Pools that deliver late or never, machines that die, a coordinator that crashes: what is paid for is what is known.

The machine plays engines that really hold jobs, with everything that can happen between them and the supply: answers
that are lost because the coordinator died, jobs that start or vanish by themselves. Whatever happened, once it is quiet
every need is met that can be met, and no job is left that nobody counts on.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.decide import RELEASING, REQUESTED, ProvisioningState
from shoal.core.provisioning.events import ListedAllocation, MachineDemand, PoolInfo

POOLS = (PoolInfo("spot", "a", limit=3, max_wait_s=20.0), PoolInfo("lab", "b", limit=2, slots=2, max_wait_s=20.0))
NAMES = tuple(pool.name for pool in POOLS)
WAITING, RUNNING = "waiting", "running"


class SupplyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.state = ProvisioningState()
        self.jobs: dict[str, dict[str, str]] = {name: {} for name in NAMES}
        self.agents: set[str] = set()
        self.leaving: set[str] = set()
        self.line: deque[se.Instruction] = deque()
        self.reachable = dict.fromkeys(NAMES, True)
        self.submits: dict[str, int] = {}
        self.tell(se.PoolsConfigured(POOLS))

    # --- the shell

    def tell(self, event: se.Event) -> None:
        self.state, asked = provisioning.decide(self.state, event, self.now)
        self.line.extend(one for one in asked if not isinstance(one, se.ProvisioningNote))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for event in provisioning.expired_timers(self.state, self.now):
            self.tell(event)

    def carry_out(self) -> None:
        """The engine does the next thing that it was asked, and we hear of it."""
        one = self.line.popleft()
        jobs = self.jobs[one.pool]
        if not self.reachable[one.pool]:
            if isinstance(one, se.SubmitAllocation):
                self.tell(se.AllocationRejected(one.pool, one.allocation, "cannot be reached"))
            return
        if isinstance(one, se.SubmitAllocation):
            jobs.setdefault(one.allocation, WAITING)
            self.tell(se.AllocationSubmitted(one.pool, one.allocation, one.allocation))
        elif one.handle:
            jobs.pop(one.handle, None)
            self.agents.discard(one.handle)
            self.tell(se.AllocationEnded(one.allocation))

    def observe(self, pool: str) -> None:
        if not self.reachable[pool]:
            self.tell(se.PoolUnreachable(pool, "cannot be reached"))
            return
        seen = tuple(ListedAllocation(name, name, state == RUNNING) for name, state in sorted(self.jobs[pool].items()))
        asking = {one.allocation for one in self.line if isinstance(one, se.SubmitAllocation)}
        mine = [hire for hire in self.state.allocations.values() if hire.pool == pool]
        event = se.PoolListed(
            pool, seen, (), tuple(h.name for h in mine if h.status == REQUESTED and h.name not in asking)
        )
        if provisioning.is_new_information(self.state, event):
            self.tell(event)

    # --- what can happen

    @rule(slots=st.lists(st.integers(0, 6), min_size=1, max_size=2), turned=st.booleans())
    def runs_need(self, slots: list[int], turned: bool) -> None:
        pools = tuple(reversed(NAMES)) if turned else NAMES
        needs = tuple(MachineDemand(f"run{number}", pools, many) for number, many in enumerate(slots) if many)
        self.tell(se.DemandChanged(needs))

    @precondition(lambda self: self.line)
    @rule()
    def an_instruction_is_carried_out(self) -> None:
        self.carry_out()

    @precondition(lambda self: self.line)
    @rule(reached=st.booleans())
    def the_coordinator_crashes(self, reached: bool) -> None:
        """What was decided is in the journal; whether the engine got it, nobody knows."""
        one = self.line[0]
        if reached and isinstance(one, se.SubmitAllocation) and self.reachable[one.pool]:
            self.jobs[one.pool].setdefault(one.allocation, WAITING)
        self.line.clear()

    @rule(pool=st.sampled_from(NAMES))
    def a_pool_is_looked_at(self, pool: str) -> None:
        self.observe(pool)

    @rule(pool=st.sampled_from(NAMES))
    def a_pool_can_be_reached_or_not(self, pool: str) -> None:
        self.reachable[pool] = not self.reachable[pool]

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9))
    def a_job_starts_and_its_agent_joins(self, pool: str, pick: int) -> None:
        jobs = sorted(self.jobs[pool])
        if jobs:
            name = jobs[pick % len(jobs)]
            self.jobs[pool][name] = RUNNING
            self.agents.add(name)
            self.tell(se.AgentArrived(name))

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9), works=st.booleans())
    def a_machine_is_made_ready(self, pool: str, pick: int, works: bool) -> None:
        jobs = sorted(self.jobs[pool].keys() - self.agents)
        if jobs:
            name = jobs[pick % len(jobs)]
            self.jobs[pool][name] = RUNNING
            self.tell(se.SetupProgressed(name, "builds") if works else se.SetupFailed(name, "it cannot be built"))

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9))
    def a_machine_gets_a_notice(self, pool: str, pick: int) -> None:
        agents = sorted(self.agents & self.jobs[pool].keys())
        if agents:
            self.leaving.add(agents[pick % len(agents)])
            self.tell(se.AgentLeaving(agents[pick % len(agents)], "preempted soon"))

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9))
    def a_job_is_put_back_into_the_queue(self, pool: str, pick: int) -> None:
        jobs = sorted(name for name, state in self.jobs[pool].items() if state == RUNNING)
        if jobs:
            self.jobs[pool][jobs[pick % len(jobs)]] = WAITING
            self.agents.discard(jobs[pick % len(jobs)])

    @rule(pool=st.sampled_from(NAMES), pick=st.integers(0, 9), heard=st.booleans())
    def a_job_vanishes(self, pool: str, pick: int, heard: bool) -> None:
        jobs = sorted(self.jobs[pool])
        if jobs:
            name = jobs[pick % len(jobs)]
            del self.jobs[pool][name]
            self.agents.discard(name)
            if heard:
                self.tell(se.AgentLost(name, "it is silent"))

    @rule(seconds=st.sampled_from([1.0, 6.0, 25.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    # --- what must hold

    @invariant()
    def no_pool_gives_more_than_its_limit(self) -> None:
        for pool in POOLS:
            assert sum(hire.pool == pool.name for hire in self.state.allocations.values()) <= pool.limit

    @invariant()
    def nothing_is_paid_for_twice(self) -> None:
        total = self.state.account.total
        assert total.machine_s <= self.now * sum(pool.limit for pool in POOLS) + 1e-6

    def teardown(self) -> None:
        """It is quiet: everything can be reached, every job starts, and time goes on."""
        self.reachable = dict.fromkeys(NAMES, True)
        for _ in range(12):
            self._go_on()
        lacks = {need.run: need.slots for need in self.state.demands}
        for shares in provisioning.users(self.state).values():
            for run, many in shares.items():
                lacks[run] -= many
        room = sum(pool.limit * pool.slots for pool in POOLS) - sum(need.slots for need in self.state.demands)
        assert room < 0 or not any(lacks.values()), f"{lacks} places are lacking"
        known = {hire.name for hire in self.state.allocations.values() if hire.status != RELEASING}
        assert {name for jobs in self.jobs.values() for name in jobs} == known
        self.tell(se.DemandChanged(()))
        for _ in range(6):
            self._go_on()
        assert not self.state.allocations
        assert not any(self.jobs.values()), "a job is left that nobody pays attention to"

    def _go_on(self) -> None:
        self.pass_time(700.0)
        for jobs in self.jobs.values():
            for name in self.leaving & jobs.keys():
                del jobs[name]
        for pool in NAMES:
            self.observe(pool)
        while self.line:
            self.carry_out()
        for pool in NAMES:
            for name in self.jobs[pool]:
                self.jobs[pool][name] = RUNNING
                if name in self.state.allocations and name not in self.agents:
                    self.agents.add(name)
                    self.tell(se.AgentArrived(name))
        while self.line:
            self.carry_out()


TestSupply = SupplyMachine.TestCase
TestSupply.settings = settings(max_examples=150, stateful_step_count=40)
