"""The members under an agent: started on order, followed, ended for sure, and each exit told with its cause."""

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

log = logging.getLogger("shoal.agent")

START_WITHIN_S = 300.0
_LOOK_S = 0.08
_WEIGH_S = 0.5
_DETAIL_CHARACTERS = 2000
STORE = "coordinator://"
# An interpreter reads these once, when it starts; a fork of a warm one would not see them.
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
    """What all members under this agent have in common. `apart` says that this machine sees nothing of the user's disk.

    `cache` keeps what runs send along; `grace_s` is how long members have to hand over.
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
    """One live member."""

    order: StartMemberMsg
    tail: log_tail.LogTail
    why_path: Path
    oom_kills: int
    process: psutil.Process | None = None
    warm: bool = True
    asked: str = ""
    over: str = ""
    noticed: bool = False
    born: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> tuple[str, str, str]:
        return (self.order.run, self.order.member, self.order.incarnation)


class MemberProcesses:
    """Everybody who lives under this agent."""

    def __init__(self, home: AgentContext, preload: tuple[str, ...], outbox: Outbox) -> None:
        self._home = home
        self._url = home.url
        self._outbox = outbox
        self._luggage = ProjectCache(home.url, home.token_file, home.cache, home.directory / "runs")
        self._alive: dict[str, MemberProcess] = {}
        self._cores = machine_info.cores()
        self._core_speed = 0.0
        self.last_exit = 0.0
        environment = {**home.environ, "OMP_NUM_THREADS": str(self._threads({}, {})), "PYTHONUNBUFFERED": "1"}
        # One thread in NumPy's own library, or the warm process would have more than one from the import on.
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        self._warm_environment = environment
        self.warm = WarmProcess(preload, environment, self._on_start, self._on_exit)

    def open(self) -> None:
        """Start the warm process, and then measure a core beside it: a member born before that has no guess."""
        self.warm.open()
        measuring = threading.Thread(target=self._measure, name="shoal-probe", daemon=True)
        # It would hold up the start of the warm process, for which everybody waits.
        asyncio.get_running_loop().call_soon(measuring.start)

    def _measure(self) -> None:
        self._core_speed = machine_info.core_speed()

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def names(self) -> tuple[tuple[str, str, str], ...]:
        return tuple(member.name for member in self._alive.values())

    def reached(self, url: str) -> None:
        """The coordinator answered at this one of its URLs: members and what they need go the same way."""
        self._url = self._luggage.url = url

    async def start(self, order: StartMemberMsg) -> None:
        """Start a member; an order that was obeyed already is answered again."""
        key = _key(order.run, order.member, order.incarnation)
        if known := self._alive.get(key):
            if known.process is not None:
                self._outbox.put(MemberStartedMsg(*known.name, known.process.pid, known.warm))
            return
        directory = self._home.directory / "logs" / _file_name(order.run)
        base = f"{_file_name(order.member)}.{_file_name(order.incarnation)}"
        member = MemberProcess(
            order, log_tail.LogTail(directory / f"{base}.log"), directory / f"{base}.why.json", machine_info.oom_kills()
        )
        self._alive[key] = member
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            member.order = await self._at_home(order)
            start = self._order(key, member, directory / f"{base}.log")
            member.warm = not start.cold
            await self.warm.start(start, START_WITHIN_S)
        except (ShoalError, OSError, ValueError) as error:
            self._never_started(key, error)

    async def _at_home(self, order: StartMemberMsg) -> StartMemberMsg:
        """The order as this machine can carry it out: what it does not see of the user's disk is here, or goes back."""
        told, run, cwd = order.env.get("SHOAL_RUN_DIR", ""), _file_name(order.run), order.cwd
        env = dict(order.env)
        if self._home.apart or (told and not os.path.isdir(told)):
            env |= {"SHOAL_RUN_DIR": str(self._home.directory / "runs" / run), "SHOAL_STORE": f"{STORE}{order.run}"}
        if order.project and (self._home.apart or not os.path.isdir(cwd)):
            cwd = str(await asyncio.to_thread(self._luggage.lay_out, order.project, run))
        if self._home.apart or cwd != order.cwd:
            env["SHOAL_APART"] = cwd
        return msgspec.structs.replace(order, cwd=cwd, env=env)

    def _on_start(self, key: str, pid: int) -> None:
        born: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # It may be gone already, and its number somebody else's.
            born = process if process.ppid() == self.warm.pid else None
        if (member := self._alive.get(key)) is None:
            # It took so long that its end was told already.
            process_tree.signal_to([born] if born is not None else [], 9)
            return
        member.process = born
        log.info("%s of run %s started as process %d", member.order.member, member.order.run, pid)
        self._outbox.put(MemberStartedMsg(*member.name, pid, member.warm))
        member.born.set()
        if member.noticed:
            self._terminate(member)

    def _order(self, key: str, member: MemberProcess, log_path: Path) -> zygote_messages.ForkRequest:
        order = member.order
        settings = _settings(order.env)
        hosts = machine_info.hosts_to_announce(self._url, str(settings.get("interface") or self._home.interface))
        threads = self._threads(order.env, settings)
        env = {
            "SHOAL_SETTINGS": "{}",
            "SHOAL_RUN_DIR": str(self._home.directory / "runs" / _file_name(order.run)),
            "OMP_NUM_THREADS": str(threads),
            **self._home.environ,
            **order.env,
            "SHOAL_URL": self._url,
            "SHOAL_TOKEN_FILE": self._home.token_file,
            "SHOAL_RUN": order.run,
            "SHOAL_MEMBER": order.member,
            "SHOAL_INCARNATION": order.incarnation,
            "SHOAL_HOST": ",".join(hosts),
            "SHOAL_GRACE_S": f"{self._home.grace_s:g}",
            "SHOAL_SPEED": f"{self._core_speed * threads:.6g}",
            "PYTHONUNBUFFERED": "1",
        }
        cold = env.get("SHOAL_COMPAT", "") not in ("", "0")
        cold = cold or any(env.get(name) != self._warm_environment.get(name) for name in _COLD_VARIABLES)
        return zygote_messages.ForkRequest(
            key=key,
            argv=order.argv,
            module=order.module,
            cwd=order.cwd,
            variables={os.fsencode(name): os.fsencode(value) for name, value in env.items()},
            log_path=str(log_path),
            why_path=str(member.why_path),
            threads=threads,
            cold=cold,
        )

    def _threads(self, env: Mapping[str, str], settings: Mapping[str, object]) -> int:
        """What the user set, else what its role was given, else the setting of the run, else a part of the cores."""
        given = {**self._home.environ, **env}.get("OMP_NUM_THREADS", "")
        if given.isdigit() and int(given) > 0:
            return int(given)
        own = env.get("SHOAL_CPUS", "")
        if own.isdigit() and int(own) > 0:
            return int(own)
        wished = settings.get("threads")
        if isinstance(wished, int) and wished > 0:
            return wished
        most = env.get("SHOAL_MEMBERS_MAX", "")
        sharing = self._home.slots or (int(most) if most.isdigit() else self._cores)
        return max(1, self._cores // max(1, sharing))

    def _never_started(self, key: str, error: ShoalError | OSError | ValueError) -> None:
        if (member := self._alive.get(key)) is None:
            return
        code = error.code if isinstance(error, ShoalError) else "S402"
        text = error.what if isinstance(error, ShoalError) else str(error)
        why = error.why if isinstance(error, WarmProcessFailed | MembershipError | ProjectDeliveryFailed) else ""
        detail = f"error[{code}] {text}" + (f": {why}" if why else "")
        log.error("%s of run %s could not be started: %s", member.order.member, member.order.run, detail)
        self._forget_unborn(key, "infrastructure", detail)

    def _forget_unborn(self, key: str, cause: exit_causes.Cause, detail: str) -> None:
        member = self._alive.pop(key)
        member.born.set()
        member.gone.set()
        self._outbox.put(MemberExitedMsg(*member.name, None, None, cause, detail))

    async def end(self, name: tuple[str, str, str], grace_s: float, reason: str) -> None:
        """End a member; returns when nothing of its process tree is left."""
        member = self._alive.get(_key(*name))
        if member is None:
            return
        member.asked = member.asked or reason or "asked to end"
        await member.born.wait()
        process = process_tree.own(member.process.pid) if member.process is not None else None
        if process is not None and process == member.process:
            left = await process_tree.end(process, grace_s)
            if left:
                log.error("still there after SIGKILL: %s", ", ".join(str(process.pid) for process in left))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(member.gone.wait(), 10.0)

    async def end_all(self, grace_s: float, reason: str) -> None:
        """End everybody, because the agent ends; who is not born yet is not waited for."""
        for key in [key for key, member in self._alive.items() if not member.born.is_set()]:
            self._forget_unborn(key, "asked", reason)
        await asyncio.gather(*(self.end(name, grace_s, reason) for name in self.names))

    def notice_all(self) -> None:
        """SIGTERM to every member: it hands over and goes."""
        for member in self._alive.values():
            member.noticed = True
            self._terminate(member)

    async def all_gone(self, within_s: float) -> bool:
        """Wait for those who are alive now."""
        waits = [member.gone.wait() for member in self._alive.values()]
        try:
            await asyncio.wait_for(asyncio.gather(*waits), within_s)
        except TimeoutError:
            return False
        return True

    async def follow_logs(self) -> None:
        """Pass on what members print, for as long as the agent lives."""
        while True:
            await asyncio.sleep(_LOOK_S if self._alive else _LOOK_S * 3)
            for member in list(self._alive.values()):
                self._pass_on(member, last=False)

    async def watch_memory(self) -> None:
        """End members that use more memory than their role has, for as long as the agent lives."""
        while True:
            await asyncio.sleep(_WEIGH_S)
            for member in list(self._alive.values()):
                allowed = memory_limit.allowed_bytes(member.order.env)
                if not allowed or member.process is None or member.over:
                    continue
                member.over = memory_limit.verdict(memory_limit.used_bytes(member.process), allowed)
                if member.over:
                    await process_tree.kill(process_tree.tree(member.process), give_up_s=10.0)

    def _terminate(self, member: MemberProcess) -> None:
        if member.process is not None:
            process_tree.signal_to([member.process], 15)

    def _pass_on(self, member: MemberProcess, last: bool) -> None:
        for lines in log_tail.batches(member.tail.read(time.monotonic(), last)):
            self._outbox.put(LogLinesMsg(member.order.run, member.order.member, lines))

    def _on_exit(self, key: str, status: int) -> None:
        if (member := self._alive.pop(key, None)) is None:
            return
        self._pass_on(member, last=True)
        member.tail.close()
        code = os.waitstatus_to_exitcode(status)
        end = exit_causes.ExitFacts(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stop_reason=member.asked,
            limit_exceeded=member.over,
            had_notice=member.noticed,
            exception=_why(member.why_path),
            oom_kills=machine_info.oom_kills() - member.oom_kills,
            last_output=member.tail.last_words,
        )
        verdict = exit_causes.classify(end)
        log.info("%s of run %s ended: %s %s", member.order.member, member.order.run, verdict.cause, verdict.detail)
        detail = verdict.detail[:_DETAIL_CHARACTERS]
        self._outbox.put(MemberExitedMsg(*member.name, end.exit_code, end.signal, verdict.cause, detail))
        self.last_exit = time.time()
        member.gone.set()


def _key(run: str, member: str, incarnation: str) -> str:
    return json.dumps((run, member, incarnation))


def _file_name(text: str) -> str:
    """A name from the network as a name of one file, never of a path."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:100] or "-"


def _settings(env: Mapping[str, str]) -> dict[str, object]:
    try:
        return msgspec.json.decode(env.get("SHOAL_SETTINGS") or "{}", type=dict[str, object])
    except msgspec.DecodeError:
        return {}


def _why(path: Path) -> exit_causes.RecordedException | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=exit_causes.RecordedException)
    except (OSError, msgspec.DecodeError):
        return None
