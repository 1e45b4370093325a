"""Exit messages from the end of an agent's log."""

from __future__ import annotations

from shoal.engines.exit_message import of_log


def test_message_is_the_last_error_with_its_cause() -> None:
    log = "INFO linked\nERROR error[S201] it was refused\n  where  h1\n  why    another token\n  more   and so on"
    assert of_log(log) == "ERROR error[S201] it was refused (another token)"


def test_python_that_is_too_old_is_named() -> None:
    log = "Unknown option: -P\nusage: python3 [option] ... [arg] ...\nTry `python -h' for more information.\n"
    assert of_log(log, "/opt/python3.9").startswith("/opt/python3.9 is older than Python 3.11")


def test_python_without_shoal_is_named() -> None:
    assert of_log("/usr/bin/python3: No module named shoal\n").startswith("the machine's Python has no Shoal")
    log = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'shoal.agent'"
    assert of_log(log, "python3").startswith("python3 has no Shoal")
    assert of_log("ModuleNotFoundError: No module named 'msgspec'").startswith(
        "the machine's Python has no msgspec, which"
    )


def test_log_without_error_yields_its_last_line_or_that_the_process_ended() -> None:
    assert of_log("2026-11-16 10:00:00,000 INFO linked") == "its process has ended"
    assert of_log(" \n") == "it wrote no output"
    assert of_log("sh: 8: cannot open token") == "sh: 8: cannot open token"
