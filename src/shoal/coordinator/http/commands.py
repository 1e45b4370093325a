"""Commands: the changes that users can make to runs through the API."""

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
from shoal.core.provisioning import events as pe
from shoal.core.runs import admission
from shoal.core.runs import events as run_events
from shoal.core.runs.spec import RunSpec, Value
from shoal.core.runs.state import DONE, RESUMABLE, RunState
from shoal.errors import (
    AmbiguousRun,
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
MAX_REPORT_TEXT = 1000
SHARED = "shared"
ID_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


class RunCommands:
    """Commands on the runs of one coordinator; each checks its arguments first and then records an event."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def find(self, text: str) -> RunState:
        """Return a run by id, by name, or by a prefix of its id; an active one if several match."""
        runs = self._service.state.runs
        if text in runs:
            return runs[text]
        named = [run for run in runs.values() if run.spec.name == text]
        matching = named or [run for run in runs.values() if run.name.startswith(text)]
        active = [run for run in matching if not run.has_ended]
        if len(matching) > 1 and len(active) == 1:
            matching = active
        if not matching:
            raise UnknownRun(f"unknown run {text}", do="shoal ps lists the runs")
        if len(matching) > 1:
            names = ", ".join(run.name for run in matching)
            raise AmbiguousRun(f"several runs match {text}", why=names, do="use more of the id")
        return matching[0]

    def find_readable(self, user: str, text: str) -> RunState:
        """Return a run whose logs, story and files this user may read: their own, or a shared one."""
        run = self.find(text)
        return run if run.settings.get("visibility") == SHARED else self.find_own(user, run.name)

    def find_own(self, user: str, text: str) -> RunState:
        """Return a run that this user may change: their own, or any run if they are the coordinator's owner."""
        run = self.find(text)
        if user and run.user != user:
            owner = run.user or "the coordinator's owner"
            do = f"ask {owner}, or use the coordinator's own token file; visibility=shared lets others read"
            raise PermissionDenied(f"run {run.name} belongs to {owner}, not to {user}", do=do)
        return run

    def create(self, spec: RunSpec, user: str = "") -> RunView:
        """Check a submitted run, create its directory and record it."""
        admission.check_members(*spec.members)
        admission.check_name(spec.name)
        if not spec.argv:
            raise BadScript("nothing to run", do="name a script")
        if spec.compat and spec.compat not in launcher_env.KINDS:
            kinds = ", ".join(launcher_env.KINDS)
            raise BadRequest(f"unknown kind of script {spec.compat!r}", do=f"use {kinds}")
        settings = _complete_settings(spec, msgspec.to_builtins(parse_settings(spec.settings)))
        if spec.compat and sync_mode.parse(str(settings["sync"])).served:
            what = f"an unmodified script cannot be run with --sync {settings['sync']}"
            raise BadSync(what, why="it exchanges its gradients itself", do="leave out --sync or --compat")
        spec = admission.admit(spec, self._service.state.provisioning.pools)
        self._require_journal()
        name = self._new_id(spec.name)
        _make_directory(Path(self._service.run_dir(name)))
        return self._record(name, run_events.RunCreated(spec, settings, user))

    def _record(self, run: str, event: object) -> RunView:
        self._service.handle(run, event)
        return self._service.views.run(run)

    def _require_journal(self) -> None:
        """Raise if the journal cannot be written now: a request is refused rather than queued."""
        error = self._service.retry()
        if error is not None:
            raise error

    def _new_id(self, name: str) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "run"
        while True:
            run_id = f"{slug}-{''.join(secrets.choice(ID_ALPHABET) for _ in range(4))}"
            if run_id not in self._service.state.runs:
                return run_id

    def stop(self, run: RunState, request: StopRequest) -> RunView:
        """Stop an active run."""
        self._require_active(run)
        self._require_journal()
        stop = run_events.UserStopRequested(request.reason, request.checkpoint, request.grace_s)
        return self._record(run.name, stop)

    def scale(self, run: RunState, request: ScaleRequest) -> RunView:
        """Change the number of members of an active run, and its budget if one is given."""
        self._require_active(run)
        admission.check_members(request.min, request.max)
        self._require_journal()
        self._set_budget(run, request)
        return self._record(run.name, ev.ScaleRequested(request.min, request.max))

    def _require_active(self, run: RunState) -> None:
        if run.has_ended:
            do = "" if run.status == DONE else f"shoal resume {run.name} continues it"
            raise RunAlreadyEnded(f"run {run.name} has ended", why=run.reason, do=do)

    def _set_budget(self, run: RunState, request: ScaleRequest | None) -> None:
        budget = request.budget if request is not None else None
        if budget is not None:
            admission.check_budget(replace(run.spec, budget=budget), self._service.state.provisioning.pools)
            self._service.handle(run.name, run_events.BudgetSet(budget))

    def resume(self, run: RunState, request: ScaleRequest | None) -> RunView:
        """Start a stopped or failed run again from its newest checkpoint, with other bounds if given."""
        if not run.has_ended:
            raise RunStillActive(f"run {run.name} is {run.shown_status}", do="stop it first: shoal stop")
        if run.status == DONE:
            raise RunAlreadyEnded(f"run {run.name} is done", why=run.reason)
        limits, machines = run.membership.settings, self._service.state.provisioning
        low, high = (request.min, request.max) if request is not None else (limits.min_members, limits.max_members)
        admission.check_members(low, high)
        self._require_journal()
        budget = request.budget if request is not None and request.budget is not None else run.budget
        spent = provisioning.account_at(machines, self._service.clock.now()).of_run(run.name).spent
        admission.check_remaining_budget(run.spec, budget, spent, machines.pools)
        self._set_budget(run, request)
        return self._record(run.name, run_events.RunResumed(low, high))

    def report_setup(self, user: str, allocation: str, report: SetupReport) -> None:
        """Record how the setup of a machine proceeds; only machines have the coordinator's own token."""
        if user:
            raise PermissionDenied(f"user {user} may not report for a machine", do="only agents may do this")
        if allocation not in self._service.state.provisioning.allocations:
            return
        why, where, do = (text[:MAX_REPORT_TEXT] for text in (report.why, report.where, report.do))
        if report.failed:
            self._service.handle("", pe.SetupFailed(allocation, why, where, do, report.final))
        else:
            self._service.handle("", pe.SetupProgressed(allocation, why))

    @property
    def busy(self) -> bool:
        """Whether a process of a connected agent is still alive."""
        processes = self._service.state.fleet.processes.values()
        return any(process.alive and process.agent in self._service.live.agents for process in processes)

    def shut_down(self, reason: str) -> None:
        """Stop all runs, so that they can be resumed, and shut the agents down."""
        stop = run_events.UserStopRequested(reason, checkpoint=False, grace_s=0.0, status=RESUMABLE)
        for run in self._service.state.runs.values():
            if not run.has_ended:
                self._service.attempt(partial(self._service.handle, run.name, stop))
        for connection in list(self._service.live.agents.values()):
            connection.send(agent_messages.ShutDownMsg(reason))


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalUnwritable(
            "the directory of the run cannot be created",
            where=str(path),
            why=error.strerror or str(error),
            do="free space on the coordinator's disk, or fix its permissions",
        ) from error


def _complete_settings(spec: RunSpec, settings: dict[str, Value]) -> dict[str, Value]:
    """Return the settings of a run, checked and completed for its roles."""
    unknown = [role for role in spec.roles if role not in ROLES]
    if unknown:
        raise BadRole(f"unknown role {unknown[0]!r}", do=f"use {', '.join(ROLES)}")
    evaluator = spec.roles.get(EVALUATOR)
    if evaluator is not None:
        if evaluator.count not in (0, 1):
            raise BadRole(f"invalid number of evaluators {evaluator.count}", do="use 1 or 0")
        settings["evaluator"] = evaluator.count == 1
    if not settings["evaluator"]:
        return settings
    if spec.compat:
        raise launcher_env.evaluator_unsupported(spec.compat)
    defaults = RunSettings()
    # The command line sends all settings; a schedule that differs from the default was chosen by the user.
    if (settings["checkpoint.every_s"], settings["checkpoint.every_steps"]) == (defaults.checkpoint_every_s, 0):
        settings["checkpoint.every_s"] = settings["evaluate.every_s"]
    return settings
