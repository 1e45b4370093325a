"""Members of an agent: starts them through the warm process, follows their logs, ends them, reports their exits.

The life of a member in the agent: a `StartMemberMsg` arrives and the member is entered under its key (run, name and
incarnation), so that a repeated message starts nothing. Its paths are replaced by those of this machine (`localized`),
which may fetch the project. The warm process forks it, or executes a new interpreter if its environment demands that.
From then on its log is followed and its memory watched. When it ends, for whatever reason, the last lines are sent,
the cause is derived from exit status, recorded exception and what the agent itself had done to it
(`core.exit_causes`), and `MemberExitedMsg` is queued: exactly one for every member that was entered, also if it never
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from shoal.agent import log_tail, machine_info, memory_limit
from shoal.agent.outbox import Outbox
from shoal.agent.processes import process_tree, zygote_messages
from shoal.agent.processes.warm_process import WarmProcess
from shoal.agent.project_files import ProjectCache
from shoal.core import exit_causes
from shoal.errors import MembershipError, ProjectDeliveryFailed, ShoalError, WarmProcessFailed
from shoal.wire.agent_messages import LogLinesMsg, MemberExitedMsg, MemberStartedMsg, StartMemberMsg
from shoal.wire.malformed import MALFORMED

log = logging.getLogger("shoal.agent")

START_WITHIN_S = 300.0
_LOG_POLL_S = 0.08
_MEMORY_POLL_S = 0.5
_DETAIL_CHARACTERS = 2000
COORDINATOR_STORE = "coordinator://"
# An interpreter reads these only when it starts, so a fork of the warm process would not see them.
_COLD_VARIABLES = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONHASHSEED",
    "PYTHONHOME",
    "PYTHONOPTIMIZE",
    "PYTHONMALLOC",
    "PYTHONDEVMODE",
    "PYTHONUTF8",
    "PYTHONWARNINGS",
)


@dataclass(frozen=True, slots=True)
class AgentContext:
    """What all members of this agent have in common.

    `apart` says that this machine does not share the user's disk. `cache` is the directory for project files; `grace_s`
    is how long members have to hand over.
    """

    url: str
    token_file: str
    directory: Path
    slots: int | None
    interface: str
    environ: Mapping[str, str]
    cache: Path
    apart: bool = False
    grace_s: float = 0.0


@dataclass(slots=True)
class MemberProcess:
    """One member that is starting or alive.

    `stop_reason` and `limit_exceeded` say why this agent ended it, `had_notice` that it was told to leave. `started`
    and `ended` are set when that has happened; a member that never started has both.
    """

    request: StartMemberMsg
    tail: log_tail.LogTail
    why_path: Path
    oom_kills: int
    process: psutil.Process | None = None
    warm: bool = True
    stop_reason: str = ""
    limit_exceeded: str = ""
    had_notice: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> tuple[str, str, str]:
        return (self.request.run, self.request.member, self.request.incarnation)


class MemberProcesses:
    """All members of this agent, by the key of their incarnation."""

    def __init__(self, context: AgentContext, preload: tuple[str, ...], outbox: Outbox) -> None:
        self._context = context
        self._url = context.url
        self._outbox = outbox
        self._projects = ProjectCache(context.url, context.token_file, context.cache, context.directory / "runs")
        self._alive: dict[str, MemberProcess] = {}
        self._cores = machine_info.cores()
        self._core_speed = 0.0
        self.last_exit = 0.0
        environment = {**context.environ, "OMP_NUM_THREADS": str(self._threads({}, {})), "PYTHONUNBUFFERED": "1"}
        # NumPy's library would start threads at import, and a process with threads is not safe to fork.
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        self._warm_environment = environment
        self.warm = WarmProcess(preload, environment, self._on_start, self._on_exit)

    def open(self) -> None:
        """Start the warm process, then measure the speed of a core; members started before that have no estimate."""
        self.warm.open()
        measuring = threading.Thread(target=self._measure, name="shoal-probe", daemon=True)
        # Later, because it would delay the warm process, which all members wait for.
        asyncio.get_running_loop().call_soon(measuring.start)

    def _measure(self) -> None:
        self._core_speed = machine_info.core_speed()

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def names(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(member.name for member in self._alive.values())

    def use_url(self, url: str) -> None:
        """Use this address of the coordinator for new members and for project files."""
        self._url = self._projects.url = url

    async def start(self, request: StartMemberMsg) -> None:
        """Start a member; if it runs already, report its start again."""
        key = _key(request.run, request.member, request.incarnation)
        if existing := self._alive.get(key):
            if existing.process is not None:
                self._outbox.put(MemberStartedMsg(*existing.name, existing.process.pid, existing.warm))
            return
        directory = self._context.directory / "logs" / _file_name(request.run)
        base = f"{_file_name(request.member)}.{_file_name(request.incarnation)}"
        tail = log_tail.LogTail(directory / f"{base}.log")
        member = MemberProcess(request, tail, directory / f"{base}.why.json", machine_info.oom_kills())
        self._alive[key] = member
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            member.request = await localized(request, self._context, self._projects)
            fork = self._fork_request(key, member, directory / f"{base}.log")
            member.warm = not fork.cold
            await self.warm.start(fork, START_WITHIN_S)
        except Exception as error:  # noqa: BLE001 - a start that is never reported as failed keeps its run waiting
            self._on_start_failed(key, error)

    def _on_start(self, key: str, pid: int) -> None:
        process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            candidate = psutil.Process(pid)
            # The member may have ended already, and its pid may belong to another process.
            process = candidate if candidate.ppid() == self.warm.pid else None
        if (member := self._alive.get(key)) is None:
            # The start took so long that it was reported as failed.
            process_tree.signal_to([process] if process is not None else [], 9)
            return
        member.process = process
        log.info("%s of run %s started as process %d", member.request.member, member.request.run, pid)
        self._outbox.put(MemberStartedMsg(*member.name, pid, member.warm))
        member.started.set()
        if member.had_notice:
            self._terminate(member)

    def _fork_request(self, key: str, member: MemberProcess, log_path: Path) -> zygote_messages.ForkRequest:
        """Return the request to the warm process, with the member's whole environment."""
        request = member.request
        settings = _settings(request.env)
        hosts = machine_info.hosts_to_announce(self._url, str(settings.get("interface") or self._context.interface))
        threads = self._threads(request.env, settings)
        env = {
            "SHOAL_SETTINGS": "{}",
            "SHOAL_RUN_DIR": str(self._context.directory / "runs" / _file_name(request.run)),
            "OMP_NUM_THREADS": str(threads),
            **self._context.environ,
            **request.env,
            "SHOAL_URL": self._url,
            "SHOAL_TOKEN_FILE": self._context.token_file,
            "SHOAL_RUN": request.run,
            "SHOAL_MEMBER": request.member,
            "SHOAL_INCARNATION": request.incarnation,
            "SHOAL_MEMBER_HOSTS": ",".join(hosts),
            "SHOAL_GRACE_S": f"{self._context.grace_s:g}",
            "SHOAL_SPEED": f"{self._core_speed * threads:.6g}",
            "PYTHONUNBUFFERED": "1",
        }
        cold = env.get("SHOAL_COMPAT", "") not in ("", "0")
        cold = cold or any(env.get(name) != self._warm_environment.get(name) for name in _COLD_VARIABLES)
        return zygote_messages.ForkRequest(
            key=key,
            argv=request.argv,
            module=request.module,
            cwd=request.cwd,
            variables={os.fsencode(name): os.fsencode(value) for name, value in env.items()},
            log_path=str(log_path),
            why_path=str(member.why_path),
            threads=threads,
            cold=cold,
        )

    def _threads(self, env: Mapping[str, str], settings: Mapping[str, object]) -> int:
        """Return the threads of a member: OMP_NUM_THREADS, the role's cpus, the setting, or a share of the cores."""
        omp_threads = {**self._context.environ, **env}.get("OMP_NUM_THREADS", "")
        if omp_threads.isdigit() and int(omp_threads) > 0:
            return int(omp_threads)
        cpus = env.get("SHOAL_CPUS", "")
        if cpus.isdigit() and int(cpus) > 0:
            return int(cpus)
        setting = settings.get("threads")
        if isinstance(setting, int) and setting > 0:
            return setting
        max_members = env.get("SHOAL_MEMBERS_MAX", "")
        sharing = self._context.slots or (int(max_members) if max_members.isdigit() else self._cores)
        return max(1, self._cores // max(1, sharing))

    def _on_start_failed(self, key: str, error: Exception) -> None:
        if (member := self._alive.get(key)) is None:
            return
        code = error.code if isinstance(error, ShoalError) else "S402"
        text = error.what if isinstance(error, ShoalError) else str(error)
        why = error.why if isinstance(error, WarmProcessFailed | MembershipError | ProjectDeliveryFailed) else ""
        detail = f"error[{code}] {text}" + (f": {why}" if why else "")
        log.error("cannot start %s of run %s: %s", member.request.member, member.request.run, detail)
        self._report_not_started(key, "infrastructure", detail)

    def _report_not_started(self, key: str, cause: exit_causes.Cause, detail: str) -> None:
        member = self._alive.pop(key)
        member.started.set()
        member.ended.set()
        self._outbox.put(MemberExitedMsg(*member.name, None, None, cause, detail))

    async def stop(self, name: tuple[str, str, str], grace_s: float, reason: str) -> None:
        """Stop a member; return when nothing of its process tree is left."""
        member = self._alive.get(_key(*name))
        if member is None:
            return
        member.stop_reason = member.stop_reason or reason or "asked to stop"
        await member.started.wait()
        process = process_tree.own(member.process.pid) if member.process is not None else None
        if process is not None and process == member.process:
            remaining = await process_tree.end(process, grace_s)
            if remaining:
                log.error("still alive after SIGKILL: %s", ", ".join(str(process.pid) for process in remaining))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(member.ended.wait(), 10.0)

    async def stop_all(self, grace_s: float, reason: str) -> None:
        """Stop all members because the agent ends; those that have not started yet are not awaited."""
        for key in [key for key, member in self._alive.items() if not member.started.is_set()]:
            self._report_not_started(key, "asked", reason)
        await asyncio.gather(*(self.stop(name, grace_s, reason) for name in self.names))

    def notice_all(self) -> None:
        """Send SIGTERM to every member, so that it hands over and leaves."""
        for member in self._alive.values():
            member.had_notice = True
            self._terminate(member)

    async def all_ended(self, within_s: float) -> bool:
        """Wait until all members of now have ended; return False if that takes longer than `within_s`."""
        waits = [member.ended.wait() for member in self._alive.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*waits), within_s)
        except TimeoutError:
            return False
        return True

    async def follow_logs(self) -> None:
        """Send what members print to the coordinator, until cancelled."""
        while True:
            await asyncio.sleep(_LOG_POLL_S if self._alive else _LOG_POLL_S * 3)
            for member in list(self._alive.values()):
                self._send_log(member, last=False)

    async def watch_memory(self) -> None:
        """Kill members that use more memory than their role allows, until cancelled."""
        while True:
            await asyncio.sleep(_MEMORY_POLL_S)
            for member in list(self._alive.values()):
                allowed = memory_limit.allowed_bytes(member.request.env)
                if not allowed or member.process is None or member.limit_exceeded:
                    continue
                member.limit_exceeded = memory_limit.verdict(memory_limit.used_bytes(member.process), allowed)
                if member.limit_exceeded:
                    await process_tree.kill(process_tree.tree(member.process), give_up_s=10.0)

    def _terminate(self, member: MemberProcess) -> None:
        if member.process is not None:
            process_tree.signal_to([member.process], 15)

    def _send_log(self, member: MemberProcess, last: bool) -> None:
        for lines in log_tail.batches(member.tail.read(time.monotonic(), last)):
            self._outbox.put(LogLinesMsg(member.request.run, member.request.member, lines))

    def _on_exit(self, key: str, status: int) -> None:
        """Report a member's exit with its cause, after its last output."""
        if (member := self._alive.pop(key, None)) is None:
            return
        self._send_log(member, last=True)
        member.tail.close()
        code = os.waitstatus_to_exitcode(status)
        end = exit_causes.ExitFacts(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stop_reason=member.stop_reason,
            limit_exceeded=member.limit_exceeded,
            had_notice=member.had_notice,
            exception=_recorded_exception(member.why_path),
            oom_kills=machine_info.oom_kills() - member.oom_kills,
            last_output=member.tail.last_line,
        )
        verdict = exit_causes.classify(end)
        log.info("%s of run %s ended: %s %s", member.request.member, member.request.run, verdict.cause, verdict.detail)
        detail = verdict.detail[:_DETAIL_CHARACTERS]
        self._outbox.put(MemberExitedMsg(*member.name, end.exit_code, end.signal, verdict.cause, detail))
        self.last_exit = time.monotonic()
        member.ended.set()


async def localized(request: StartMemberMsg, context: AgentContext, projects: ProjectCache) -> StartMemberMsg:
    """Return the request with paths of this machine.

    Where the user's disk is not visible, the project is fetched, and checkpoints and outputs go to the coordinator.
    """
    run_dir, run, cwd = request.env.get("SHOAL_RUN_DIR", ""), _file_name(request.run), request.cwd
    env = dict(request.env)
    if context.apart or (run_dir and not os.path.isdir(run_dir)):
        store = f"{COORDINATOR_STORE}{request.run}"
        env |= {"SHOAL_RUN_DIR": str(context.directory / "runs" / run), "SHOAL_STORE": store}
    if request.project and (context.apart or not os.path.isdir(cwd)):
        cwd = str(await asyncio.to_thread(projects.lay_out, request.project, run))
    if context.apart or cwd != request.cwd:
        env["SHOAL_APART"] = cwd
    return msgspec.structs.replace(request, cwd=cwd, env=env)


def _key(run: str, member: str, incarnation: str) -> str:
    return json.dumps((run, member, incarnation))


def _file_name(text: str) -> str:
    """Return a name from the network as the name of one file, never of a path."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:100] or "-"


def _settings(env: Mapping[str, str]) -> dict[str, object]:
    try:
        return msgspec.json.decode(env.get("SHOAL_SETTINGS") or "{}", type=dict[str, object])
    except MALFORMED:
        return {}


def _recorded_exception(path: Path) -> exit_causes.RecordedException | None:
    """Return the uncaught exception that a member recorded, if any."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=exit_causes.RecordedException)
    except (OSError, *MALFORMED):
        return None
