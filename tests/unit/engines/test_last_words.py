"""What agents that are gone said last."""

from __future__ import annotations

from shoal.engines.exit_message import of_log


def test_an_error_is_told_with_its_cause() -> None:
    log = "INFO linked\nERROR error[S201] it was refused\n  where  there\n  why    another token\n  more   and so on"
    assert of_log(log) == "ERROR error[S201] it was refused (another token)"


def test_a_python_that_is_too_old_is_named() -> None:
    log = "Unknown option: -P\nusage: python3 [option] ... [arg] ...\nTry `python -h' for more information.\n"
    assert of_log(log, "/opt/python3.9").startswith("/opt/python3.9 is older than Python 3.11")


def test_a_python_without_shoal_is_named() -> None:
    assert of_log("/usr/bin/python3: No module named shoal\n").startswith("the Python there has no Shoal")
    log = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'shoal.agent'"
    assert of_log(log, "python3").startswith("python3 has no Shoal")
    assert of_log("ModuleNotFoundError: No module named 'msgspec'").startswith("the Python there has no msgspec, which")


def test_one_that_was_killed_has_nothing_to_say() -> None:
    assert of_log("2026-11-16 10:00:00,000 INFO linked") == "its process is gone"
    assert of_log(" \n") == "it said nothing"
    assert of_log("sh: 8: cannot open token") == "sh: 8: cannot open token"
