"""Fixtures: a real agent, a minimal coordinator, and scripts of members."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.agent.agent_stage import TOKEN, Coordinator, RunningAgent

from shoal.wire import credentials


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    fake = Coordinator()
    fake.open()
    yield fake
    fake.close()


@pytest.fixture
def start_agent(coordinator: Coordinator, tmp_path: Path) -> Iterator[Callable[..., RunningAgent]]:
    running: list[RunningAgent] = []

    def start(
        *options: str,
        preload: str = "msgspec",
        token: str = TOKEN,
        certificate: str | None = None,
        scheme: str = "http",
        environ: dict[bytes, bytes] | None = None,
        **popen: Any,
    ) -> RunningAgent:
        directory = tmp_path / "agent"
        directory.mkdir(exist_ok=True)
        credentials.write(directory / "token", credentials.Credentials(token, certificate))
        log = directory / "agent.log"
        command = [sys.executable, "-m", "shoal.agent", "--url", f"{scheme}://127.0.0.1:{coordinator.port}"]
        command += ["--token-file", str(directory / "token"), "--name", "lab", "--slots", "2", "--dir", str(directory)]
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*command, "--preload", preload, *options],
                stderr=file,
                env={**os.environb, b"OMP_NUM_THREADS": b"1", **(environ or {})},
                preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL),
                **popen,
            )
        running.append(RunningAgent(process, directory, log))
        return running[-1]

    yield start
    for agent in running:
        agent.stop()


@pytest.fixture
def agent(start_agent: Callable[..., RunningAgent]) -> RunningAgent:
    return start_agent()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / "code" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write
