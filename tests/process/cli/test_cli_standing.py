"""A standing coordinator, machines that join it, and clients that should not be let in."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]


@pytest.fixture
def standing(stage: Any) -> tuple[str, str]:
    """The URL and the token file of a coordinator that runs."""
    stage.start("coordinator", "--json", "--dir", str(stage.home / "coordinators" / "main"))
    stage.wait("it says where it is", lambda: stage.out().strip().endswith("}"))
    facts = json.loads(stage.out())
    return facts["url"], facts["token_file"]


def test_a_run_is_submitted_to_it_and_done_by_a_machine_that_joins(stage: Any, standing: tuple[str, str]) -> None:
    url, token_file = standing
    at = ("--url", url, "--token-file", token_file)
    submitted = stage.shoal("run", *at, "--detach", "-n", "2", "hello.py")
    assert submitted.returncode == 0, submitted.stderr
    assert stage.json("nodes", *at) == []
    agent = stage.start("join", url, "--token-file", token_file, "--name", "lab1", "--slots", "2")
    stage.wait("the run is done", lambda: [view["status"] for view in stage.runs()] == ["done"])
    assert "lab1/1 | hello from lab1/1" in stage.shoal("logs", "hello", *at).stdout
    assert [node["agent"]["agent"] for node in stage.json("nodes", *at)] == ["lab1"]
    agent.terminate()
    assert agent.wait(30) == 0


def test_a_run_is_followed_and_fetched_at_the_one_of_several_urls_that_answers(
    stage: Any, standing: tuple[str, str]
) -> None:
    url, token_file = standing
    at = ("--url", f"http://127.0.0.1:1,{url}", "--token-file", token_file)
    stage.start("join", f"http://127.0.0.1:1,{url}", "--token-file", token_file, "--name", "lab1")
    ran = stage.shoal("run", *at, "hello.py")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "lab1/0 | hello from lab1/0" in ran.stdout
    fetched = stage.shoal("fetch", "hello", *at)
    assert (fetched.returncode, fetched.stderr) == (0, "")
    resumed = stage.shoal("resume", "hello", *at)
    assert "error[S120]" in resumed.stderr, "it was asked, and says that the run is done"


def test_members_find_the_directory_of_their_run_wherever_they_work(stage: Any) -> None:
    stage.start("coordinator", "--json", "--dir", "beside")
    stage.wait("it says where it is", lambda: stage.out().strip().endswith("}"))
    facts = json.loads(stage.out())
    assert facts["token_file"] == str(stage.path / "beside" / "token"), "it can be copied from there to any terminal"
    at = ("--url", facts["url"], "--token-file", facts["token_file"])
    (stage.path / "where.py").write_text("import os\nprint('told', os.environ['SHOAL_RUN_DIR'], flush=True)\n")
    stage.start("join", facts["url"], "--token-file", facts["token_file"], "--name", "lab1")
    ran = stage.shoal("run", *at, "where.py")
    assert f"| told {stage.path / 'beside' / 'runs'}/" in ran.stdout, ran.stdout


def test_a_wrong_token_is_refused(stage: Any, standing: tuple[str, str]) -> None:
    wrong = stage.path / "wrong"
    wrong.write_text("not-the-token\n")
    for verb in (("ps",), ("run", "hello.py"), ("nodes",)):
        refused = stage.shoal(verb[0], "--url", standing[0], "--token-file", str(wrong), *verb[1:])
        assert refused.returncode == 4
        assert "error[S201]" in refused.stderr
    joined = stage.shoal("join", standing[0], "--token-file", str(wrong))
    assert joined.returncode == 4
    assert "error[S201]" in joined.stderr


def test_a_port_in_use_is_named_and_nothing_is_left(stage: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = stage.shoal("coordinator", "--port", str(taken.getsockname()[1]))
    assert ran.returncode == 4
    assert str(taken and "cannot listen") in ran.stderr
    assert list((stage.home / "coordinators").iterdir()) == []


def test_two_coordinators_cannot_share_a_directory(stage: Any, standing: tuple[str, str]) -> None:
    second = stage.shoal("coordinator", "--dir", str(Path(standing[1]).parent))
    assert second.returncode == 4
    assert "another coordinator works in this directory" in second.stderr
    assert stage.shoal("ps", "--url", standing[0], "--token-file", standing[1]).returncode == 0


def test_an_unknown_run_and_an_ambiguous_one_are_said_so(stage: Any, standing: tuple[str, str]) -> None:
    at = ("--url", standing[0], "--token-file", standing[1])
    for _ in range(2):
        assert stage.shoal("run", *at, "--detach", "--name", "train", "hello.py").returncode == 0
    unknown = stage.shoal("status", "trian", *at)
    assert unknown.returncode == 2
    assert "did you mean train?" in unknown.stderr
    for verb in ("status", "stop", "resume"):
        ambiguous = stage.shoal(verb, "train", *at)
        assert ambiguous.returncode == 2
        assert "error[S114]" in ambiguous.stderr


def test_nobody_at_the_url_is_said_so(stage: Any) -> None:
    token = stage.path / "token"
    token.write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ran = stage.shoal("ps", "--url", f"http://127.0.0.1:{port}", "--token-file", str(token))
    assert ran.returncode == 4
    assert "error[S207]" in ran.stderr


class Stranger(BaseHTTPRequestHandler):
    """Another version of Shoal, or something that is not Shoal at all."""

    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def stranger() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b'{"shoal": "9.9", "protocol": 99, "coordinator": "x"}', "S202"),
        (b"<html>welcome to your router</html>", "S208"),
        (b'{"shoal": 1}', "S208"),
    ],
)
def test_whoever_is_not_our_coordinator_is_not_trusted(stage: Any, stranger: str, answer: bytes, code: str) -> None:
    Stranger.answer = answer
    token = stage.path / "token"
    token.write_text("secret\n")
    ran = stage.shoal("run", "--url", stranger, "--token-file", str(token), "hello.py")
    assert ran.returncode == 4
    assert f"error[{code}]" in ran.stderr
    assert not stage.home.exists()


def test_a_home_that_cannot_be_made_ends_with_a_remedy(stage: Any) -> None:
    (stage.path / "home").write_text("a file")
    ran = stage.shoal("run", "hello.py")
    assert ran.returncode == 4
    assert "error[S510]" in ran.stderr
    assert "SHOAL_HOME" in ran.stderr
