"""Memory of members against the limit of their role."""

import os

import psutil

from shoal.agent import memory_limit
from shoal.core import exit_causes


def test_role_without_limit_may_use_everything() -> None:
    assert memory_limit.allowed_bytes({}) == 0
    assert memory_limit.verdict(1 << 40, 0) == ""


def test_member_within_its_limit_is_accepted() -> None:
    allowed = memory_limit.allowed_bytes({"SHOAL_MEMORY_BYTES": "100"})
    assert memory_limit.verdict(100, allowed) == ""
    assert "S405" in memory_limit.verdict(101, allowed)


def test_memory_that_a_process_holds_is_counted() -> None:
    own = psutil.Process(os.getpid())
    before = memory_limit.used_bytes(own)
    held = bytearray(os.urandom(1 << 20) * 64)
    assert memory_limit.used_bytes(own) - before > len(held) // 2


def test_member_over_its_limit_is_a_user_error() -> None:
    verdict = exit_causes.classify(exit_causes.ExitFacts(None, 9, limit_exceeded="error[S405] it used too much"))
    assert (verdict.cause, verdict.detail) == ("user", "error[S405] it used too much")
