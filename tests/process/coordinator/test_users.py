"""Several users of one coordinator: each has a token for their own runs only."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.process.coordinator.fakes import WAIT_S, Coordinator
from websockets.exceptions import InvalidStatus

from shoal.coordinator.storage.blobs import ENVIRONMENT_BLOBS, Blobs
from shoal.launch.api_client import ApiClient
from shoal.pack import project
from shoal.pack.project import Project, ProjectFile
from shoal.wire import credentials

pytestmark = pytest.mark.process


def token(coordinator: Coordinator, name: str, *options: str) -> dict[str, str]:
    argv = [sys.executable, "-m", "shoal.cli.main", "token", name, "--dir", str(coordinator.directory), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    path = coordinator.directory / "tokens" / name
    return credentials.read(path).headers if path.exists() else {}


def submit(coordinator: Coordinator, headers: dict[str, str]) -> tuple[int, Any]:
    spec = {"name": "train", "argv": ["train.py"], "cwd": "/tmp", "members": [1, 1]}
    return coordinator.ask("POST", "/v1/runs", spec, headers)


def test_users_see_all_runs_and_change_their_own(coordinator: Coordinator) -> None:
    ada, bob = token(coordinator, "ada"), token(coordinator, "bob")
    status, view = submit(coordinator, ada)
    assert (status, view["user"]) == (200, "ada")
    run = view["run"]
    assert coordinator.ask("GET", "/v1/runs", headers=bob)[1][0]["run"] == run
    for verb, body in (("stop", {}), ("scale", {"min": 1, "max": 2}), ("resume", None)):
        status, problem = coordinator.ask("POST", f"/v1/runs/{run}/{verb}", body, bob)
        assert (status, problem["code"]) == (400, "S213"), verb
    assert coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 2}, ada)[0] == 200
    assert coordinator.ask("POST", f"/v1/runs/{run}/stop", {})[0] == 200, "who owns the coordinator may"
    coordinator.kill()
    coordinator.restart()
    assert coordinator.view(run)["user"] == "ada"


def test_logs_and_outputs_are_private_unless_shared(coordinator: Coordinator) -> None:
    ada, bob = token(coordinator, "ada"), token(coordinator, "bob")
    spec = {"name": "train", "argv": ["train.py"], "cwd": "/tmp", "members": [1, 1]}
    private = coordinator.ask("POST", "/v1/runs", spec, ada)[1]["run"]
    shared = coordinator.ask("POST", "/v1/runs", {**spec, "settings": {"visibility": "shared"}}, ada)[1]["run"]
    for path in ("logs", "story", "files?folder=outputs"):
        status, problem = coordinator.ask("GET", f"/v1/runs/{private}/{path}", headers=bob)
        assert (status, problem["code"]) == (400, "S213"), path
        for run, headers in ((private, ada), (private, None), (shared, bob)):
            assert coordinator.ask("GET", f"/v1/runs/{run}/{path}", headers=headers)[0] == 200, path
    assert coordinator.ask("GET", f"/v1/runs/{private}", headers=bob)[1]["status"] == "starting"
    assert coordinator.ask("POST", f"/v1/runs/{shared}/stop", {}, bob)[1]["code"] == "S213", "only to read"


def test_user_token_opens_no_websocket_and_cannot_shut_down(coordinator: Coordinator) -> None:
    ada = token(coordinator, "ada")
    for path in ("/v1/agent", "/v1/member"):
        with pytest.raises(InvalidStatus) as error:
            coordinator.open(path, ada)
        assert error.value.response.status_code == 403
    assert coordinator.ask("POST", "/v1/shutdown", headers=ada)[0] == 403
    assert submit(coordinator, ada)[0] == 200, "it is still there"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 2), (-1, 0)])
def test_run_is_not_resumed_with_an_invalid_member_count(coordinator: Coordinator, low: int, high: int) -> None:
    run = submit(coordinator, coordinator.credentials.headers)[1]["run"]
    assert coordinator.ask("POST", f"/v1/runs/{run}/stop", {"checkpoint": False, "grace_s": 0.0})[0] == 200
    status, problem = coordinator.ask("POST", f"/v1/runs/{run}/resume", {"min": low, "max": high})
    assert (status, problem.get("code")) == (400, "S112")
    assert coordinator.view(run)["status"] == "stopped"


def test_revoked_token_is_refused(coordinator: Coordinator) -> None:
    ada = token(coordinator, "ada")
    assert stat.S_IMODE((coordinator.directory / "tokens" / "ada").stat().st_mode) == 0o600
    assert submit(coordinator, ada)[0] == 200
    token(coordinator, "ada", "--revoke")
    deadline = time.monotonic() + WAIT_S
    while (answer := submit(coordinator, ada))[0] != 401:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


def test_token_is_replaced_only_on_request(coordinator: Coordinator) -> None:
    ada = token(coordinator, "ada")
    argv = [sys.executable, "-m", "shoal.cli.main", "token", "ada", "--dir", str(coordinator.directory)]
    again = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert again.returncode == 2
    assert "ada already has a token" in again.stderr
    assert "--renew" in again.stderr
    assert submit(coordinator, ada)[0] == 200, "it is still good"
    other = token(coordinator, "ada", "--renew")
    assert other != ada
    deadline = time.monotonic() + WAIT_S
    while (answer := submit(coordinator, ada))[0] != 401:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)
    assert submit(coordinator, other)[0] == 200


def test_files_of_runs_are_private_to_the_owner(tmp_path: Path) -> None:
    directory = tmp_path / "srv"
    directory.mkdir()
    directory.chmod(0o755)
    coordinator = Coordinator(directory)
    try:
        assert submit(coordinator, token(coordinator, "ada"))[0] == 200
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        readable = {path.name for path in directory.iterdir() if path.stat().st_mode & 0o077}
    finally:
        coordinator.close()
    assert readable <= {"pid", "url", "urls"}


def test_directory_of_something_else_is_refused_and_keeps_its_mode(tmp_path: Path) -> None:
    directory = tmp_path / "home"
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "thesis.tex").write_text("x")
    argv = [sys.executable, "-m", "shoal.coordinator", "--dir", str(directory)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    assert "S525" in done.stderr
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert [path.name for path in directory.iterdir()] == ["thesis.tex"]


def test_blob_is_stored_once_and_only_if_it_matches_its_hash(coordinator: Coordinator) -> None:
    data = b"print('hello')\n"
    digest = hashlib.sha256(data).hexdigest()

    def put(name: str, content: bytes) -> int:
        request = urllib.request.Request(
            f"{coordinator.url}/v1/blobs/{name}", data=content, method="PUT", headers=coordinator.credentials.headers
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert coordinator.ask("POST", "/v1/blobs", [digest]) == (200, [digest])
    assert coordinator.ask("GET", f"/v1/blobs/{digest}")[0] == 404
    assert put(digest, b"something else") == 400
    assert put("../../token", data) in (400, 404)
    assert put(digest, data) == 200
    assert coordinator.ask("POST", "/v1/blobs", [digest]) == (200, [])
    request = urllib.request.Request(f"{coordinator.url}/v1/blobs/{digest}", headers=coordinator.credentials.headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read() == data
    assert [path.name for path in (coordinator.directory / "blobs").iterdir()] == [digest], "no part is left"
    assert coordinator.ask("POST", "/v1/blobs", ["../token"])[0] == 400


def test_project_of_many_files_is_uploaded(coordinator: Coordinator) -> None:
    contents: dict[str, Path | bytes] = {hashlib.sha256(b"%d" % at).hexdigest(): b"%d" % at for at in range(20_000)}
    blobs = coordinator.directory / "blobs"
    blobs.mkdir()
    last = list(contents)[-1]
    for digest in contents:
        if digest != last:
            (blobs / digest).touch()
    client = ApiClient(coordinator.url, coordinator.credentials.token)
    assert client.send(contents) == 1, "the others are there"
    assert (blobs / last).read_bytes() == contents[last]


def _restart_until_swept(coordinator: Coordinator, blobs: Path) -> None:
    coordinator.kill()
    blobs.mkdir(exist_ok=True)
    old = blobs / "old.part"
    old.write_bytes(b"")
    os.utime(old, (0.0, 0.0))
    coordinator.restart()
    deadline = time.monotonic() + 60.0
    while old.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not old.exists()


def test_unneeded_blob_is_removed_after_a_day_unless_asked_for(coordinator: Coordinator) -> None:
    blobs = coordinator.directory / "blobs"
    _restart_until_swept(coordinator, blobs)  # the next time is in an hour
    client = ApiClient(coordinator.url, coordinator.credentials.token)
    needed, asked_for, left = (hashlib.sha256(data).hexdigest() for data in (b"needed", b"asked for", b"left"))
    name, manifest = project.encode(Project((ProjectFile("train.py", needed, 6),)))
    client.send({needed: b"needed", asked_for: b"asked for", left: b"left", name: manifest})
    (blobs / f"{left}.1234.part").write_bytes(b"le")
    environment_blobs = Blobs(coordinator.directory / ENVIRONMENT_BLOBS)
    wheel = environment_blobs.add(b"a wheel")
    spec = {"name": "train", "argv": ["train.py"], "cwd": "/tmp", "members": [1, 1], "project": name}
    status, view = coordinator.ask("POST", "/v1/runs", spec)
    assert status == 200
    coordinator.ask("POST", f"/v1/runs/{view['run']}/stop", {})
    before = time.time() - 2 * 86400.0
    for path in (*blobs.iterdir(), environment_blobs.path(wheel)):
        os.utime(path, (before, before))
    assert client.send({asked_for: b"asked for"}) == 0, "it is there, so that it is not sent again"
    _restart_until_swept(coordinator, blobs)
    deadline = time.monotonic() + 60.0
    while len(list(blobs.iterdir())) > 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {path.name for path in blobs.iterdir()} == {needed, asked_for, name}
    assert coordinator.ask("POST", "/v1/blobs", [needed, left]) == (200, [left]), "what was removed is sent again"
    request = urllib.request.Request(f"{coordinator.url}/v1/blobs/{wheel}", headers=coordinator.credentials.headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read() == b"a wheel", "files of environments belong to no run, and stay"
