"""How much memory members use."""

import os

import psutil

from shoal.agent import memory_limit
from shoal.core import exit_causes


def test_a_role_without_a_limit_may_use_everything() -> None:
    assert memory_limit.allowed_bytes({}) == 0
    assert memory_limit.verdict(1 << 40, 0) == ""


def test_a_member_within_its_limit_is_left_alone() -> None:
    allowed = memory_limit.allowed_bytes({"SHOAL_MEMORY_BYTES": "100"})
    assert memory_limit.verdict(100, allowed) == ""
    assert "S405" in memory_limit.verdict(101, allowed)


def test_a_process_uses_what_it_holds() -> None:
    me = psutil.Process(os.getpid())
    before = memory_limit.used_bytes(me)
    held = bytearray(os.urandom(1 << 20) * 64)
    assert memory_limit.used_bytes(me) - before > len(held) // 2


def test_who_used_too_much_was_not_killed_by_the_machine() -> None:
    verdict = exit_causes.classify(exit_causes.ExitFacts(None, 9, limit_exceeded="error[S405] it used too much"))
    assert (verdict.cause, verdict.detail) == ("user", "error[S405] it used too much")
