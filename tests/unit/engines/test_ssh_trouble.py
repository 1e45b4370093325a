"""What ssh and hosts say, and what that means."""

from __future__ import annotations

import pytest

from shoal.engines.ssh import host_connection
from shoal.engines.ssh.command import SshHost, SshOptions
from shoal.engines.ssh.errors import HostError, of_answer, of_ssh, silent, skew
from shoal.engines.ssh.host_connection import HostConnection
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
    ("said", "kind", "what"),
    [
        ("ssh: Could not resolve hostname gpu1: Name or service not known", AllocationRefused, "there is no host gpu1"),
        (
            "ssh: Could not resolve hostname gpu1: Temporary failure in name resolution",
            EngineUnreachable,
            "could not be looked up just now",
        ),
        ("ssh: connect to host gpu1 port 22: Connection refused", EngineUnreachable, "no sshd listens"),
        ("ssh: connect to host gpu1 port 22: Connection timed out", EngineUnreachable, "gpu1 does not answer"),
        ("ssh: connect to host gpu1 port 22: No route to host", EngineUnreachable, "gpu1 does not answer"),
        ("me@gpu1: Permission denied (publickey).", AllocationRefused, "gpu1 does not let us in"),
        (
            "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures",
            AllocationRefused,
            "let us in",
        ),
        ("Host key verification failed.", AllocationRefused, "the key of gpu1 is not known"),
        (CHANGED, AllocationRefused, "gpu1 shows another key than before"),
        ("/x: line 3: Bad configuration option: frob", AllocationRefused, "ssh cannot be used as it is configured"),
    ],
)
def test_what_ssh_says_before_a_session_means_that_nothing_was_done(said: str, kind: type, what: str) -> None:
    trouble = of_ssh("lab", "gpu1", 255, said)
    assert type(trouble.error) is kind
    assert what in trouble.error.what
    assert trouble.error.do
    assert not trouble.unsure


@pytest.mark.parametrize(
    "said",
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
def test_a_connection_that_breaks_may_have_done_what_it_was_to_do(said: str) -> None:
    trouble = of_ssh("lab", "gpu1", 255, said)
    assert type(trouble.error) is EngineUnreachable
    assert trouble.unsure


def test_what_is_said_most_clearly_is_shown() -> None:
    assert of_ssh("lab", "gpu1", 255, CHANGED).error.why == "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!"
    banner = "Welcome to the lab\nme@gpu1: Permission denied (publickey).\r\nConnection closed by UNKNOWN port 65535"
    assert of_ssh("lab", "gpu1", 255, banner).error.why == "me@gpu1: Permission denied (publickey)."


def test_a_host_without_python() -> None:
    trouble = of_ssh("lab", "gpu1", 127, "bash: line 1: python3: command not found")
    assert type(trouble.error) is AllocationRefused
    assert trouble.error.what == "there is no such Python on gpu1"
    assert "python3: command not found" in trouble.error.why
    assert "[pool.lab]" in trouble.error.do


@pytest.mark.parametrize(
    ("exit_code", "said", "erred", "what"),
    [
        (0, "3.8.10\n", "", "the Python of gpu1 is too old"),
        (0, "hello\n3.12.1\nno shoal\n", "", "Shoal is not installed on gpu1"),
        (127, "", "sh: 1: exec: python3: not found\n", "there is no such Python on gpu1"),
        (1, "", "ModuleNotFoundError: no module named 'encodings'\n", "Python cannot be started on gpu1"),
        (None, "", "it took longer than 60 s", "the setup of gpu1 does not come to an end"),
    ],
)
def test_a_python_that_will_not_do(exit_code: int | None, said: str, erred: str, what: str) -> None:
    trouble = of_answer("lab", "gpu1", OPTIONS, {"state": "unfit", "exit": exit_code, "said": said, "erred": erred})
    assert trouble is not None
    assert type(trouble.error) is AllocationRefused
    assert trouble.error.what == what
    assert "python3" in trouble.error.why


@pytest.mark.parametrize(
    ("errno", "what"),
    [
        ("ENOSPC", "no space is left on gpu1"),
        ("EDQUOT", "the quota on gpu1 is used up"),
        ("EACCES", "Shoal's directory on gpu1 cannot be written"),
        ("EROFS", "Shoal's directory on gpu1 cannot be written"),
        ("ENOLCK", "files cannot be locked on gpu1"),
        ("ENOSYS", "gpu1 does not run Linux"),
    ],
)
def test_a_disk_that_will_not_do(errno: str, what: str) -> None:
    trouble = of_answer("lab", "gpu1", OPTIONS, {"state": "failed", "errno": errno, "path": "/x", "why": "because"})
    assert trouble is not None
    assert trouble.error.what == what
    assert trouble.error.why == "because: /x"
    assert "[pool.lab]" in trouble.error.do


def test_an_answer_that_is_one_is_no_trouble() -> None:
    assert of_answer("lab", "gpu1", OPTIONS, {"state": "started"}) is None


def test_a_clock_is_wrong_only_if_the_time_of_the_call_does_not_explain_it() -> None:
    assert skew(1000.0, 990.0, 1010.0) == ""
    assert skew(1011.0, 990.0, 1010.0) == ""
    assert "is 50 s ahead" in skew(1060.0, 990.0, 1010.0)
    assert "is 60 s behind" in skew(930.0, 990.0, 1010.0)


def test_a_host_that_does_not_answer_is_left_alone_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls, waiting = 1000.0, [], []

    def call(self: HostConnection, request: object, more_s: float) -> dict[str, object]:
        calls.append(now)
        raise HostError(silent("lab", "gpu1", 3.0).error)

    monkeypatch.setattr(HostConnection, "call", call)
    monkeypatch.setattr(host_connection.time, "monotonic", lambda: now)
    contact = HostConnection("lab", SshHost("gpu1", 1), OPTIONS, "/tmp/c", waiting.append)
    for _ in range(100):
        assert contact.look("tag") is None
        while waiting:
            waiting.pop()()
        now += 1.0
    assert calls == [1000.0, 1001.0, 1003.0, 1007.0, 1015.0, *range(1030, 1100, 15)]
    assert contact.why().startswith("gpu1 does not answer: nothing came for 3 s, since ")


def test_a_machine_without_ssh_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    contact = HostConnection("lab", SshHost("gpu1", 1), OPTIONS, "/tmp/c", lambda _: None)
    with pytest.raises(HostError) as trouble:
        contact.call({"do": "look"}, 1.0)
    assert type(trouble.value.error) is AllocationRefused
    assert trouble.value.error.what == "ssh cannot be started here"
    assert not trouble.value.unsure
