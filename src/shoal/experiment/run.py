"""`shoal.run`: plans a run of a function, packs the function, and starts the run."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal import settings as shoal_settings
from shoal.core import sync_mode
from shoal.errors import BadFiles, BadRole, BadSettings, InsideMember, ServiceFailed
from shoal.experiment.roles import EVALUATOR, SERVER, TRAINER, Role, check, specs
from shoal.experiment.run_handle import RunHandle
from shoal.experiment.supervisor_thread import SupervisorThread
from shoal.launch import launch_plan, pool_selection, project_upload, run_request, settings_layers
from shoal.launch.background import start_in_background
from shoal.launch.coordinator_target import LOCAL, home
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.settings_layers import Option, ResolvedSettings
from shoal.launch.supervisor import Supervisor
from shoal.pack import files as packed_files
from shoal.pack import function as packed_function
from shoal.pack import manifest, modules
from shoal.pack.files import Files
from shoal.pack.manifest import PackManifest
from shoal.settings import Value
from shoal.wire import credentials
from shoal.wire.api import RoleSpec, RunSpec
from shoal.worker.experiment import Experiment

MEMBER_MODULE = "shoal.experiment"
PACK, WORK = "pack", "work"


def run(
    experiment_fn: Callable[[], Experiment],
    on: str = "local",
    roles: Mapping[str, Role] | None = None,
    files: Files = (),
    *,
    env: Mapping[str, str] | None = None,
    detach: bool = False,
    **settings: Value,
) -> RunHandle:
    """Train the experiment that a function returns; return as soon as the run is accepted.

    `experiment_fn` is called in every member. `on` names pools of shoal.toml, such as "spot,lab"; "local" is this
    machine. `files` are paths, or names with paths, of files and directories that members find in their working
    directory. `env` are environment variables for the members. `settings` are those of `shoal config`, with _ for the
    dot: `checkpoint_every_s=60`. The run ends with this process, unless `detach=True`.
    """
    if "SHOAL_MEMBER" in os.environ:
        raise InsideMember("shoal.run was called inside a run", do='put the call under if __name__ == "__main__":')
    roles = {TRAINER: Role(), **(roles or {})}
    check(roles)
    resolved = settings_layers.resolve(Path.cwd(), os.environ, options=_options(roles, settings, on))
    _check_servers(roles, resolved)
    for setting in pool_selection.ROLE_SETTINGS.values():
        pool_selection.configured_pools(resolved, setting)
    contents = _named_files(files)
    directory = launch_plan.new_coordinator_directory(home())
    spec = _spec(directory, getattr(experiment_fn, "__name__", "experiment"), roles, resolved, dict(env or {}))
    plan = launch_plan.plan_launch(directory, resolved, spec)
    launch_plan.create_directory(directory)
    try:
        if pool_selection.lacks_shared_disk(resolved, spec):
            plan = _pack_for_upload(plan, resolved, experiment_fn, contents)
        else:
            pack(directory, experiment_fn, contents)
        return _start_detached(plan) if detach else _start_attached(plan)
    except ServiceFailed:
        # The error names a log in the directory.
        raise
    except BaseException:
        launch_plan.remove_directory(directory)
        raise


def pack(
    directory: Path,
    experiment_fn: Callable[[], Experiment],
    contents: Mapping[str, Path],
    own_modules: Mapping[str, Path] = {},
    search_in_project: tuple[str, ...] = (),
) -> PackManifest:
    """Write the function and its files, signed with a new token, into the directory of the future coordinator.

    `own_modules` are for machines that cannot import them; `search_in_project` are the directories of the uploaded
    project in which other modules are found.
    """
    token = secrets.token_urlsafe(32)
    credentials.write(directory / "token", credentials.Credentials(token))
    pack_directory = directory / PACK
    pack_directory.mkdir(mode=0o700)
    function = packed_function.put(pack_directory, experiment_fn)
    kept = packed_files.put(pack_directory, contents)
    search = tuple(packed_function.search_path())
    packed = PackManifest(function, kept, search, packed_files.put(pack_directory, own_modules), search_in_project)
    manifest.write(pack_directory, packed, token)
    packed_files.link_files(pack_directory, kept, directory / WORK)
    return packed


def _pack_for_upload(
    plan: LaunchPlan,
    settings: ResolvedSettings,
    experiment_fn: Callable[[], Experiment],
    contents: Mapping[str, Path],
) -> LaunchPlan:
    """Pack the function with its files and modules for machines that do not see this disk; return the plan with it."""
    directory, root = Path(plan.directory), Path.cwd() if plan.ship else None
    uploaded = {path.absolute() for path in project_upload.project_files(root).values()} if root is not None else set()
    own_modules = modules.find_user_modules(sys.modules, uploaded)
    search = modules.inside_project(packed_function.search_path(), root) if root is not None else ()
    packed = packed_files.files_to_send(directory / PACK, pack(directory, experiment_fn, contents, own_modules, search))
    text = project_upload.describe_upload(root, float(settings.text("ship_limit_mb")), packed)
    sys.stderr.write(f"shoal: sending {text}\n")
    return msgspec.structs.replace(
        plan, ship=str(root or ""), packed={name: str(path) for name, path in packed.items()}
    )


def _named_files(files: Files) -> dict[str, Path]:
    contents = packed_files.collect(files)
    reserved = [name for name in contents if name.partition("/")[0] == manifest.REMOTE_FOLDER]
    if reserved:
        raise BadFiles(f"reserved file name {reserved[0]!r}", why="the function itself is kept under that name")
    return contents


def _spec(
    directory: Path, name: str, roles: Mapping[str, Role], settings: ResolvedSettings, env: dict[str, str]
) -> RunSpec:
    shoal_settings.parse_settings(settings.for_run())
    members = run_request.parse_members(settings.text("members"), settings.source("members"))
    role_specs = {role: _with_labelled_pools(spec, settings) for role, spec in specs(roles).items()}
    return RunSpec(
        name=settings.text("name") or name.strip("<>"),
        argv=(MEMBER_MODULE, str(directory / PACK)),
        cwd=str(directory / WORK),
        members=members,
        env=env,
        module=True,
        settings=settings.for_run(),
        roles=role_specs,
        on=pool_selection.select_pools(settings, role_specs),
        priority=int(settings.text("priority")),
        where=pool_selection.required_labels(settings),
        budget=run_request.budget_limit(settings),
    )


def _with_labelled_pools(role: RoleSpec, settings: ResolvedSettings) -> RoleSpec:
    """Return a role with the pools that match its labels."""
    if not role.where:
        return role
    return replace(role, on=pool_selection.pools_with_labels(settings, role.on, role.where))


def _start_attached(plan: LaunchPlan) -> RunHandle:
    supervisor = Supervisor(plan)
    client, view = supervisor.open()
    thread = SupervisorThread(supervisor, client, view.run)
    thread.start()
    return RunHandle(Path(plan.directory), view, thread)


def _start_detached(plan: LaunchPlan) -> RunHandle:
    return RunHandle(Path(plan.directory), start_in_background(plan), None)


def _options(roles: Mapping[str, Role], settings: Mapping[str, Value], on: str) -> dict[str, Option]:
    """Return the arguments of `shoal.run` as a layer of settings, under the names that `shoal config` prints."""
    trainer = roles[TRAINER]
    if trainer.on and on not in (LOCAL, trainer.on):
        raise BadRole(
            f"the trainers' pools are given twice: on={on!r} and Role(on={trainer.on!r})", do="give them once"
        )
    names = {info.variable.removeprefix("SHOAL_").lower(): info.name for info in shoal_settings.declared()}
    options: dict[str, Option] = {}
    for argument, value in settings.items():
        if argument not in names:
            raise shoal_settings.unknown(argument, list(names), "shoal.run")
        options[names[argument]] = (f"shoal.run({argument}=…)", value)
    if "members" in options:
        raise BadSettings(
            "members= is not an argument of shoal.run", do='pass roles={"trainer": shoal.Role(count="1:8")}'
        )
    options["members"] = ('Role("trainer").count', str(roles[TRAINER].count))
    if trainer.where:
        options["where"] = ('Role("trainer").where', trainer.where)
    # Labels select among all pools unless some are named.
    options["on"] = ("on=", trainer.on or ("" if on == LOCAL and "where" in options else on))
    for role, setting in pool_selection.ROLE_SETTINGS.items():
        if role in roles and roles[role].on:
            options[setting] = (f'Role("{role}").on', roles[role].on)
    if SERVER in roles:
        options["servers"] = ('Role("server").count', str(roles[SERVER].count))
    if EVALUATOR in roles:
        options["evaluator"] = ('Role("evaluator").count', int(roles[EVALUATOR].count) > 0)
    return options


def _check_servers(roles: Mapping[str, Role], settings: ResolvedSettings) -> None:
    if SERVER in roles and not sync_mode.parse(settings.text("sync")).served:
        raise BadRole(
            f"a run with sync={settings.text('sync')!r} has no servers",
            why="parameter servers are used only by the sync modes stale:K and async",
            do='pass sync="stale:3" or sync="async", or leave the role out',
        )
