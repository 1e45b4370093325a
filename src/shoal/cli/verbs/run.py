"""`shoal run`: train a script, and keep it training."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.core.fleet.launcher_env import evaluator_unsupported
from shoal.errors import BadEmulation, BadSync
from shoal.launch import launch_plan as launching
from shoal.launch import settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.settings_layers import Option, ResolvedSettings

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("-n", "--members", metavar="MIN:MAX", help="How many members: N, or MIN:MAX.  [default: 1]"),
    click.option("--name", help="Name of the run.  [default: the script's]"),
    click.option("--on", metavar="POOLS", help="Take machines from these pools of shoal.toml, such as spot,lab."),
    click.option("--where", metavar="LABELS", help="Only from pools with these labels, such as gpu=a100,zone=b."),
    click.option("--budget", metavar="AMOUNT", help="What machines may cost in all; the run stops before it is over."),
    click.option("--priority", metavar="N", help="Runs of higher priority get machines first.  [default: 0]"),
    click.option("--sync", metavar="MODE", help="How closely: step, stale:K, async or local:H.  [default: step]"),
    click.option(
        "--servers", metavar="N", help="How many hold the parameters, with stale:K, async or --compat ps.  [default: 2]"
    ),
    click.option("--servers-on", metavar="POOLS", help="Take machines for servers from these pools, and only these."),
    click.option("--evaluator", is_flag=True, help="Score checkpoints beside the training, as run.evaluate says."),
    click.option("--evaluator-on", metavar="POOLS", help="The same, on a machine of these pools, such as lab."),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module."),
    click.option(
        "--compat",
        type=click.Choice(["torchrun", "tf", "ps"]),
        help="Run an unmodified script with a restart on each change: it finds RANK, WORLD_SIZE and MASTER_*, or "
        "TF_CONFIG with workers, or with a chief, workers and --servers ps.",
    ),
    click.option("--batch", metavar="SIZE", help="Global batch: a number, or auto to choose it while training."),
    click.option(
        "--emulate",
        metavar="SPEEDS",
        help="Let members be as slow as machines of these speeds, such as 1,0.5,0.25, or 0.5:0.125@300 from step 300 "
        "on.",
    ),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set one setting; see shoal config."),
    click.option("--dry-run", is_flag=True, help="Print what would be started."),
)


def with_run(function: F) -> F:
    """Add the script, its arguments and the options of a run to a verb that starts one."""
    for option in reversed(_OPTIONS):
        function = option(function)
    for argument in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.argument("script"),
    ):
        function = argument(function)
    return function


@click.command(context_settings={"allow_interspersed_args": False})
@with_run
@click.option("--detach", is_flag=True, help="Return when the run is accepted, and leave it running.")
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, detach: bool, **asked: Any) -> None:
    """Train a script, and keep it training whoever dies.

    Options of Shoal come before SCRIPT; what follows it is the script's own. With --url the run is submitted to a
    standing coordinator; otherwise a coordinator and an agent are started here for it, and end with it.
    """
    launch = launch_of(frame, place, **asked)
    if launch is not None:
        start(frame, place, launch, detach=detach)


def launch_of(
    frame: OutputOptions,
    place: CoordinatorTarget,
    script: str,
    args: tuple[str, ...],
    evaluator: bool,
    module: bool,
    compat: str | None,
    assignments: tuple[str, ...],
    dry_run: bool,
    **given: str | None,
) -> LaunchPlan | None:
    """What is to be started for the options of a run, checked; None if it was only to be shown."""
    choices = settings_layers.choose(Path.cwd(), os.environ, assignments, _options(given, evaluator))
    _check_compat(choices, compat)
    standing = bool(place.url)
    spec = launching.spec_of(script, args, module=module, compat=compat or "", choices=choices, standing=standing)
    if standing:
        ship = launching.sent_away(choices, spec)
        launch = LaunchPlan("", coordinator=(), agent=(), spec=spec, ship=ship, token_file=place.token_file)
    else:
        launch = launching.render(launching.new_directory(place.home), choices, spec)
    launch = launching.with_script(launch)
    if launch.ship:
        from shoal.launch import project_upload

        packed, limit_mb = (
            {name: Path(one) for name, one in launch.packed.items()},
            float(choices.text("ship_limit_mb")),
        )
        frame.say(f"sends {project_upload.weigh(Path(launch.ship), limit_mb, packed, launch.token_file)}")
    if dry_run:
        frame.answer(launch, lambda: describe(launch, choices, place))
        return None
    return msgspec.structs.replace(launch, made=not place.url)


def _options(given: Mapping[str, str | None], evaluator: bool) -> dict[str, Option]:
    """The options that are settings, as a layer of them."""
    names = {name: "-n" if name == "members" else f"--{name.replace('_', '-')}" for name in given}
    options = options_of(**{name: (names[name], value) for name, value in given.items()})
    if evaluator or given.get("evaluator_on"):
        options["evaluator"] = ("--evaluator" if evaluator else "--evaluator-on", "true")
    return options


def _check_compat(choices: ResolvedSettings, compat: str | None) -> None:
    if compat and choices.text("emulate"):
        raise BadEmulation(
            f"--compat {compat} cannot emulate other machines",
            where=choices.source("emulate"),
            why="a script that does not use shoal.torch does not say when a step begins",
        )
    if compat and choices.text("sync") != "step":
        raise BadSync(
            f"--compat {compat} keeps members together in its own way",
            where=choices.source("sync"),
            why="a script that does not use shoal.torch exchanges its gradients by itself",
        )
    if compat and evaluating(choices):
        raise evaluator_unsupported(compat, choices.source("evaluator"))


def start(frame: OutputOptions, place: CoordinatorTarget, launch: LaunchPlan, *, detach: bool) -> None:
    """Start, submit and follow, here or in the background; ends the command with the run's exit code."""
    from shoal.cli import foreground

    context = click.get_current_context()
    if place.url:
        context.exit(foreground.submit(frame, place, launch, detach=detach))
    if detach:
        from shoal.cli import background

        context.exit(background.detach(frame, launch))
    context.exit(foreground.supervise(frame, launch))


def options_of(**given: tuple[str, str | None]) -> dict[str, Option]:
    """Those options that were given, as a layer of settings."""
    return {key: (option, value) for key, (option, value) in given.items() if value is not None}


def evaluating(choices: ResolvedSettings) -> bool:
    return bool(choices.found["evaluator"].value)


def _describe_pools(launch: LaunchPlan) -> list[str]:
    """What each pool would be asked for, as its engine would be."""
    from shoal.engines import pool_config
    from shoal.engines.engine import AllocationRequest, agent_options
    from shoal.pack.environments.recipe import SHOWN
    from shoal.wire.credentials import Credentials

    lines: list[str] = []
    if launch.hires is None:
        return lines
    coordinator = Path(launch.directory).name
    for name, table in launch.hires.pools.items():
        pool, engine = pool_config.parse(name, table)
        offered = f"up to {pool.limit} machines of {pool.slots} members"
        lines += [
            f"pool         {name}: {pool.engine}, {offered}" + (f", {pool.price_per_h:g}/h" if pool.price_per_h else "")
        ]
        made = SHOWN if engine.options.environment else None
        told = agent_options(launch.hires.agent, engine)
        ask = AllocationRequest(
            f"{name}-1", coordinator, launching.URL, Credentials("<token>"), pool.slots, told, environment=made
        )
        shown = engine.render(ask)
        lines += [f"             {shlex.join(shown.argv)}"]
        lines += [f"             | {line}" for line in shown.text.splitlines()]
    return lines


def describe(launch: LaunchPlan, choices: ResolvedSettings, place: CoordinatorTarget) -> str:
    """What would be started, for people."""
    spec = launch.spec
    lines = []
    if launch.directory:
        lines += [f"coordinator  {' '.join(launch.coordinator)}"]
        lines += [f"agent        {' '.join(launch.agent)}"] if launch.agent else []
        lines += [f"directory    {launch.directory}"]
        lines += _describe_pools(launch)
    else:
        lines += [f"coordinator  {place.url} (standing)"]
    if spec is not None:
        kind = "module" if spec.module else "script"
        low, high = spec.members
        beside = " and an evaluator" if evaluating(choices) else ""
        lines += [f"run          {spec.name}: {low} to {high} members{beside}", f"{kind}       {shlex.join(spec.argv)}"]
        lines += [f"{role:<13}on {', '.join(asked.on)}" for role, asked in spec.roles.items() if asked.on]
        lines += [f"in           {spec.cwd}"]
        lines += [f"compat       {spec.compat}"] if spec.compat else []
    changed = [one for one in choices.found.values() if one.source != "default"]
    lines += [f"setting      {one.key.name} = {one.value}  ({one.source})" for one in changed]
    return "\n".join(lines)
