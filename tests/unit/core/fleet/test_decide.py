"""Which processes exist where, without any process."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

import pytest

from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.fleet.state import MAX_SPARES

I = TypeVar("I")  # noqa: E741
STRICT = RestartLimits(user=1, infrastructure=1, backoff_s=2.0)


class Fleet:
    """A state that remembers all that was instructions."""

    def __init__(self) -> None:
        self.state = fl.FleetState(salt="s")
        self.instructions: list[fe.Instruction] = []
        self.now = 1000.0

    def on(self, *events: fe.Event, after_s: float = 0.0) -> Fleet:
        self.now += after_s
        self.instructions = []
        for event in events:
            self.state, instructions = fl.decide(self.state, event, self.now)
            self.instructions += instructions
        return self

    def wait(self, seconds: float) -> Fleet:
        self.now += seconds
        return self.on(*fl.due(self.state, self.now))

    def of(self, kind: type[I]) -> list[I]:
        return [i for i in self.instructions if isinstance(i, kind)]

    def started(self) -> list[str]:
        return [i.member for i in self.of(fe.StartProcess)]

    def process(self, member: str, run: str = "r") -> fl.ProcessState:
        return self.state.processes[run, member]

    def exit(self, member: str, cause: str, detail: str = "", run: str = "r") -> Fleet:
        p = self.process(member, run)
        return self.on(fe.ProcessExited(run, member, p.incarnation, cause, detail))


def with_run(low: int = 1, high: int = 2, slots: int | None = None, compat: str = "", **agents: int | None) -> Fleet:
    fleet = Fleet()
    for name, offered in (agents or {"lab": slots}).items():
        fleet.on(fe.AgentConnected(name, offered, "h"))
    return fleet.on(fe.RunRequested("r", low, high, compat, STRICT))


def test_agent_without_slots_starts_the_maximum() -> None:
    assert with_run(1, 3).started() == ["lab/0", "lab/1", "lab/2"]


def test_agent_with_slots_fills_all_of_them_with_spares() -> None:
    assert with_run(1, 2, slots=4).started() == ["lab/0", "lab/1", "lab/2", "lab/3"]


def test_agent_that_claims_a_thousand_slots_gets_a_bounded_number_of_spares() -> None:
    assert len(with_run(1, 2, slots=1000).started()) == 2 + MAX_SPARES


def test_agent_without_slots_starts_what_other_agents_lack() -> None:
    assert with_run(1, 3, big=2, local=None).started() == ["big/0", "big/1", "local/0"]


def test_two_runs_do_not_share_a_slot() -> None:
    fleet = with_run(1, 2, slots=2)
    assert fleet.on(fe.RunRequested("other", 1, 2)).started() == []
    fleet.exit("lab/0", "done")
    assert fleet.exit("lab/1", "done").of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "all members are done", 0)]
    assert [(i.run, i.member) for i in fleet.of(fe.StartProcess)] == [("other", "lab/0"), ("other", "lab/1")]


def test_crashed_member_restarts_with_another_incarnation() -> None:
    fleet = with_run()
    before = fleet.process("lab/1").incarnation
    again = fleet.exit("lab/1", "infrastructure", "killed by signal 9").of(fe.StartProcess)
    assert [(i.member, i.restart) for i in again] == [("lab/1", True)]
    assert again[0].incarnation != before


def test_second_crash_waits_for_the_back_off() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.RunRequested("r", 1, 1, "", RestartLimits(infrastructure=5, backoff_s=2.0)))
    fleet.exit("lab/0", "infrastructure")
    assert fleet.exit("lab/0", "infrastructure").started() == []
    assert fleet.wait(1.0).started() == []
    assert fleet.wait(1.1).started() == ["lab/0"]


def test_errors_of_user_code_fail_the_run_with_their_text() -> None:
    fleet = with_run()
    fleet.exit("lab/0", "user", "ValueError: x")
    fleet.exit("lab/0", "user", "ValueError: x")
    failed = fleet.of(fe.MarkRunFailed)[0]
    assert failed.exit_code == 1
    assert "ValueError: x" in failed.reason
    assert [i.member for i in fleet.of(fe.StopProcess)] == ["lab/1"]


def test_errors_of_a_member_that_cannot_join_end_no_run_that_trains_without_it() -> None:
    fleet = with_run(1, 2)
    for _ in range(2):
        failed = fe.ProcessExited(
            "r", "lab/1", fleet.process("lab/1").incarnation, "user", "ValueError: x", joining=True
        )
        fleet.on(failed)
    assert fleet.of(fe.MarkRunFailed) == []
    assert fleet.process("lab/1").status == fl.GIVEN_UP
    assert fleet.process("lab/0").alive


@pytest.mark.parametrize("code", ["S215", "S315", "S316", "S317"])
def test_run_that_cannot_work_as_asked_fails_at_the_first_error(code: str) -> None:
    fleet = with_run(1, 2).exit("lab/0", "user", f"error[{code}] exact mode cannot be used like this")
    assert [i.exit_code for i in fleet.of(fe.MarkRunFailed)] == [1]
    assert fleet.started() == []


def test_shares_that_cannot_be_divided_are_tried_again_only_after_the_first_step() -> None:
    detail = "error[S102] no division satisfies the limits"
    assert with_run().exit("lab/0", "user", detail).of(fe.MarkRunFailed) == []
    fleet = with_run()
    early = fe.ProcessExited("r", "lab/0", fleet.process("lab/0").incarnation, "user", detail, before_first_step=True)
    assert len(fleet.on(early).of(fe.MarkRunFailed)) == 1


def test_member_that_keeps_crashing_is_given_up_if_enough_are_left() -> None:
    fleet = with_run(1, 2)
    fleet.exit("lab/1", "infrastructure")
    assert fleet.exit("lab/1", "infrastructure").of(fe.MarkRunFailed) == []
    assert fleet.started() == []
    assert fleet.wait(601.0).started() == ["lab/1"]


def test_run_fails_if_too_few_members_are_left() -> None:
    fleet = with_run(2, 2)
    fleet.exit("lab/1", "infrastructure")
    assert [i.exit_code for i in fleet.exit("lab/1", "infrastructure").of(fe.MarkRunFailed)] == [5]


def test_preemptions_never_reach_a_limit() -> None:
    fleet = with_run(1, 1)
    for _ in range(50):
        assert fleet.exit("lab/0", "preempted").started() == ["lab/0"]


def test_nothing_starts_on_an_agent_with_notice() -> None:
    fleet = with_run(1, 2, spot=1, local=None)
    assert fleet.on(fe.AgentNotice("spot", 120.0, "aws")).started() == ["local/1"]
    assert fleet.exit("spot/0", "preempted").started() == []


def test_run_is_resumable_if_all_machines_were_preempted() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.AgentNotice("lab", 120.0, "aws"))
    fleet.exit("lab/0", "preempted")
    fleet.on(fe.AgentDisconnected("lab"))
    fleet.wait(10.1)
    assert [i.exit_code for i in fleet.wait(60.1).of(fe.MarkRunEnded)] == [75]


def test_run_without_members_and_agents_exits_with_5() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.AgentDisconnected("lab"))
    assert fleet.wait(10.1).of(fe.MarkRunFailed) == []
    assert fleet.wait(59.0).of(fe.MarkRunFailed) == []
    assert [i.exit_code for i in fleet.wait(2.0).of(fe.MarkRunFailed)] == [5]


def test_agent_that_reconnects_in_time_keeps_its_processes() -> None:
    fleet = with_run(1, 2)
    names = tuple((p.run, p.member, p.incarnation) for p in fleet.state.processes.values())
    fleet.on(fe.AgentDisconnected("lab"))
    fleet.wait(9.0)
    assert fleet.on(fe.AgentConnected("lab", None, "h", names)).instructions == []
    assert fleet.wait(60.0).instructions == []


def test_process_missing_after_a_reconnect_restarts() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.AgentDisconnected("lab"))
    assert fleet.on(fe.AgentConnected("lab", None, "h", ())).started() == []
    assert fleet.wait(2.1).started() == ["lab/0"]


def test_successor_of_a_dead_agent_restarts_its_members_at_once() -> None:
    fleet = with_run(1, 2)
    fleet.on(fe.AgentDisconnected("lab"))
    assert fleet.on(fe.AgentConnected("lab", None, "h", (), successor=True)).started() == ["lab/0", "lab/1"]


def test_processes_of_a_forgotten_agent_are_adopted_if_slots_are_free() -> None:
    fleet = with_run(1, 1)
    name = ("r", "lab/0", fleet.process("lab/0").incarnation)
    fleet.on(fe.AgentDisconnected("lab"))
    fleet.wait(10.1)
    assert fleet.on(fe.AgentConnected("lab", None, "h", (name,))).instructions == []
    fleet.on(fe.AgentDisconnected("lab"))
    fleet.wait(10.1)
    assert fleet.on(fe.AgentConnected("other", None, "h")).started() == ["other/0"]
    ended = fleet.on(fe.AgentConnected("lab", None, "h", (name,))).of(fe.StopProcess)
    assert [i.incarnation for i in ended] == [name[2]]


def test_unresponsive_member_is_restarted_after_a_timeout() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.ProcessStarted("r", "lab/0", fleet.process("lab/0").incarnation, 1, True))
    fleet.on(fe.MemberUnresponsive("r", "lab/0"))
    assert fleet.wait(9.0).instructions == []
    assert [i.member for i in fleet.wait(1.5).of(fe.StopProcess)] == ["lab/0"]
    assert fleet.exit("lab/0", "asked").started() == ["lab/0"]


def test_hung_member_is_replaced_even_while_it_sends_heartbeats() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.ProcessStarted("r", "lab/0", fleet.process("lab/0").incarnation, 1, True))
    ended = fleet.on(fe.MemberUnresponsive("r", "lab/0", "it has been in data for 300 s")).of(fe.StopProcess)
    assert [(i.member, i.reason) for i in ended] == [("lab/0", "it has been in data for 300 s")]
    fleet.on(fe.MemberResponsive("r", "lab/0"))
    assert fleet.exit("lab/0", "asked").started() == ["lab/0"]


def test_member_that_hangs_while_it_stops_is_not_restarted() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.ProcessStarted("r", "lab/0", fleet.process("lab/0").incarnation, 1, True))
    fleet.on(fe.RunStopping("r", 75, 0.0, "enough")).wait(1.0)
    assert fleet.process("lab/0").status == "ending"
    fleet.on(fe.MemberUnresponsive("r", "lab/0", "it has been in data for 300 s"))
    assert fleet.exit("lab/0", "asked").started() == []


def test_member_that_responds_again_is_not_restarted() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.MemberUnresponsive("r", "lab/0"), fe.MemberResponsive("r", "lab/0"))
    assert fleet.wait(60.0).instructions == []


def test_rejected_member_is_not_restarted_and_the_run_continues() -> None:
    fleet = with_run(2, 3)
    told = fleet.exit("lab/2", "refused", "another model").of(fe.FleetNote)
    assert ["lab/2 is not restarted" in i.text for i in told] == [True]
    assert fleet.started() == []
    (failed,) = fleet.exit("lab/1", "refused", "another model").of(fe.MarkRunFailed)
    assert (failed.exit_code, "another model" in failed.reason) == (1, True)


def test_member_silent_together_with_its_agent_is_not_replaced() -> None:
    fleet = with_run(1, 1)
    name = ("r", "lab/0", fleet.process("lab/0").incarnation)
    fleet.on(fe.ProcessStarted(*name, 1, True), fe.MemberUnresponsive("r", "lab/0"))
    fleet.wait(2.0)
    fleet.on(fe.AgentDisconnected("lab"))
    assert fleet.wait(9.0).instructions == []
    assert fleet.on(fe.AgentConnected("lab", None, "h", (name,))).instructions == []
    assert fleet.wait(9.0).instructions == [], "it has as long again to speak"
    assert [i.member for i in fleet.wait(1.5).of(fe.StopProcess)] == ["lab/0"]


def test_scaling_down_stops_members_outside_the_world_first() -> None:
    fleet = with_run(1, 3)
    fleet.on(fe.RunScaled("r", 1, 1, keep=("lab/2",)))
    assert sorted(i.member for i in fleet.of(fe.StopProcess)) == ["lab/0", "lab/1"]
    assert fleet.exit("lab/0", "preempted").started() == []


def test_scaling_never_stops_a_member_that_trains_for_a_spare_elsewhere() -> None:
    fleet = with_run(2, 3).on(fe.AgentConnected("big", 8, "h"))
    assert len(fleet.started()) == 8, "the other machine is full of spares"
    seated = ("lab/0", "lab/1", "lab/2")
    assert fleet.on(fe.RunScaled("r", 2, 3, keep=seated)).of(fe.StopProcess) == []
    assert [i.member for i in fleet.on(fe.RunScaled("r", 2, 2, keep=seated[:2])).of(fe.StopProcess)] == ["lab/2"]


def test_stopping_run_ends_with_its_last_process() -> None:
    fleet = with_run(1, 2)
    fleet.on(fe.RunStopping("r", 75, 30.0, "asked"))
    fleet.exit("lab/0", "preempted")
    assert fleet.exit("lab/1", "preempted").of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "asked", 75)]


def test_run_is_resumable_if_no_member_reached_the_end_of_the_script() -> None:
    fleet = with_run(1, 2).on(fe.RunFinished("r"))
    fleet.exit("lab/0", "infrastructure")
    [ended] = fleet.exit("lab/1", "infrastructure").of(fe.MarkRunEnded)
    assert ended.exit_code == 75
    assert "no member reached the end of the script: lab/1" in ended.reason


def test_run_is_done_if_one_member_reached_the_end_of_the_script() -> None:
    fleet = with_run(1, 2).on(fe.RunFinished("r"))
    fleet.exit("lab/0", "infrastructure")
    [ended] = fleet.exit("lab/1", "done").of(fe.MarkRunEnded)
    assert (ended.exit_code, ended.reason) == (0, "all members are done")


def test_run_is_resumable_if_its_machine_is_lost_before_the_end_of_the_script() -> None:
    fleet = with_run(1, 1).on(fe.RunFinished("r")).on(fe.AgentDisconnected("lab"))
    [ended] = fleet.wait(11.0).of(fe.MarkRunEnded)
    assert ended.exit_code == 75
    assert "no member reached the end of the script: lab/0: agent lab is lost" in ended.reason


def test_run_is_resumable_if_its_agent_stopped_before_the_end_of_the_script() -> None:
    fleet = with_run(1, 1).on(fe.RunFinished("r"))
    [ended] = fleet.exit("lab/0", "asked", "the agent ends").of(fe.MarkRunEnded)
    assert ended.exit_code == 75
    assert "no member reached the end of the script: lab/0: the agent ends" in ended.reason


def test_run_is_done_if_its_member_reached_the_end_while_its_agent_stopped() -> None:
    fleet = with_run(1, 1).on(fe.RunFinished("r"))
    incarnation = fleet.process("lab/0").incarnation
    fleet.on(fe.ProcessExited("r", "lab/0", incarnation, "asked", "the agent ends", exit_code=0))
    assert fleet.of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "all members are done", 0)]


def test_finished_run_restarts_no_member() -> None:
    fleet = with_run(1, 2).on(fe.RunFinished("r"))
    fleet.exit("lab/0", "asked", "the agent ends")
    assert fleet.wait(2.0).started() == []


def test_process_that_does_not_stop_in_time_is_stopped_again() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.RunStopping("r", 75, 30.0, "asked"))
    assert fleet.wait(29.0).instructions == []
    assert [i.member for i in fleet.wait(1.1).of(fe.StopProcess)] == ["lab/0"]
    assert len(fleet.exit("lab/0", "asked").of(fe.MarkRunEnded)) == 1


def test_member_without_state_is_stopped_at_once() -> None:
    fleet = with_run(1, 2)
    fleet.on(fe.RunStopping("r", 75, 30.0, "asked", idle=("lab/1",)))
    assert [i.member for i in fleet.of(fe.StopProcess)] == ["lab/1"]


def test_second_stop_can_shorten_the_deadline() -> None:
    fleet = with_run(1, 1)
    fleet.on(fe.RunStopping("r", 75, 30.0, "asked"))
    fleet.on(fe.RunStopping("r", 75, 1.0, "asked"))
    assert [i.member for i in fleet.wait(1.1).of(fe.StopProcess)] == ["lab/0"]


def test_stopping_run_waits_for_unmanaged_members() -> None:
    fleet = Fleet().on(fe.RunRequested("r", 1, 1), fe.UnmanagedMembersChanged("r", ("g/0",)))
    assert fleet.on(fe.RunStopping("r", 75, 30.0, "asked")).of(fe.MarkRunEnded) == []
    assert len(fleet.on(fe.UnmanagedMembersChanged("r", ())).of(fe.MarkRunEnded)) == 1


def test_exit_of_an_old_incarnation_changes_nothing() -> None:
    fleet = with_run(1, 1)
    old = fleet.process("lab/0").incarnation
    fleet.exit("lab/0", "preempted")
    assert fleet.on(fe.ProcessExited("r", "lab/0", old, "preempted")).instructions == []


def test_incarnations_differ_between_two_starts_of_a_coordinator() -> None:
    fleet = with_run(1, 1)
    first = fleet.process("lab/0").incarnation
    fleet.on(fe.CoordinatorStarted("t"), fe.AgentConnected("lab", None, "h", ()))
    fleet.wait(2.1)
    assert fleet.process("lab/0").incarnation.split("-")[0] == "t"
    assert first.split("-")[0] == "s"


def test_group_waits_for_its_minimum_of_slots() -> None:
    fleet = with_run(3, 4, compat="torchrun", a=2)
    assert fleet.started() == []
    fleet.on(fe.AgentConnected("b", 2, "h2"))
    assert fleet.started() == ["a/0", "a/1", "b/0", "b/1"]
    env = dict(fleet.of(fe.StartProcess)[3].env)
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"], env["WORLD_SIZE"]) == ("3", "1", "1", "4")
    assert env["MASTER_ADDR"] == "h"


def test_group_restarts_when_an_agent_joins() -> None:
    fleet = with_run(1, 2, compat="tf", a=1)
    fleet.on(fe.AgentConnected("b", 1, "h2"))
    assert [i.member for i in fleet.of(fe.StopProcess)] == ["a/0"]
    fleet.exit("a/0", "asked")
    assert fleet.started() == ["a/0", "b/0"]
    assert '"index": 1' in dict(fleet.of(fe.StartProcess)[1].env)["TF_CONFIG"]


def test_group_with_a_bug_fails() -> None:
    fleet = with_run(2, 2, compat="torchrun")
    fleet.exit("lab/0", "user", "ValueError")
    fleet.exit("lab/1", "asked")
    fleet.wait(5.0)
    fleet.exit("lab/0", "user", "ValueError")
    assert [i.exit_code for i in fleet.of(fe.MarkRunFailed)] == [1]


def with_parameter_servers(high: int = 2, servers: int = 1, **agents: int | None) -> Fleet:
    fleet = Fleet()
    for name, offered in (agents or {"lab": None}).items():
        fleet.on(fe.AgentConnected(name, offered, "h"))
    return fleet.on(fe.RunRequested("r", 1, high, "ps", STRICT, servers))


def test_script_with_parameter_servers_gets_a_chief_and_servers_besides_its_members() -> None:
    fleet = with_parameter_servers(high=2, servers=1)
    assert fleet.started() == ["lab/chief-0", "lab/server-0", "lab/0", "lab/1"]
    configs = [json.loads(dict(i.env)["TF_CONFIG"]) for i in fleet.of(fe.StartProcess)]
    assert [(c["task"]["type"], c["task"]["index"]) for c in configs] == [
        ("chief", 0),
        ("ps", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert {kind: len(places) for kind, places in configs[0]["cluster"].items()} == {"chief": 1, "ps": 1, "worker": 2}
    assert all(c["cluster"] == configs[0]["cluster"] for c in configs)


def test_chief_and_servers_need_slots() -> None:
    fleet = with_parameter_servers(high=2, servers=1, a=2)
    assert fleet.started() == []
    fleet.on(fe.AgentConnected("b", 1, "h2"))
    assert fleet.started() == ["a/chief-0", "a/server-0", "b/0"]


def test_lost_worker_restarts_chief_and_servers() -> None:
    fleet = with_parameter_servers()
    fleet.exit("lab/1", "infrastructure", "killed by signal 9")
    assert {i.member for i in fleet.of(fe.StopProcess)} == {"lab/chief-0", "lab/server-0", "lab/0"}
    assert fleet.of(fe.FleetNote)[0].text == "all members restart: lab/1 ended: killed by signal 9"
    assert fleet.of(fe.FleetNote)[0].kind == "GroupRestarted"
    for member in ("lab/chief-0", "lab/server-0", "lab/0"):
        fleet.exit(member, "asked")
    assert len(fleet.started()) == 4


def test_run_is_done_when_its_chief_is() -> None:
    fleet = with_parameter_servers()
    fleet.exit("lab/chief-0", "done")
    assert {i.member for i in fleet.of(fe.StopProcess)} == {"lab/server-0", "lab/0", "lab/1"}
    for member in ("lab/server-0", "lab/0", "lab/1"):
        fleet.exit(member, "asked")
    assert fleet.of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "all members are done", 0)]


def evaluated(low: int = 1, high: int = 2, **agents: int | None) -> Fleet:
    fleet = Fleet()
    for name, offered in (agents or {"lab": None}).items():
        fleet.on(fe.AgentConnected(name, offered, "h"))
    return fleet.on(fe.RunRequested("r", low, high, "", STRICT, evaluators=1))


def test_evaluator_starts_besides_the_members() -> None:
    fleet = evaluated(1, 2)
    assert fleet.started() == ["lab/0", "lab/1", "lab/evaluator-0"]
    assert fleet.of(fe.StartProcess)[-1].env == (("SHOAL_ROLE", "evaluator"),)


def test_evaluator_takes_no_slot() -> None:
    fleet = evaluated(1, 2, lab=2)
    assert fleet.started() == ["lab/0", "lab/1", "lab/evaluator-0"]
    assert fleet.exit("lab/0", "infrastructure").started() == ["lab/0"]


def test_evaluator_starts_on_the_agent_with_the_fewest_processes() -> None:
    assert evaluated(1, 2, busy=2, idle=0).started()[-1] == "idle/evaluator-0"


def test_dead_evaluator_restarts_alone() -> None:
    assert evaluated().exit("lab/evaluator-0", "infrastructure", "killed").started() == ["lab/evaluator-0"]


def test_evaluator_that_fails_too_often_does_not_fail_the_run() -> None:
    fleet = evaluated()
    fleet.exit("lab/evaluator-0", "user", "ValueError")
    fleet.exit("lab/evaluator-0", "user", "ValueError")
    assert fleet.process("lab/evaluator-0").status == fl.GIVEN_UP
    assert not fleet.of(fe.MarkRunFailed)
    assert "continues without its evaluator" in fleet.of(fe.FleetNote)[0].text
    assert fleet.of(fe.FleetNote)[0].kind == "MemberGivenUp"
    assert fleet.wait(10_000.0).started() == []


def test_rejected_evaluator_is_not_restarted() -> None:
    fleet = evaluated().exit("lab/evaluator-0", "refused", "error[S320]")
    assert fleet.started() == []
    assert not fleet.of(fe.MarkRunFailed)


def test_finished_run_waits_for_its_evaluator() -> None:
    fleet = evaluated(1, 1).on(fe.RunFinished("r"))
    fleet.exit("lab/0", "done")
    assert fleet.of(fe.MarkTrainingFinished) == [fe.MarkTrainingFinished("r")]
    assert not fleet.of(fe.MarkRunEnded)
    assert fleet.exit("lab/evaluator-0", "done").of(fe.MarkRunEnded) == [
        fe.MarkRunEnded("r", "all members are done", 0)
    ]


def test_evaluator_that_dies_after_the_last_step_restarts() -> None:
    fleet = evaluated(1, 1).on(fe.RunFinished("r"))
    fleet.exit("lab/0", "done")
    assert fleet.exit("lab/evaluator-0", "infrastructure").started() == ["lab/evaluator-0"]
    fleet.exit("lab/evaluator-0", "infrastructure")
    assert fleet.of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "all members are done", 0)]


def test_evaluator_in_back_off_is_waited_for() -> None:
    fleet = evaluated(1, 1)
    fleet.state = with_restarts(fleet.state)
    for _ in range(2):
        fleet.exit("lab/evaluator-0", "infrastructure")
    assert fleet.process("lab/evaluator-0").status == fl.BACKOFF
    fleet.on(fe.RunFinished("r"))
    assert not fleet.exit("lab/0", "done").of(fe.MarkRunEnded)
    assert fleet.wait(3.0).started() == ["lab/evaluator-0"]


def with_restarts(state: fl.FleetState) -> fl.FleetState:
    restarts = RestartLimits(user=5, infrastructure=5, backoff_s=2.0)
    return replace(state, runs={"r": replace(state.runs["r"], restarts=restarts)})


def test_evaluator_moves_to_another_machine() -> None:
    fleet = evaluated(1, 1, first=None, second=None)
    fleet.on(fe.RunFinished("r"))
    there = next(name for run, name in fleet.state.processes if "evaluator" in name).partition("/")[0]
    fleet.on(fe.AgentDisconnected(there))
    other = ({"first", "second"} - {there}).pop()
    assert fleet.wait(11.0).started() == [f"{other}/evaluator-0"]


def test_notice_moves_the_evaluator_without_preempting_the_run() -> None:
    fleet = evaluated(1, 1, first=1, second=0)
    fleet.on(fe.AgentNotice("second", 30.0, "spot"))
    assert fleet.started() == ["first/evaluator-0"]
    fleet.exit("second/evaluator-0", "preempted")
    assert not fleet.state.runs["r"].preempted


def test_stopping_run_stops_its_evaluator_at_once() -> None:
    fleet = evaluated(1, 1).on(fe.RunStopping("r", 75, 30.0, "asked", ("lab/evaluator-0",)))
    assert [i.member for i in fleet.of(fe.StopProcess)] == ["lab/evaluator-0"]
    fleet.exit("lab/0", "done")
    assert not fleet.of(fe.MarkRunEnded)
    assert fleet.exit("lab/evaluator-0", "asked").of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "asked", 75)]


def test_evaluator_stops_with_a_script_that_never_trains() -> None:
    fleet = evaluated(1, 1).exit("lab/0", "done")
    assert [i.member for i in fleet.of(fe.StopProcess)] == ["lab/evaluator-0"]
    assert fleet.of(fe.MarkRunEnded) == [fe.MarkRunEnded("r", "all members are done", 0)]


def test_scaling_does_not_stop_the_evaluator() -> None:
    fleet = evaluated(1, 3).on(fe.RunScaled("r", 1, 1))
    assert [i.member for i in fleet.of(fe.StopProcess)] == ["lab/2", "lab/1"]


def test_process_that_runs_for_long_without_joining_is_named_once() -> None:
    fleet = with_run(2, 2)
    for member in ("lab/0", "lab/1"):
        fleet.on(fe.ProcessStarted("r", member, fleet.process(member).incarnation, 1, True))
    fleet.on(fe.MemberResponsive("r", "lab/1"))
    assert fleet.wait(fl.JOIN_NOTE_S - 1).of(fe.FleetNote) == []
    (note,) = fleet.wait(2.0).of(fe.FleetNote)
    assert "lab/0 has run for 120 s without joining the run" in note.text
    assert fleet.wait(1000.0).of(fe.FleetNote) == []


def test_process_that_cannot_be_a_copy_need_not_join() -> None:
    for fleet in (with_run(1, 1), with_run(2, 2, compat="torchrun")):
        fleet.on(fe.ProcessStarted("r", "lab/0", fleet.process("lab/0").incarnation, 1, True))
        assert fleet.wait(1000.0).of(fe.FleetNote) == []
