"""A standing coordinator, machines that join it, and clients that it rejects."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def standing(stage: Any) -> tuple[str, str]:
    """Start a coordinator; return its URL and token file."""
    stage.start("coordinator", "--json", "--dir", str(stage.home / "coordinators" / "main"))
    stage.until(lambda: stage.out().strip().endswith("}"), "the coordinator prints its URL")
    facts = json.loads(stage.out())
    return facts["url"], facts["token_file"]


def test_submitted_run_is_trained_by_a_machine_that_joins(stage: Any, standing: tuple[str, str]) -> None:
    url, token_file = standing
    options = ("--url", url, "--token-file", token_file)
    submitted = stage.shoal("run", *options, "--detach", "-n", "2", "--compat", "torchrun", "hello.py")
    assert submitted.returncode == 0, submitted.stderr
    assert stage.json("nodes", *options) == []
    agent = stage.start("join", url, "--token-file", token_file, "--name", "lab1", "--slots", "2")
    stage.until(lambda: [view["status"] for view in stage.runs()] == ["done"], "the run is done")
    assert "lab1/1 | hello from lab1/1" in stage.shoal("logs", "hello", *options).stdout
    assert [node["agent"]["agent"] for node in stage.json("nodes", *options)] == ["lab1"]
    agent.terminate()
    assert agent.wait(180) == 0


def test_commands_that_submit_advises_find_the_run(stage: Any, standing: tuple[str, str]) -> None:
    url, token_file = standing
    submitted = stage.shoal("submit", "--url", url, "--token-file", token_file, "wait.py")
    assert submitted.returncode == 0, submitted.stderr
    advised = [line.split("shoal ", 1)[1].split() for line in submitted.stdout.splitlines() if " shoal " in line]
    assert [words[0] for words in advised] == ["status", "logs", "stop"]
    stage.environ["SHOAL_HOME"] = str(stage.path / "another home")
    for words in (advised[0], advised[2]):
        assert stage.shoal(*words).returncode == 0, words


def test_first_url_that_answers_is_used(stage: Any, standing: tuple[str, str]) -> None:
    url, token_file = standing
    options = ("--url", f"http://127.0.0.1:1,{url}", "--token-file", token_file)
    stage.start("join", f"http://127.0.0.1:1,{url}", "--token-file", token_file, "--name", "lab1")
    ran = stage.shoal("run", *options, "hello.py")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "lab1/0 | hello from lab1/0" in ran.stdout
    fetched = stage.shoal("fetch", "hello", *options)
    assert (fetched.returncode, fetched.stderr) == (0, "")
    resumed = stage.shoal("resume", "hello", *options)
    assert "error[S120]" in resumed.stderr, "the coordinator was reached, and the run is done"


def test_members_get_the_absolute_directory_of_their_run(stage: Any) -> None:
    stage.start("coordinator", "--json", "--dir", "beside")
    stage.until(lambda: stage.out().strip().endswith("}"), "the coordinator prints its URL")
    facts = json.loads(stage.out())
    assert facts["token_file"] == str(stage.path / "beside" / "token"), "the printed path works in any directory"
    options = ("--url", facts["url"], "--token-file", facts["token_file"])
    (stage.path / "where.py").write_text("import os\nprint('got', os.environ['SHOAL_RUN_DIR'], flush=True)\n")
    stage.start("join", facts["url"], "--token-file", facts["token_file"], "--name", "lab1")
    ran = stage.shoal("run", *options, "where.py")
    assert f"| got {stage.path / 'beside' / 'runs'}/" in ran.stdout, ran.stdout


def test_wrong_token_is_rejected(stage: Any, standing: tuple[str, str]) -> None:
    wrong = stage.path / "wrong"
    wrong.write_text("not-the-token\n")
    for verb in (("ps",), ("run", "hello.py"), ("nodes",)):
        rejected = stage.shoal(verb[0], "--url", standing[0], "--token-file", str(wrong), *verb[1:])
        assert rejected.returncode == 4
        assert "error[S201]" in rejected.stderr
    joined = stage.shoal("join", standing[0], "--token-file", str(wrong))
    assert joined.returncode == 4
    assert "error[S201]" in joined.stderr


def test_port_in_use_is_reported_and_leaves_no_directory(stage: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = stage.shoal("coordinator", "--port", str(taken.getsockname()[1]))
    assert ran.returncode == 4
    assert "cannot listen" in ran.stderr
    assert list((stage.home / "coordinators").iterdir()) == []


def test_second_coordinator_in_a_directory_is_rejected(stage: Any, standing: tuple[str, str]) -> None:
    second = stage.shoal("coordinator", "--dir", str(Path(standing[1]).parent))
    assert second.returncode == 4
    assert "another coordinator uses this directory" in second.stderr
    assert stage.shoal("ps", "--url", standing[0], "--token-file", standing[1]).returncode == 0


def test_unknown_and_ambiguous_runs_are_reported(stage: Any, standing: tuple[str, str]) -> None:
    options = ("--url", standing[0], "--token-file", standing[1])
    for _ in range(2):
        assert stage.shoal("run", *options, "--detach", "--name", "train", "hello.py").returncode == 0
    unknown = stage.shoal("status", "trian", *options)
    assert unknown.returncode == 2
    assert "did you mean train?" in unknown.stderr
    for verb in ("status", "stop", "resume"):
        ambiguous = stage.shoal(verb, "train", *options)
        assert ambiguous.returncode == 2
        assert "error[S114]" in ambiguous.stderr


def test_unreachable_url_is_reported(stage: Any) -> None:
    token = stage.path / "token"
    token.write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ran = stage.shoal("ps", "--url", f"http://127.0.0.1:{port}", "--token-file", str(token))
    assert ran.returncode == 4
    assert "error[S207]" in ran.stderr


class OtherServer(BaseHTTPRequestHandler):
    """Another version of Shoal, or a server that is not Shoal at all."""

    reply = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.reply)))
        self.end_headers()
        self.wfile.write(self.reply)

    def log_message(self, *arguments: object) -> None:
        return


@pytest.fixture
def other_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), OtherServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b'{"shoal": "9.9", "protocol": 99, "coordinator": "x"}', "S202"),
        (b"<html>welcome to your router</html>", "S208"),
        (b'{"shoal": 1}', "S208"),
    ],
)
def test_server_that_is_not_a_coordinator_is_rejected(stage: Any, other_server: str, reply: bytes, code: str) -> None:
    OtherServer.reply = reply
    token = stage.path / "token"
    token.write_text("secret\n")
    ran = stage.shoal("run", "--url", other_server, "--token-file", str(token), "hello.py")
    assert ran.returncode == 4
    assert f"error[{code}]" in ran.stderr
    assert not stage.home.exists()


def test_home_that_cannot_be_created_is_reported_with_a_remedy(stage: Any) -> None:
    (stage.path / "home").write_text("a file")
    ran = stage.shoal("run", "hello.py")
    assert ran.returncode == 4
    assert "error[S510]" in ran.stderr
    assert "SHOAL_HOME" in ran.stderr
