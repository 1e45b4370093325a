"""A run whose every port is fuzzed, and what must hold of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
import urllib.request
from collections import Counter
from typing import Any

import psutil

from shoal.core.world import Address
from shoal.testing.fuzz.port_fuzzer import FuzzedCoordinator, PeerPort, PortFuzzer
from shoal.testing.run_under_test import RunUnderTest
from shoal.wire import credentials

# Caches and pools fill during the first part of the messages; from then on memory must be flat.
WARM_UP = 0.3
GROWTH_FACTOR, GROWTH_BYTES = 1.25, 40 << 20
MORE_FILES = 300
BATCH = 2000
STEPS_AFTER = 3
USER = "fuzz-user"
DOCTOR_RUN, DOCTOR_INCARNATION = "shoal doctor", "doctor"


class FuzzedRun:
    """The ports of a run, found in its coordinator's directory and journal, and a fuzzer of all of them."""

    def __init__(self, run: RunUnderTest, seed: int) -> None:
        self._run = run
        self._directory = next(run.home.glob("coordinators/*"))
        self._access = credentials.read(self._directory / "token")
        self._name = run.name
        self._members: dict[str, PeerPort] = {}
        self._offset = 0
        self._agents = [agent["agent"] for agent in self._ask("/v1/agents")]
        self._doctor = self._doctor_port()
        self.memory: list[dict[str, int]] = []
        self.files: list[dict[str, int]] = []
        limits = self._ask(f"/v1/runs/{self._name}")
        members = limits["members_min"], limits["members_max"]
        target = FuzzedCoordinator(self._url, self._access, self._add_user(), self._name, members, self._agents)
        self.fuzzer = PortFuzzer(target, self.ports, seed)

    def __enter__(self) -> FuzzedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.fuzzer.close()

    @property
    def _url(self) -> str:
        return (self._directory / "url").read_text().strip()

    # --- ports

    def ports(self) -> list[PeerPort]:
        """Return the ports of the members that connected last under their names, and the doctor's."""
        journal = self._directory / "journal.jsonl"
        if journal.stat().st_size < self._offset:
            self._offset = 0
        with journal.open("rb") as lines:
            lines.seek(self._offset)
            while (line := lines.readline()).endswith(b"\n"):
                self._offset += len(line)
                if b'"MemberConnected"' in line:
                    self._note_member(json.loads(line)["fields"])
        return [*self._members.values(), *self._doctor]

    def _note_member(self, fields: dict[str, Any]) -> None:
        member, address = fields["member"], fields["address"]
        if not member.startswith("fuzz"):
            port = Address(address["host"], address["port"])
            self._members[member] = PeerPort(port, self._name, member, fields["incarnation"])

    def _doctor_port(self) -> list[PeerPort]:
        """Let the agent listen as it does for `shoal doctor`."""
        ports = []
        for agent in self._agents:
            result = self._ask(f"/v1/agents/{agent}/examine", b"{}")
            for listens in result["facts"]["listens"]:
                address = Address(listens["host"], listens["port"])
                ports.append(PeerPort(address, DOCTOR_RUN, agent, DOCTOR_INCARNATION))
        return ports

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, data=body, headers=self._access.headers)
        with urllib.request.urlopen(request, timeout=60, context=credentials.ssl_context(self._access)) as reply:
            return json.loads(reply.read())

    def _add_user(self) -> str:
        """Return the token of a user other than the coordinator's owner."""
        path, token = self._directory / "tokens" / USER, secrets.token_urlsafe(16)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        credentials.write(path, credentials.Credentials(token))
        return token

    # --- messages

    def send(self, messages: int) -> Counter[str]:
        """Send so many messages, note what all processes use meanwhile, and return how many of each kind."""
        sent = 0
        while sent < messages:
            if sent >= WARM_UP * messages:
                self._note_use()
            self.fuzzer.send(min(BATCH, messages - sent))
            sent += BATCH
            assert self._run.process.poll() is None, f"the run ended:\n{self._run.output[-3000:]}"
            assert self._ask("/v1/health"), "the coordinator does not answer"
            assert not self.fuzzer.late, f"not answered in time: {self.fuzzer.late}"
        self._note_use()
        return self.fuzzer.sent

    def _note_use(self) -> None:
        """Note the resident bytes and the open files of each service and living member."""
        pids = {word: self._run.service_process(word).pid for word in ("coordinator", "agent")} | self._run.pids()
        memory, files = {}, {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                memory[f"{name} {pid}"], files[f"{name} {pid}"] = process.memory_info().rss, process.num_fds()
        self.memory.append(memory)
        self.files.append(files)

    # --- what must hold

    def check_health(self) -> None:
        """Fail if a process grew, a traceback was logged, or the doctor's port does not answer any more."""
        first, last = self.memory[0], self.memory[-1]
        for process, size in last.items():
            most = GROWTH_FACTOR * first.get(process, size) + GROWTH_BYTES
            assert size < most, f"{process} grew from {first[process]} to {size} bytes"
            files, before = self.files[-1][process], self.files[0].get(process, MORE_FILES)
            assert files <= before + MORE_FILES, f"{process} had {before} open files and has {files}"
        own_logs = (self._directory / "runs" / self._name).rglob("*.log")
        for log in (self._directory / "coordinator.log", self._directory / "agent.log", *own_logs):
            text = log.read_text(errors="replace") if log.exists() else ""
            assert "Traceback" not in text, f"{log.name}:\n{text[text.index('Traceback') :][:4000]}"
        assert "port for peers failed" not in self._run.output
        assert self._doctor_port(), "the doctor's port cannot be opened any more"

    def check_training_goes_on(self) -> None:
        """Kill a member, the coordinator, and a member again; fail unless steps are committed after each."""
        size = self._run.world_size()
        self._kill_member(size)
        began, coordinator = time.time(), self._run.service_process("coordinator")
        coordinator.kill()  # its next process replays the journal
        self._run.until(lambda: self._restarted_since(began), "the coordinator to start again")
        self._kill_member(size)

    def _restarted_since(self, began: float) -> bool:
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess, OSError):
            return self._run.service_process("coordinator").create_time() > began - 1.0 and bool(self._ask("/v1/runs"))
        return False

    def _kill_member(self, size: int) -> None:
        victim, pid = sorted(self._run.pids().items())[-1]
        os.kill(pid, signal.SIGKILL)
        self._run.until(lambda: self._run.pids().get(victim, pid) != pid, f"{victim} to be started again")
        self._run.until_size(size)
        self._run.until_step(self._run.step() + STEPS_AFTER)
