"""Whose doing an exit was, and which of several failures came first."""

from __future__ import annotations

import pytest

from shoal.core.exit_causes import ExitFacts, MemberFailure, RecordedException, classify, root_cause


def verdict(**known):
    return tuple(
        getattr(classify(ExitFacts(**{"exit_code": None, "signal": None, **known})), f) for f in ("cause", "detail")
    )


def test_exit_code_zero_is_done():
    assert verdict(exit_code=0) == ("done", "")


def test_what_was_asked_for_is_not_a_failure():
    assert verdict(signal=9, stop_reason="the user wants it") == ("asked", "the user wants it")


def test_exit_code_75_is_a_preemption():
    assert verdict(exit_code=75)[0] == "preempted"


def test_sigterm_is_a_preemption_only_after_a_notice():
    assert verdict(signal=15, had_notice=True)[0] == "preempted"
    assert verdict(signal=15)[0] == "infrastructure"


def test_an_exception_is_the_users_and_its_first_line_is_the_detail():
    assert verdict(exit_code=1, exception=RecordedException("ValueError", "bad\nworse")) == ("user", "ValueError: bad")
    assert verdict(exit_code=1, exception=RecordedException("KeyError", "")) == ("user", "KeyError")


@pytest.mark.parametrize(("code", "cause"), [("S209", "infrastructure"), ("S207", "infrastructure"), ("S303", "user")])
def test_errors_of_shoal_are_told_apart_by_their_code(code, cause):
    assert verdict(exit_code=1, exception=RecordedException("Whatever", "it broke", code)) == (
        cause,
        f"error[{code}] it broke",
    )


def test_a_model_that_differs_is_the_users_error():
    assert verdict(exit_code=4, exception=RecordedException("ModelMismatch", "it has 3 layers", "S206"))[0] == "refused"


def test_a_broken_exchange_is_not_the_users():
    assert verdict(exit_code=1, exception=RecordedException("ExchangeBroken", "peer gone"))[0] == "infrastructure"


def test_a_kill_without_a_known_sender_may_be_want_of_memory():
    assert verdict(signal=9) == ("infrastructure", "killed by signal 9 (perhaps out of memory)")
    assert verdict(signal=9, oom_kills=1)[1] == "killed by signal 9 (out of memory: the kernel killed a process)"


def test_a_crash_in_native_code_names_its_signal_and_last_words():
    assert verdict(signal=11, last_output="ouch") == ("infrastructure", "crashed by signal 11 (SIGSEGV): ouch")


def test_an_exit_code_alone_comes_with_the_last_words():
    assert verdict(exit_code=3, last_output="no data") == ("user", "exit code 3: no data")
    assert verdict(exit_code=3) == ("user", "exit code 3")


def test_a_keyboard_interrupt_is_the_users():
    assert verdict(signal=2)[0] == "user"


def failure(member, at, cause, detail):
    return MemberFailure(member, at, cause, detail)


def test_nothing_failed_has_no_cause():
    assert root_cause([]) is None
    assert root_cause([failure("a/0", 1.0, "done", ""), failure("a/1", 1.0, "asked", "stop")]) is None


def test_the_error_of_the_user_explains_those_who_lost_their_peers():
    peers = [failure(f"a/{i}", 10.0 + i / 10, "infrastructure", "ExchangeBroken: a/3 is gone") for i in range(3)]
    bug = failure("a/3", 10.5, "user", "ValueError: bad")
    found = root_cause([*peers, bug])
    assert found.first == bug
    assert found.victims == tuple(peers)
    assert found.reason == "a/3: ValueError: bad (3 that followed from it)"


def test_a_killed_process_explains_those_who_lost_their_lease():
    lost = failure("a/0", 10.0, "infrastructure", "error[S209] silent")
    killed = failure("a/1", 11.0, "infrastructure", "killed by signal 9 (perhaps out of memory)")
    assert root_cause([lost, killed]).first == killed


def test_among_equals_the_first_is_the_cause():
    failures = [failure(f"a/{i}", 10.0 - i, "user", "ValueError: bad") for i in range(3)]
    found = root_cause(failures)
    assert found.first.member == "a/2"
    assert found.reason == "a/2: ValueError: bad (2 more with the same error)"


def test_the_same_error_after_a_restart_is_told_once():
    failures = [failure(f"a/{i % 2}", 10.0 + i, "user", "ValueError: bad") for i in range(6)]
    found = root_cause(failures)
    assert (found.first.at, [victim.member for victim in found.victims]) == (10.0, ["a/1"])


def test_failures_long_ago_are_another_story():
    old = failure("a/0", 10.0, "user", "ValueError: old")
    new = failure("a/1", 100.0, "infrastructure", "killed by signal 9")
    found = root_cause([old, new])
    assert (found.first, found.victims) == (new, ())


def test_when_all_are_victims_the_first_is_shown():
    failures = [failure(f"a/{i}", 10.0 + i, "infrastructure", "ConnectionResetError: gone") for i in range(2)]
    assert root_cause(failures).first.member == "a/0"
