"""Causes of exits, and the root cause among several failures."""

from __future__ import annotations

import pytest

from shoal.core.exit_causes import ExitFacts, MemberFailure, RecordedException, classify, root_cause


def verdict(**facts):
    exit_cause = classify(ExitFacts(**{"exit_code": None, "signal": None, **facts}))
    return exit_cause.cause, exit_cause.detail


def test_exit_code_zero_is_done():
    assert verdict(exit_code=0) == ("done", "")


def test_requested_stop_is_not_a_failure():
    assert verdict(signal=9, stop_reason="stopped by the user") == ("asked", "stopped by the user")


def test_exit_code_75_is_a_preemption():
    assert verdict(exit_code=75, had_notice=True) == ("preempted", "left after a notice")


def test_member_of_a_stopped_run_had_no_notice():
    assert verdict(exit_code=75) == ("preempted", "left as it was told")


def test_sigterm_is_a_preemption_only_after_a_notice():
    assert verdict(signal=15, had_notice=True)[0] == "preempted"
    assert verdict(signal=15)[0] == "infrastructure"


def test_exception_is_a_user_error_with_its_first_line():
    assert verdict(exit_code=1, exception=RecordedException("ValueError", "bad\nworse")) == ("user", "ValueError: bad")
    assert verdict(exit_code=1, exception=RecordedException("KeyError", "")) == ("user", "KeyError")


@pytest.mark.parametrize(("code", "cause"), [("S204", "infrastructure"), ("S207", "infrastructure"), ("S303", "user")])
def test_errors_of_shoal_are_classified_by_their_code(code, cause):
    assert verdict(exit_code=1, exception=RecordedException("Whatever", "it broke", code)) == (
        cause,
        f"error[{code}] it broke",
    )


def test_model_mismatch_is_refused():
    assert verdict(exit_code=4, exception=RecordedException("ModelMismatch", "it has 3 layers", "S206"))[0] == "refused"


def test_broken_exchange_is_infrastructure():
    assert verdict(exit_code=1, exception=RecordedException("ExchangeBroken", "peer gone"))[0] == "infrastructure"


def test_sigkill_of_unknown_origin_may_be_out_of_memory():
    assert verdict(signal=9) == ("infrastructure", "killed by signal 9 (perhaps out of memory)")
    assert verdict(signal=9, oom_kills=1)[1] == "killed by signal 9 (out of memory: the kernel killed a process)"


def test_crash_in_native_code_names_its_signal_and_last_output():
    assert verdict(signal=11, last_output="ouch") == ("infrastructure", "crashed by signal 11 (SIGSEGV): ouch")


def test_illegal_instruction_names_amx_and_the_variable_that_avoids_it():
    cause, detail = verdict(signal=4, last_output="epoch 1")
    assert cause == "infrastructure"
    assert detail.startswith("crashed by signal 4 (SIGILL): epoch 1; ")
    assert "amx_bf16" in detail
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in detail


def test_exit_code_comes_with_the_last_output():
    assert verdict(exit_code=3, last_output="no data") == ("user", "exit code 3: no data")
    assert verdict(exit_code=3) == ("user", "exit code 3")


def test_keyboard_interrupt_is_a_user_error():
    assert verdict(signal=2)[0] == "user"


def failure(member, at, cause, detail):
    return MemberFailure(member, at, cause, detail)


def test_no_failure_has_no_root_cause():
    assert root_cause([]) is None
    assert root_cause([failure("a/0", 1.0, "done", ""), failure("a/1", 1.0, "asked", "stop")]) is None


def test_user_error_explains_members_that_lost_their_peers():
    peers = [failure(f"a/{i}", 10.0 + i / 10, "infrastructure", "ExchangeBroken: a/3 is gone") for i in range(3)]
    bug = failure("a/3", 10.5, "user", "ValueError: bad")
    root = root_cause([*peers, bug])
    assert root.first == bug
    assert root.victims == tuple(peers)
    assert root.reason == "a/3: ValueError: bad (3 that followed from it)"


def test_killed_process_explains_members_that_lost_their_lease():
    lost = failure("a/0", 10.0, "infrastructure", "error[S204] silent")
    killed = failure("a/1", 11.0, "infrastructure", "killed by signal 9 (perhaps out of memory)")
    assert root_cause([lost, killed]).first == killed


def test_earliest_of_equal_failures_is_the_cause():
    failures = [failure(f"a/{i}", 10.0 - i, "user", "ValueError: bad") for i in range(3)]
    root = root_cause(failures)
    assert root.first.member == "a/2"
    assert root.reason == "a/2: ValueError: bad (2 more with the same error)"


def test_same_error_after_a_restart_is_reported_once():
    failures = [failure(f"a/{i % 2}", 10.0 + i, "user", "ValueError: bad") for i in range(6)]
    root = root_cause(failures)
    assert (root.first.at, [victim.member for victim in root.victims]) == (10.0, ["a/1"])


def test_failures_long_ago_are_unrelated():
    old = failure("a/0", 10.0, "user", "ValueError: old")
    new = failure("a/1", 100.0, "infrastructure", "killed by signal 9")
    root = root_cause([old, new])
    assert (root.first, root.victims) == (new, ())


def test_earliest_failure_is_shown_if_all_are_victims():
    failures = [failure(f"a/{i}", 10.0 + i, "infrastructure", "ConnectionResetError: gone") for i in range(2)]
    assert root_cause(failures).first.member == "a/0"


def test_sys_exit_is_explained_by_the_last_output():
    code = RecordedException("SystemExit", "2")
    assert verdict(exit_code=2, exception=code, last_output="no data") == ("user", "sys.exit(2): no data")
    assert verdict(exit_code=2, exception=code) == ("user", "sys.exit(2)")
    words = RecordedException("SystemExit", "no data")
    assert verdict(exit_code=1, exception=words, last_output="no data") == ("user", "sys.exit(no data)")
