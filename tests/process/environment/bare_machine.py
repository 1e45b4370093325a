"""Fake machine with nothing but Python: this process serves its downloads and records its reports."""

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
DEADLINE_S = 60.0


class Machine:
    """One machine; its agents are started with --help, so they exit as soon as their environment works."""

    def __init__(self, path: Path, wheels: Path) -> None:
        self.path, self.wheels = path, wheels
        self.blobs: dict[str, bytes] = {}
        self.reports: list[dict[str, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environments(self) -> Path:
        return self.path / "remote" / "environments"

    def put(self, source: Path | bytes) -> str:
        data = source if isinstance(source, bytes) else source.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def requirements(self, *lines: str) -> PublishedEnvironment:
        file = self.path / "requirements.txt"
        file.write_text("\n".join(["--no-index", f"--find-links {self.wheels}", *lines]) + "\n")
        return recipe.publish(str(file), self.put)

    def start(
        self, name: str, environment: PublishedEnvironment, python: str = PYTHON, *, lifeline: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the script that becomes an agent; with `lifeline` as Ray does, which sends the token through a pipe."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        options = ("--help", *(("--lifeline", ray_engine.LIFELINE) if lifeline else ()))
        request = AllocationRequest(name, "tag", url, Credentials("s3cret"), None, options, environment=environment)
        home = self.home(name)
        home.mkdir(parents=True)
        credentials.write(home / "token", request.credentials)
        before = ray_engine._BEFORE if lifeline else ()
        script = agent_script.script(
            request, EngineOptions(directory=str(self.path / "remote")), python=python, before=before
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "SHOAL_"))}
        # Saves time, and shows that pip sees the machine's variables; for pip, 0 here means that it does not compile.
        env["PIP_NO_COMPILE"] = "0"
        stdin = subprocess.PIPE if lifeline else subprocess.DEVNULL
        process = subprocess.Popen(["sh", "-c", script], env=env, stdin=stdin, start_new_session=True)
        self._processes.append(process)
        if process.stdin is not None:
            process.stdin.write(b"s3cret\n.\n")
            process.stdin.flush()
        return process

    def home(self, name: str) -> Path:
        return self.path / "remote" / "allocations" / "tag" / name

    def log(self, name: str) -> str:
        return (self.home(name) / "agent.log").read_text()

    def run(self, name: str, environment: PublishedEnvironment, python: str = PYTHON) -> tuple[int, str]:
        """Start an agent and return its exit code and log."""
        code = self.start(name, environment, python).wait(DEADLINE_S)
        return code, self.log(name)

    def folders(self) -> list[str]:
        """Return the folders of environments, finished or not, without those of Shoal itself."""
        names = [path.name for path in self.environments.iterdir() if path.is_dir()]
        return sorted(name for name in names if not name.startswith("shoal-"))

    def python(self) -> str:
        """Return the interpreter of the only environment."""
        (folder,) = self.folders()
        return str(self.environments / folder / (self.environments / folder / "python").read_text())

    def failures(self) -> list[str]:
        return [f"{report['why']}; {report['do']}" for report in self.reports if report.get("failed")]

    def close(self) -> None:
        for process in self._processes:
            for child in running(process.pid):
                child.kill()
            process.wait(DEADLINE_S)
        self._server.shutdown()
        self._server.server_close()


def running(session: int) -> list[psutil.Process]:
    """Return the processes of a session that still run."""
    processes = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return processes


def _handler(machine: Machine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = machine.blobs.get(self.path.rpartition("/")[2])
            allowed = self.headers["Authorization"] == "Bearer s3cret"
            self.send_response(200 if data is not None and allowed else 404)
            self.end_headers()
            self.wfile.write(data or b"")

        def do_POST(self) -> None:
            machine.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    return Handler
