"""A machine that has nothing but Python: what it fetches is served here, and what it tells is written down."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from shoal.engines import agent_script
from shoal.engines.engine import AllocationRequest, EngineOptions
from shoal.engines.ray import engine as ray_engine
from shoal.pack.environments import recipe
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.wire import credentials
from shoal.wire.credentials import Credentials

PYTHON = os.path.realpath(sys.executable)
PATIENCE_S = 60.0


class Machine:
    """One machine, whose hires end as soon as their agents are up: they only print their help."""

    def __init__(self, path: Path, wheels: Path) -> None:
        self.path, self.wheels = path, wheels
        self.blobs: dict[str, bytes] = {}
        self.told: list[dict[str, Any]] = []
        self._hires: list[subprocess.Popen[bytes]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environments(self) -> Path:
        return self.path / "there" / "environments"

    def put(self, source: Path | bytes) -> str:
        data = source if isinstance(source, bytes) else source.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def requirements(self, *lines: str) -> PublishedEnvironment:
        file = self.path / "requirements.txt"
        file.write_text("\n".join(["--no-index", f"--find-links {self.wheels}", *lines]) + "\n")
        return recipe.publish(str(file), self.put)

    def hire(
        self, name: str, made: PublishedEnvironment, python: str = PYTHON, *, lifeline: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start what becomes an agent; with a lifeline as Ray does, which gives the token over a pipe."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        options = ("--help", *(("--lifeline", ray_engine.LIFELINE) if lifeline else ()))
        ask = AllocationRequest(name, "tag", url, Credentials("s3cret"), None, options, environment=made)
        home = self.home(name)
        home.mkdir(parents=True)
        credentials.write(home / "token", ask.credentials)
        before = ray_engine._BEFORE if lifeline else ()
        script = agent_script.script(
            ask, EngineOptions(directory=str(self.path / "there")), python=python, before=before
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "SHOAL_"))}
        # It saves time, and shows that what a machine tells pip is heard; to pip, 0 means that it does not compile.
        env["PIP_NO_COMPILE"] = "0"
        stdin = subprocess.PIPE if lifeline else subprocess.DEVNULL
        process = subprocess.Popen(["sh", "-c", script], env=env, stdin=stdin, start_new_session=True)
        self._hires.append(process)
        if process.stdin is not None:
            process.stdin.write(b"s3cret\n.\n")
            process.stdin.flush()
        return process

    def home(self, name: str) -> Path:
        return self.path / "there" / "allocations" / "tag" / name

    def log(self, name: str) -> str:
        return (self.home(name) / "agent.log").read_text()

    def ended(self, name: str, made: PublishedEnvironment, python: str = PYTHON) -> tuple[int, str]:
        """How a hire ended, and what it said."""
        code = self.hire(name, made, python).wait(PATIENCE_S)
        return code, self.log(name)

    def folders(self) -> list[str]:
        """The environments, whole or half, without what Shoal itself lies in."""
        found = [one.name for one in self.environments.iterdir() if one.is_dir()]
        return sorted(one for one in found if not one.startswith("shoal-"))

    def python(self) -> str:
        """The interpreter of the only environment that there is."""
        (folder,) = self.folders()
        return str(self.environments / folder / (self.environments / folder / "python").read_text())

    def failures(self) -> list[str]:
        return [f"{one['why']}; {one['do']}" for one in self.told if one.get("failed")]

    def close(self) -> None:
        for process in self._hires:
            for one in running(process.pid):
                one.kill()
            process.wait(PATIENCE_S)
        self._server.shutdown()
        self._server.server_close()


def running(session: int) -> list[psutil.Process]:
    """Who is left of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _handler(machine: Machine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = machine.blobs.get(self.path.rpartition("/")[2])
            allowed = self.headers["Authorization"] == "Bearer s3cret"
            self.send_response(200 if data is not None and allowed else 404)
            self.end_headers()
            self.wfile.write(data or b"")

        def do_POST(self) -> None:
            machine.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    return Handler
