"""Errors from what ssh and hosts print."""

from __future__ import annotations

import pytest

from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.errors import of_reply, of_ssh, skew
from shoal.errors import AllocationRefused, EngineUnreachable

OPTIONS = SshOptions(hosts=("gpu1",))
CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Host key for gpu1 has changed and you have requested strict checking.
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("output", "kind", "what"),
    [
        ("ssh: Could not resolve hostname gpu1: Name or service not known", AllocationRefused, "unknown host gpu1"),
        (
            "ssh: Could not resolve hostname gpu1: Temporary failure in name resolution",
            EngineUnreachable,
            "temporary failure to resolve gpu1",
        ),
        ("ssh: connect to host gpu1 port 22: Connection refused", EngineUnreachable, "no sshd is listening"),
        ("ssh: connect to host gpu1 port 22: Connection timed out", EngineUnreachable, "gpu1 does not answer"),
        ("ssh: connect to host gpu1 port 22: No route to host", EngineUnreachable, "gpu1 does not answer"),
        ("me@gpu1: Permission denied (publickey).", AllocationRefused, "authentication failed on gpu1"),
        (
            "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures",
            AllocationRefused,
            "authentication failed",
        ),
        ("Host key verification failed.", AllocationRefused, "the host key of gpu1 is unknown"),
        (CHANGED, AllocationRefused, "the host key of gpu1 has changed"),
        ("/x: line 3: Bad configuration option: frob", AllocationRefused, "ssh is misconfigured"),
    ],
)
def test_error_before_a_session_means_that_nothing_was_done(output: str, kind: type, what: str) -> None:
    failure = of_ssh("lab", "gpu1", 255, output)
    assert type(failure.error) is kind
    assert what in failure.error.what
    assert failure.error.do
    assert not failure.unsure


@pytest.mark.parametrize(
    "output",
    [
        "",
        "client_loop: send disconnect: Broken pipe",
        "Timeout, server gpu1 not responding.",
        "Connection to gpu1 closed by remote host.",
        "Read from remote host gpu1: Connection timed out",
        "Read from remote host gpu1: Connection reset by peer",
        "Connection reset by 10.0.0.1 port 22",
        "mux_client_request_session: read from master failed: Broken pipe",
    ],
)
def test_broken_connection_leaves_unsure_whether_the_call_was_done(output: str) -> None:
    failure = of_ssh("lab", "gpu1", 255, output)
    assert type(failure.error) is EngineUnreachable
    assert failure.unsure


def test_clearest_line_of_the_output_is_shown() -> None:
    assert of_ssh("lab", "gpu1", 255, CHANGED).error.why == "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!"
    banner = "Welcome to the lab\nme@gpu1: Permission denied (publickey).\r\nConnection closed by UNKNOWN port 65535"
    assert of_ssh("lab", "gpu1", 255, banner).error.why == "me@gpu1: Permission denied (publickey)."


def test_host_without_python_is_refused() -> None:
    failure = of_ssh("lab", "gpu1", 127, "bash: line 1: python3: command not found")
    assert type(failure.error) is AllocationRefused
    assert failure.error.what == "Python not found on gpu1"
    assert "python3: command not found" in failure.error.why
    assert "[pool.lab]" in failure.error.do


@pytest.mark.parametrize(
    ("exit_code", "output", "errors", "what"),
    [
        (0, "3.8.10\n", "", "Python on gpu1 is too old"),
        (0, "hello\n3.12.1\nno shoal\n", "", "Shoal is not installed on gpu1"),
        (127, "", "sh: 1: exec: python3: not found\n", "Python not found on gpu1"),
        (1, "", "ModuleNotFoundError: no module named 'encodings'\n", "cannot start Python on gpu1"),
        (None, "", "it took longer than 60 s", "the setup of gpu1 did not finish in time"),
    ],
)
def test_python_that_cannot_run_an_agent_is_refused(exit_code: int | None, output: str, errors: str, what: str) -> None:
    failure = of_reply(
        "lab", "gpu1", OPTIONS, {"state": "unfit", "exit": exit_code, "output": output, "errors": errors}
    )
    assert failure is not None
    assert type(failure.error) is AllocationRefused
    assert failure.error.what == what
    assert "python3" in failure.error.why


@pytest.mark.parametrize(
    ("errno", "what"),
    [
        ("ENOSPC", "no space left on gpu1"),
        ("EDQUOT", "disk quota exceeded on gpu1"),
        ("EACCES", "cannot write to Shoal's directory on gpu1"),
        ("EROFS", "cannot write to Shoal's directory on gpu1"),
        ("ENOLCK", "files cannot be locked on gpu1"),
        ("ENOSYS", "gpu1 does not run Linux"),
    ],
)
def test_operating_system_error_is_refused_with_a_remedy(errno: str, what: str) -> None:
    failure = of_reply("lab", "gpu1", OPTIONS, {"state": "failed", "errno": errno, "path": "/x", "why": "because"})
    assert failure is not None
    assert failure.error.what == what
    assert failure.error.why == "because: /x"
    assert "[pool.lab]" in failure.error.do


def test_successful_reply_is_no_error() -> None:
    assert of_reply("lab", "gpu1", OPTIONS, {"state": "started"}) is None


def test_clock_is_wrong_only_if_the_duration_of_the_call_does_not_explain_it() -> None:
    assert skew(1000.0, 990.0, 1010.0) == ""
    assert skew(1011.0, 990.0, 1010.0) == ""
    assert "is 50 s ahead" in skew(1060.0, 990.0, 1010.0)
    assert "is 60 s behind" in skew(930.0, 990.0, 1010.0)
