"""`shoal.run`: renders a run from a function, and starts it."""

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
from shoal.errors import BadFiles, BadRole, BadSettings, InsideMember
from shoal.experiment.roles import EVALUATOR, SERVER, TRAINER, Role, check, specs
from shoal.experiment.run_handle import RunHandle
from shoal.experiment.supervisor_thread import SupervisorThread
from shoal.launch import background as launch_background
from shoal.launch import launch_plan as render
from shoal.launch import project_upload, settings_layers
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

MEMBER = "shoal.experiment"
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
    """Train what a function returns, and keep it training; returns as soon as the run is accepted.

    `experiment_fn` is called in every member. `on` names pools of shoal.toml, such as "spot,lab"; "local" is this
    machine. `files` are paths, or names with paths, of files and directories that members find in their working
    directory. `settings` are those of `shoal config`, with _ for the dot: `checkpoint_every_s=60`. The run ends with
    this process, unless `detach=True`.
    """
    if "SHOAL_MEMBER" in os.environ:
        raise InsideMember("shoal.run was called inside a run", do='put the call under if __name__ == "__main__":')
    roles = {TRAINER: Role(), **(roles or {})}
    check(roles)
    choices = settings_layers.choose(Path.cwd(), os.environ, options=_options(roles, settings, on))
    _check_together(roles, choices)
    for setting in render.ROLES_ON.values():
        render.checked_pools(choices, setting)
    contents = _named(files)
    directory = render.new_directory(home())
    spec = _spec(directory, getattr(experiment_fn, "__name__", "experiment"), roles, choices, dict(env or {}))
    launch = render.render(directory, choices, spec)
    render.make(directory)
    try:
        if render.is_apart(choices, spec):
            launch = _packed_for_others(launch, choices, experiment_fn, contents)
        else:
            pack(directory, experiment_fn, contents)
        return _detached(launch) if detach else _kept(launch)
    except BaseException:
        render.unmake(directory)
        raise


def pack(
    directory: Path,
    experiment_fn: Callable[[], Experiment],
    contents: Mapping[str, Path],
    own: Mapping[str, Path] = {},
    near: tuple[str, ...] = (),
) -> PackManifest:
    """Write what members need into the directory of a coordinator that is still to be started, with its token.

    `own` are modules for machines that cannot import them, and `near` where others are looked for in the project there.
    """
    token = secrets.token_urlsafe(32)
    credentials.write(directory / "token", credentials.Credentials(token))
    where = directory / PACK
    where.mkdir(mode=0o700)
    function = packed_function.put(where, experiment_fn)
    kept = packed_files.put(where, contents)
    search = tuple(packed_function.search_path())
    made = PackManifest(function, kept, search, packed_files.put(where, own), near)
    manifest.write(where, made, token)
    packed_files.lay_out(where, kept, directory / WORK)
    return made


def _packed_for_others(
    launch: LaunchPlan, choices: ResolvedSettings, experiment_fn: Callable[[], Experiment], contents: Mapping[str, Path]
) -> LaunchPlan:
    """A launch whose function goes to machines that do not see this disk: with its files, its modules, the project."""
    directory, root = Path(launch.directory), Path.cwd() if launch.ship else None
    sent = {path.absolute() for path in project_upload.found(root).values()} if root is not None else set()
    own = modules.imported(sys.modules, sent)
    near = modules.relative(packed_function.search_path(), root) if root is not None else ()
    made = pack(directory, experiment_fn, contents, own, near)
    packed = packed_files.shipped(directory / PACK, made)
    told = project_upload.weigh(root, float(choices.text("ship_limit_mb")), packed)
    sys.stderr.write(f"shoal: sends {told}\n")
    named = {name: str(path) for name, path in packed.items()}
    return msgspec.structs.replace(launch, ship=str(root or ""), packed=named)


def _named(files: Files) -> dict[str, Path]:
    contents = packed_files.named(files)
    taken = [name for name in contents if name.partition("/")[0] == manifest.THERE]
    if taken:
        raise BadFiles(f"a file cannot be called {taken[0]!r}", why="that is where the function itself is")
    return contents


def _spec(
    directory: Path, name: str, roles: Mapping[str, Role], choices: ResolvedSettings, env: dict[str, str]
) -> RunSpec:
    shoal_settings.parse_settings(choices.for_run())
    members = render.parse_members(choices.text("members"), choices.source("members"))
    asked = {role: _placed(one, choices) for role, one in specs(roles).items()}
    return RunSpec(
        name=choices.text("name") or name.strip("<>"),
        argv=(MEMBER, str(directory / PACK)),
        cwd=str(directory / WORK),
        members=members,
        env=env,
        module=True,
        settings=choices.for_run(),
        roles=asked,
        on=render.chosen_pools(choices, asked),
        priority=int(choices.text("priority")),
        where=render.wanted_labels(choices),
        budget=render.budget_of(choices),
    )


def _placed(role: RoleSpec, choices: ResolvedSettings) -> RoleSpec:
    """A role with the pools that its labels mean."""
    if not role.where:
        return role
    return replace(role, on=render.labelled(choices, role.on, role.where))


def _kept(launch: LaunchPlan) -> RunHandle:
    supervisor = Supervisor(launch)
    client, view = supervisor.open()
    keeper = SupervisorThread(supervisor, client, view.run)
    keeper.start()
    return RunHandle(Path(launch.directory), view, keeper)


def _detached(launch: LaunchPlan) -> RunHandle:
    return RunHandle(Path(launch.directory), launch_background.begin(launch), None)


def _options(roles: Mapping[str, Role], settings: Mapping[str, Value], on: str) -> dict[str, Option]:
    """Settings from arguments, under the names that `shoal config` has for them."""
    trainer = roles[TRAINER]
    if trainer.on and on not in (LOCAL, trainer.on):
        raise BadRole(f"trainers cannot be on {trainer.on} while the run is on {on}", do="say it once")
    names = {key.variable.removeprefix("SHOAL_").lower(): key.name for key in shoal_settings.declared()}
    options: dict[str, Option] = {}
    for given, value in settings.items():
        if given not in names:
            raise shoal_settings.unknown(given, list(names), "shoal.run")
        options[names[given]] = (f"shoal.run({given}=…)", value)
    if "members" in options:
        raise BadSettings(
            "members= is not an argument of shoal.run", do='pass roles={"trainer": shoal.Role(count="1:8")}'
        )
    options["members"] = ('Role("trainer").count', str(roles[TRAINER].count))
    if trainer.where:
        options["where"] = ('Role("trainer").where', trainer.where)
    # Labels choose among all pools unless some are named.
    options["on"] = ("on=", trainer.on or ("" if on == LOCAL and "where" in options else on))
    for role, setting in render.ROLES_ON.items():
        if role in roles and roles[role].on:
            options[setting] = (f'Role("{role}").on', roles[role].on)
    if SERVER in roles:
        options["servers"] = ('Role("server").count', str(roles[SERVER].count))
    if EVALUATOR in roles:
        options["evaluator"] = ('Role("evaluator").count', int(roles[EVALUATOR].count) > 0)
    return options


def _check_together(roles: Mapping[str, Role], choices: ResolvedSettings) -> None:
    served = sync_mode.parse(choices.text("sync")).served
    if SERVER in roles and not served:
        raise BadRole(
            f"a run with sync={choices.text('sync')!r} has no servers",
            why="trainers keep the parameters themselves unless they train asynchronously",
            do='pass sync="stale:3" or sync="async", or leave the role out',
        )
