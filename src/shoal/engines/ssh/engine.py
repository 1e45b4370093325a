"""Hosts that ssh reaches: an agent is a process of its own session there, found again by a directory that names it."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec

from shoal.engines import exit_message, grace_period
from shoal.engines.agent_script import KEEP_S
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.engines.ssh import command, host_connection
from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.errors import HostError
from shoal.engines.ssh.host_connection import ENV, HostConnection, Json
from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError, PoolFull

FRESH_S = 2.0
START_WITHIN_S = 20.0
START_S = 15.0
CHECK_S = 75.0
END_MORE_S = 20.0
LOW_DISK_BYTES = 1 << 30
LEFT_S = 3600.0
TIDY_S = 60.0
NOBODY = "-"


@dataclass(frozen=True, slots=True)
class _UnconfirmedStart:
    """A host that may have started a hire; it will not start it after `until`, by the clock of `time.monotonic`."""

    host: str
    until: float


class Ssh(Engine):
    """Agents on hosts, over the system's ssh and the user's own configuration.

    What runs where is asked of the hosts. Of a host that does not answer, the engine says what it had seen there last;
    and a hire that a host may or may not have started when its connection broke goes to no other host meanwhile.
    """

    options_type: ClassVar[type[EngineOptions]] = SshOptions

    def __init__(self, pool: str, options: SshOptions, control: str = "") -> None:
        config = os.path.expanduser(options.config)
        super().__init__(pool, msgspec.structs.replace(options, config=config))
        self._places = command.places(pool, options)
        # Nobody can guess it and put something of theirs there; short, because the names of sockets have to be.
        self._control = control or f"/tmp/shoal-ssh-{secrets.token_hex(6)}"
        later = _BackgroundTasks(options.parallel)
        self._contacts = {one.host: HostConnection(pool, one, self._ssh, self._control, later) for one in self._places}
        self._doubts: dict[tuple[str, str], _UnconfirmedStart] = {}
        self._turns: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        called = {*self._contacts, *filter(None, [options.jump])}
        self._leave = weakref.finalize(self, _let_go, self._ssh, called, self._control)

    @property
    def _ssh(self) -> SshOptions:
        assert isinstance(self.options, SshOptions)
        return self.options

    @property
    def max_allocations(self) -> int:
        return sum(place.room for place in self._places)

    def render(self, request: AllocationRequest) -> RenderedRequest:
        return self._rendered(request, command.order(self._places, request.allocation)[0].host)

    def _rendered(self, request: AllocationRequest, host: str) -> RenderedRequest:
        return RenderedRequest(command.argv(self._ssh, host, self._control), command.script(request, self._ssh), ENV)

    def close(self) -> None:
        self._leave()

    # --- submit

    def submit(self, request: AllocationRequest) -> str:
        with self._turns[request.tag, request.allocation]:
            self._resolve(request)
            self._look(request.tag, within_s=FRESH_S)
            if not any(_room(contact, request.tag) for contact in self._contacts.values()):
                self._look(request.tag)
            there = self._where(request.tag, request.allocation)
            return command.handle(there or self._start_somewhere(request), request.tag, request.allocation)

    def _where(self, tag: str, hire: str) -> str | None:
        """The host that has it, as far as is known."""
        for contact in self._contacts.values():
            if any(one["hire"] == hire and one["alive"] for one in (contact.last(tag) or {"hires": ()})["hires"]):
                return contact.host
        return None

    def _start_somewhere(self, request: AllocationRequest) -> str:
        against: list[tuple[str, LaunchError | str]] = []
        for place in command.order(self._places, request.allocation):
            contact = self._contacts[place.host]
            if contact.trouble is not None:
                against.append((place.host, contact.trouble.error))
                continue
            try:
                full = self._start(request, contact)
            except HostError as trouble:
                if trouble.unsure:
                    self._doubts[request.tag, request.allocation] = _UnconfirmedStart(
                        place.host, time.monotonic() + START_WITHIN_S
                    )
                    raise trouble.error from None
                against.append((place.host, trouble.error))
                continue
            if not full:
                return place.host
            against.append((place.host, full))
        raise self._nowhere(request, against)

    def _start(self, request: AllocationRequest, contact: HostConnection) -> str:
        """Start it there; why there is no room, if there is none."""
        if not _room(contact, request.tag):
            return _full(contact.place.room, contact)
        self._prove(contact)
        call = {
            "do": "start",
            "tag": request.tag,
            "hire": request.allocation,
            "room": contact.place.room,
            "script": self._rendered(request, contact.host).text,
            "credentials": f"{request.credentials.token}\n{request.credentials.certificate_pem or ''}",
            "grace_s": grace_period.of(request),
            # What is delivered late, by a connection that came back, must not start what was given up.
            "start_by": time.time() + contact.ahead_s + START_WITHIN_S,
        }
        answer = contact.call(call, START_S)
        if answer["state"] == "full":
            return _full(answer["running"], contact)
        if answer["state"] == "late":
            raise HostError(
                EngineUnreachable(f"{contact.host} was too slow to start {request.allocation}", where=contact.host)
            )
        contact.note(request.tag, request.allocation)
        return ""

    def _prove(self, contact: HostConnection) -> None:
        """See that an agent could run there, once."""
        if not contact.proved:
            try:
                contact.call({"do": "check", "check": command.check(self._ssh)}, CHECK_S)
            except HostError as trouble:
                raise HostError(trouble.error) from trouble
            contact.proved = True

    def _resolve(self, request: AllocationRequest) -> None:
        """Find out whether a host started it when its connection broke, before it is started anywhere else."""
        doubt = self._doubts.get((request.tag, request.allocation))
        if doubt is None:
            return
        contact = self._contacts[doubt.host]
        answered = contact.look(request.tag) is not None
        if self._where(request.tag, request.allocation) is None and time.monotonic() < doubt.until:
            raise self._in_doubt(request, contact, "it has some seconds left to start it")
        if not answered and contact.last(request.tag) is not None:
            raise self._in_doubt(request, contact, contact.why())
        del self._doubts[request.tag, request.allocation]

    def _in_doubt(self, request: AllocationRequest, contact: HostConnection, why: str) -> EngineUnreachable:
        what = f"{contact.host} may have started {request.allocation} when the connection broke"
        return EngineUnreachable(
            what, where=f"pool {self.pool}, ssh {contact.host}", why=why, do="wait until it is known"
        )

    def _nowhere(self, request: AllocationRequest, against: list[tuple[str, LaunchError | str]]) -> LaunchError:
        """The error of a hire that no host took; pools whose hosts are all silent can be asked again."""
        errors = [error for _, error in against if isinstance(error, LaunchError)]
        if len(against) == len(errors) == 1:
            return errors[0]
        whys = [
            f"{host}: {error if isinstance(error, str) else f'{error.what} ({error.why})'}" for host, error in against
        ]
        silent = [error for error in errors if isinstance(error, EngineUnreachable)]
        kind: type[LaunchError] = EngineUnreachable if len(silent) == len(against) else AllocationRefused
        if len(errors) < len(against):
            kind = PoolFull
        remedies = dict.fromkeys(error.do for error in errors if error.do)
        return kind(
            f"no host of pool {self.pool} takes {request.allocation}",
            where=f"pool {self.pool}",
            why="; ".join(whys),
            do="; ".join(remedies) or f"add hosts to [pool.{self.pool}], or raise per_host",
        )

    # --- watch, cancel, offers

    def watch(self, tag: str) -> list[AllocationStatus]:
        answers = self._look(tag)
        if not any(answers.values()):
            raise self._unreachable()
        found: dict[object, AllocationStatus] = {}
        for host, answer in answers.items():
            contact = self._contacts[host]
            for one in (answer or contact.last(tag) or {"hires": ()})["hires"]:
                seen = self._seen(contact, tag, one, silent=answer is None)
                # Two names of one host show the same process twice.
                found.setdefault((one["hire"], tuple(one["born"] or ()) or host), seen)
        running = {seen.allocation for seen in found.values() if seen.state == "running"}
        return [seen for seen in found.values() if seen.state == "running" or seen.allocation not in running]

    def _unreachable(self) -> LaunchError:
        """The error of a pool of which no host answers; one whose hosts all turn us away need not be asked again."""
        contacts = self._contacts.values()
        errors = [one.trouble.error for one in contacts if one.trouble is not None]
        refusals = [error for error in errors if isinstance(error, AllocationRefused)]
        if len(refusals) == len(contacts) == 1:
            return refusals[0]
        kind: type[LaunchError] = AllocationRefused if len(refusals) == len(contacts) else EngineUnreachable
        return kind(
            f"no host of pool {self.pool} answers",
            where=f"pool {self.pool}",
            why="; ".join(contact.why() for contact in contacts),
            do="; ".join(dict.fromkeys(error.do for error in errors)),
        )

    def _seen(self, contact: HostConnection, tag: str, one: Json, *, silent: bool) -> AllocationStatus:
        handle = command.handle(contact.host, tag, one["hire"])
        if not one["alive"]:
            words = exit_message.of_log(one["said"], command.agent_python(self._ssh))
            contact.proved = False
            return AllocationStatus(one["hire"], handle, "gone", f"{words}; {contact.skew}" if contact.skew else words)
        return AllocationStatus(one["hire"], handle, "running", contact.why() if silent else contact.skew)

    def cancel(self, handle: str) -> None:
        host, tag, hire = command.of_handle(handle)
        contact = self._contacts.get(host)
        if contact is None:
            raise AllocationRefused(
                f"{host} is no host of pool {self.pool} any more",
                where=handle,
                do=f"name it in [pool.{self.pool}] again until {hire} is ended",
            )
        self._prepare()
        try:
            known = contact.trouble
            if known is not None and contact.look(tag) is None:
                raise known
            answer = contact.call({"do": "cancel", "tag": tag, "hire": hire}, command.GRACE_S + END_MORE_S)
        except HostError as trouble:
            raise EngineUnreachable(
                trouble.error.what, where=handle, why=trouble.error.why, do=trouble.error.do
            ) from None
        if answer["state"] != "ended":
            raise EngineUnreachable(f"{hire} does not end", where=handle, why=f"left are {answer['left']}")
        contact.forget(tag, hire)

    def clean_up(self, tag: str, known: Collection[str]) -> None:
        self._prepare()
        request = {"do": "tidy", "tag": tag, "known": sorted(known), "keep_s": KEEP_S}
        for contact in [one for one in self._contacts.values() if one.trouble is None]:
            # What cannot be removed now can be removed the next time.
            with contextlib.suppress(HostError):
                contact.call(request, TIDY_S)

    def capacity(self) -> list[Capacity]:
        answers = self._look(NOBODY, gpus=True)
        return [self._offer(self._contacts[host], answer) for host, answer in answers.items()]

    def _offer(self, contact: HostConnection, answer: Json | None) -> Capacity:
        if answer is None:
            return Capacity(contact.host, 0, why=contact.why())
        running = _running(answer)
        why = [f"{running} of {contact.place.room} hires run there"] if running else []
        if answer["load"] > answer["cpus"]:
            why.append(f"its load is {answer['load']:.1f} on {answer['cpus']} processors")
        if answer["disk_free_bytes"] < LOW_DISK_BYTES:
            why.append(f"only {answer['disk_free_bytes'] / (1 << 20):.0f} MiB of disk are free")
        why += [contact.skew] if contact.skew else []
        return Capacity(
            contact.host, _room(contact, NOBODY), answer["cpus"], answer["gpus"], answer["memory_bytes"], "; ".join(why)
        )

    # --- all hosts

    def _look(self, tag: str, *, within_s: float = 0.0, gpus: bool = False) -> dict[str, Json | None]:
        """What is on every host; None for those that do not answer."""
        self._prepare()
        with ThreadPoolExecutor(self._ssh.parallel, thread_name_prefix="shoal-ssh") as pool:
            look = partial(HostConnection.look, tag=tag, within_s=within_s, gpus=gpus)
            return dict(zip(self._contacts, pool.map(look, self._contacts.values()), strict=True))

    def _prepare(self) -> None:
        try:
            if not os.path.isdir(self._control):
                _sweep(self._control.rpartition("-")[0])
                os.makedirs(self._control, mode=0o700, exist_ok=True)
        except OSError as error:
            raise EngineUnreachable(
                "ssh has no place for its connections", where=self._control, why=error.strerror or ""
            ) from error


class _BackgroundTasks:
    """Does things in the background, not too many at once; whoever ends does not wait for them."""

    def __init__(self, parallel: int) -> None:
        self._turn = threading.Semaphore(parallel)

    def __call__(self, do: Callable[[], object]) -> None:
        threading.Thread(target=self._do, args=(do,), name="shoal-ssh-later", daemon=True).start()

    def _do(self, do: Callable[[], object]) -> None:
        with self._turn:
            do()


def _let_go(options: SshOptions, hosts: set[str], control: str) -> None:
    if os.path.isdir(control):
        host_connection.leave(options, hosts, control)
        shutil.rmtree(control, ignore_errors=True)


def _sweep(prefix: str) -> None:
    """Remove what coordinators that were killed left; where a connection still is, its directory stays."""
    for path in glob.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            found = os.stat(path, follow_symlinks=False)
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > LEFT_S:
                os.rmdir(path)


def _running(answer: Json) -> int:
    return int(answer["others"]) + sum(bool(one["alive"]) for one in answer["hires"])


def _room(contact: HostConnection, tag: str) -> int:
    """How many more it takes, as far as is known."""
    known = contact.last(tag)
    return max(0, contact.place.room - (_running(known) if known is not None else 0))


def _full(running: int, contact: HostConnection) -> str:
    return f"it is full, {running} of {contact.place.room} hires run there"
