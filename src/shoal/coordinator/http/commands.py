"""What people and tools ask for through the API."""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from shoal.coordinator.service import CoordinatorService
from shoal.core import sync_mode
from shoal.core.fleet import launcher_env
from shoal.core.membership import events as ev
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.runs import admission
from shoal.core.runs import events as runs_events
from shoal.core.runs.spec import RunSpec, Value
from shoal.core.runs.state import DONE, RunState
from shoal.errors import (
    AmbiguousRun,
    BadCount,
    BadRequest,
    BadRole,
    BadScript,
    BadSync,
    JournalUnwritable,
    PermissionDenied,
    RunAlreadyEnded,
    RunStillActive,
    UnknownRun,
)
from shoal.settings import RunSettings, parse_settings
from shoal.wire import agent_messages
from shoal.wire.api import RunView, ScaleRequest, SetupReport, StopRequest

ROLES = (TRAINER, SERVER, EVALUATOR)
WORDS = 1000
ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


class RunCommands:
    """The changes that the API can make."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def find(self, text: str) -> RunState:
        """A run by id, by name, or by the beginning of its id."""
        runs = self._service.runs.runs
        if text in runs:
            return runs[text]
        named = [run for run in runs.values() if run.spec.name == text]
        matching = named or [run for run in runs.values() if run.name.startswith(text)]
        going = [run for run in matching if not run.over]
        if len(matching) > 1 and len(going) == 1:
            matching = going
        if not matching:
            raise UnknownRun(f"there is no run {text}", do="shoal ps lists the runs")
        if len(matching) > 1:
            names = ", ".join(run.name for run in matching)
            raise AmbiguousRun(f"several runs are meant by {text}", why=names, do="use more of the id")
        return matching[0]

    def of(self, user: str, text: str) -> RunState:
        """A run that this user may change: its own, or any if it is the coordinator's owner."""
        run = self.find(text)
        if user and run.user != user:
            whose = run.user or "the coordinator itself"
            do = f"ask {run.user or 'its owner'}, or use the coordinator's own token file"
            raise PermissionDenied(f"{run.name} is a run of {whose}, not of {user}", do=do)
        return run

    def _writable(self) -> None:
        trouble = self._service.still_in_trouble()
        if trouble is not None:
            raise trouble

    def create(self, spec: RunSpec, user: str = "") -> RunView:
        _check_count(*spec.members)
        if not spec.argv:
            raise BadScript("there is nothing to run", do="name a script")
        if spec.compat and spec.compat not in launcher_env.KINDS:
            raise BadRequest(f"{spec.compat!r} is no kind of script", do=f"use {', '.join(launcher_env.KINDS)}")
        settings = _with_evaluator(spec, msgspec.to_builtins(parse_settings(spec.settings)))
        if spec.compat and sync_mode.parse(str(settings["sync"])).served:
            what = f"an unmodified script cannot be run with --sync {settings['sync']}"
            raise BadSync(what, why="it exchanges its gradients itself", do="leave --sync or --compat out")
        spec = admission.settle(spec, self._service.runs.supply.pools)
        self._writable()
        name = self._new_id(spec.name)
        self._make_directory(Path(self._service.run_dir(name)))
        self._service.handle(name, runs_events.RunCreated(spec, settings, user))
        return self._service.view(name)

    @staticmethod
    def _make_directory(path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JournalUnwritable(
                "the directory of the run cannot be made",
                where=str(path),
                why=error.strerror or str(error),
                do="make room on the coordinator's disk, or mend its permissions",
            ) from error

    def _new_id(self, name: str) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "run"
        while True:
            found = f"{slug}-{''.join(secrets.choice(ALPHABET) for _ in range(4))}"
            if found not in self._service.runs.runs:
                return found

    def stop(self, run: RunState, ask: StopRequest) -> RunView:
        if run.over:
            raise RunAlreadyEnded(f"the run {run.name} has ended", why=run.reason)
        self._writable()
        self._service.handle(run.name, runs_events.UserStopRequested(ask.reason, ask.checkpoint, ask.grace_s))
        return self._service.view(run.name)

    def scale(self, run: RunState, ask: ScaleRequest) -> RunView:
        if run.over:
            raise RunAlreadyEnded(f"the run {run.name} has ended", why=run.reason)
        _check_count(ask.min, ask.max)
        self._writable()
        self._set_budget(run, ask)
        self._service.handle(run.name, ev.ScaleRequested(ask.min, ask.max))
        return self._service.view(run.name)

    def _set_budget(self, run: RunState, ask: ScaleRequest | None) -> None:
        budget = ask.budget if ask is not None else None
        if budget is not None:
            admission.check_budget(replace(run.spec, budget=budget), self._service.runs.supply.pools)
            self._service.handle(run.name, runs_events.BudgetSet(budget))

    def resume(self, run: RunState, ask: ScaleRequest | None) -> RunView:
        if not run.over:
            raise RunStillActive(f"the run {run.name} is {run.state_name}", do="shoal stop ends it")
        if run.status == DONE:
            raise RunAlreadyEnded(f"the run {run.name} is done", why=run.reason)
        rules = run.membership.settings
        low, high = (ask.min, ask.max) if ask is not None else (rules.min_members, rules.max_members)
        _check_count(low, high)
        self._writable()
        budget = ask.budget if ask is not None and ask.budget is not None else run.budget
        spent = provisioning.account_at(self._service.runs.supply, self._service.clock.now()).of_run(run.name).spent
        admission.check_left(run.spec, budget, spent, self._service.runs.supply.pools)
        self._set_budget(run, ask)
        self._service.handle(run.name, runs_events.RunResumed(low, high))
        return self._service.view(run.name)

    def heard(self, user: str, hire: str, word: SetupReport) -> None:
        """A hired machine says how it is getting on; only what was hired has the coordinator's own token."""
        if user:
            raise PermissionDenied(f"{user} is not a machine that was hired", do="only agents may say this")
        if hire not in self._service.runs.supply.allocations:
            return
        why, where, do = (text[:WORDS] for text in (word.why, word.where, word.do))
        said = se.SetupFailed(hire, why, where, do, word.final) if word.failed else se.SetupProgressed(hire, why)
        self._service.handle("", said)

    @property
    def busy(self) -> bool:
        """Whether a process that an agent answers for is still alive."""
        return any(
            process.alive and process.agent in self._service.agents
            for process in self._service.runs.fleet.processes.values()
        )

    def shut_down(self, reason: str) -> None:
        """End what goes on here, so that it can be resumed, and send the agents away."""
        for run in self._service.runs.runs.values():
            if not run.over:
                self._service.attempt(
                    partial(
                        self._service.handle, run.name, runs_events.UserStopRequested(reason, False, 0.0, "resumable")
                    )
                )
        for link in list(self._service.agents.values()):
            link.send(agent_messages.ShutDownMsg(reason))


def _check_count(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise BadCount(f"{low}:{high} members cannot be", why="it must be 1 ≤ MIN ≤ MAX")


def _with_evaluator(spec: RunSpec, settings: dict[str, Value]) -> dict[str, Value]:
    """The settings of a run, checked and completed for the roles that it has."""
    unknown = [role for role in spec.roles if role not in ROLES]
    if unknown:
        raise BadRole(f"there is no role {unknown[0]!r}", do=f"the roles are {', '.join(ROLES)}")
    asked = spec.roles.get(EVALUATOR)
    if asked is not None:
        if asked.count not in (0, 1):
            raise BadRole(f"a run cannot have {asked.count} evaluators", do="ask for one, or none")
        settings["evaluator"] = asked.count == 1
    if not settings["evaluator"]:
        return settings
    if spec.compat:
        raise launcher_env.evaluator_unsupported(spec.compat)
    usual = RunSettings()
    # The command sends all settings, set or not: what differs from the default is somebody's wish.
    if (settings["checkpoint.every_s"], settings["checkpoint.every_steps"]) == (usual.checkpoint_every_s, 0):
        settings["checkpoint.every_s"] = settings["evaluate.every_s"]
    return settings
