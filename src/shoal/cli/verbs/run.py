"""`shoal run`: a training script on one or many members; and the options that every verb shares that starts a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from shoal.cli import completions
from shoal.cli.options import OutputOptions, show_error, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.core.fleet.launcher_env import evaluator_unsupported
from shoal.core.nouns import bounded, counted
from shoal.errors import BadEmulation, BadSync, ShoalError
from shoal.launch import launch_plan, run_request, settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.pool_selection import has_evaluator
from shoal.launch.settings_layers import Option, ResolvedSettings

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("-n", "--members", metavar="MIN:MAX", help="Number of members: N, or MIN:MAX.  [default: 1]"),
    click.option("--name", help="Name of the run.  [default: the script's name]"),
    click.option(
        "--on",
        metavar="POOLS",
        shell_complete=completions.pools,
        help="Pools of shoal.toml to take machines from, such as spot,lab.",
    ),
    click.option("--where", metavar="LABELS", help="Labels that the pools must have, such as gpu=a100,zone=b."),
    click.option(
        "--budget", metavar="AMOUNT", help="Spending limit; the run checkpoints and stops before it is exceeded."
    ),
    click.option("--priority", metavar="N", help="Priority for machines; higher goes first.  [default: 0]"),
    click.option(
        "--sync", metavar="MODE", help="Synchronisation mode: step, stale:K, async or local:H.  [default: step]"
    ),
    click.option(
        "--servers",
        metavar="N",
        help="Number of parameter servers, with --sync stale:K or async, or --compat ps.  [default: 2]",
    ),
    click.option(
        "--servers-on", metavar="POOLS", shell_complete=completions.pools, help="Pools for the parameter servers only."
    ),
    click.option("--evaluator", is_flag=True, help="Evaluate checkpoints during training, as run.evaluate defines."),
    click.option(
        "--evaluator-on",
        metavar="POOLS",
        shell_complete=completions.pools,
        help="Like --evaluator, on a machine of these pools.",
    ),
    click.option("-m", "--module", is_flag=True, help="Run SCRIPT as a module, like python -m."),
    click.option(
        "--compat",
        type=click.Choice(["torchrun", "tf", "ps"]),
        help="Run an unmodified script and restart it when members change: torchrun sets RANK, WORLD_SIZE and MASTER_*;"
        " tf sets TF_CONFIG with workers; ps sets TF_CONFIG with a chief, workers and --servers parameter servers.",
    ),
    click.option("--batch", metavar="SIZE", help="Global batch size: a number, or auto to adjust it while training."),
    click.option(
        "--emulate",
        metavar="SPEEDS",
        help="Slow members down to these relative speeds, such as 1,0.5,0.25; 0.5:0.125@300 changes at step 300.",
    ),
    click.option("--env", multiple=True, metavar="KEY=VALUE", help="Environment variable for the members; repeatable."),
    click.option(
        "--set",
        "assignments",
        multiple=True,
        shell_complete=completions.settings,
        metavar="KEY=VALUE",
        help="Change a setting; see shoal config.",
    ),
    click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing."),
)


def with_run_options(function: F) -> F:
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
@with_run_options
@click.option("--detach", is_flag=True, help="Return when the run is accepted and leave it running.")
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, detach: bool, **options: Any) -> None:
    """Run a training script; keep it running when members fail.

    Shoal's options come before SCRIPT; everything after it belongs to the script. Without --url, a coordinator and an
    agent are started for the run and end with it; with --url, the run is submitted to a standing coordinator. Ctrl-C
    stops the run after a checkpoint; a second one stops it at once.
    """
    plan = plan_from_options(output, target, **options)
    if plan is not None:
        if not target.url:
            _apply_retention(output, target, options["assignments"])
        start(output, target, plan, detach=detach)


def plan_from_options(
    output: OutputOptions,
    target: CoordinatorTarget,
    script: str,
    args: tuple[str, ...],
    evaluator: bool,
    module: bool,
    compat: str | None,
    env: tuple[str, ...],
    assignments: tuple[str, ...],
    dry_run: bool,
    **given: str | None,
) -> LaunchPlan | None:
    """Return the checked launch plan for the options of a run; with --dry-run print it and return None."""
    settings = settings_layers.resolve(Path.cwd(), os.environ, assignments, _settings_options(given, evaluator))
    _check_compat(settings, compat)
    standing = bool(target.url)
    spec = run_request.build_run_spec(
        script, args, module=module, compat=compat or "", settings=settings, env=env, standing=standing
    )
    if standing:
        ship = launch_plan.directory_for_standing(settings, spec)
        plan = LaunchPlan("", coordinator=(), agent=(), spec=spec, ship=ship, token_file=target.token_file)
    else:
        plan = launch_plan.plan_launch(launch_plan.new_coordinator_directory(target.home), settings, spec)
        plan = msgspec.structs.replace(plan, token_file=target.token_file)
    plan = launch_plan.with_script(plan)
    if plan.ship:
        from shoal.launch.project_upload import describe_upload

        packed = {name: Path(path) for name, path in plan.packed.items()}
        limit_mb = float(settings.text("ship_limit_mb"))
        output.note(f"sending {describe_upload(Path(plan.ship), limit_mb, packed, plan.token_file)}")
    if dry_run:
        output.result(plan, lambda: describe(plan, settings, target))
        return None
    return msgspec.structs.replace(plan, creates_directory=not standing)


def _settings_options(given: Mapping[str, str | None], evaluator: bool) -> dict[str, Option]:
    """Return the given options that are settings, as a layer of settings."""
    options: dict[str, Option] = {}
    for name, value in given.items():
        if value is not None:
            options[name] = ("-n" if name == "members" else f"--{name.replace('_', '-')}", value)
    if evaluator or given.get("evaluator_on"):
        options["evaluator"] = ("--evaluator" if evaluator else "--evaluator-on", "true")
    return options


def _check_compat(settings: ResolvedSettings, compat: str | None) -> None:
    if compat and settings.text("emulate"):
        raise BadEmulation(
            f"--emulate does not work with --compat {compat}",
            where=settings.source("emulate"),
            why="a script that does not use shoal.torch does not report when a step begins",
        )
    if compat and settings.text("sync") != "step":
        raise BadSync(
            f"--sync does not work with --compat {compat}",
            where=settings.source("sync"),
            why="a script that does not use shoal.torch exchanges its gradients by itself",
        )
    if compat and has_evaluator(settings):
        raise evaluator_unsupported(compat, settings.source("evaluator"))


def start(output: OutputOptions, target: CoordinatorTarget, plan: LaunchPlan, *, detach: bool) -> None:
    """Start or submit a run and follow it, or detach from it; end the command with the run's exit code."""
    from shoal.cli import foreground

    context = click.get_current_context()
    if target.url:
        context.exit(foreground.submit(output, target, plan, detach=detach))
    if detach:
        from shoal.cli import background

        context.exit(background.detach(output, plan))
    context.exit(foreground.supervise(output, plan))


def _apply_retention(output: OutputOptions, target: CoordinatorTarget, assignments: tuple[str, ...]) -> None:
    """Remove ended runs older than the setting `retain_days`; a failure is only shown."""
    days = float(settings_layers.resolve(Path.cwd(), os.environ, assignments).text("retain_days"))
    if not days:
        return
    from shoal.doctor import cleanup

    try:
        for old in cleanup.find_old(target.home, days * cleanup.DAY_S):
            cleanup.remove(Path(old.directory))
            size = table.size(old.size_bytes)
            output.note(f"removed {', '.join(old.runs) or old.directory}: older than {days:g} days, {size}")
    except ShoalError as error:
        show_error(error, output.json)


def describe(plan: LaunchPlan, settings: ResolvedSettings, target: CoordinatorTarget) -> str:
    """Return what a plan would start, as text."""
    spec = plan.spec
    lines = []
    if plan.directory:
        lines += [f"coordinator  {' '.join(plan.coordinator)}"]
        lines += [f"agent        {' '.join(plan.agent)}"] if plan.agent else []
        lines += [f"directory    {plan.directory}"]
        lines += _describe_pools(plan)
    else:
        lines += [f"coordinator  {target.url} (standing)"]
    if spec is not None:
        kind = "module" if spec.module else "script"
        low, high = spec.members
        evaluator = " and an evaluator" if has_evaluator(settings) else ""
        lines += [f"run          {spec.name}: {bounded(low, high, 'member')}{evaluator}"]
        lines += [f"{kind}       {shlex.join(spec.argv)}"]
        lines += [f"{name:<13}on {', '.join(role.on)}" for name, role in spec.roles.items() if role.on]
        lines += [f"in           {spec.cwd}"]
        lines += [f"compat       {spec.compat}"] if spec.compat else []
        lines += [f"env          {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    changed = [setting for setting in settings.values.values() if setting.source != settings_layers.DEFAULT]
    lines += [f"setting      {setting.info.name} = {setting.value}  ({setting.source})" for setting in changed]
    return "\n".join(lines)


def _describe_pools(plan: LaunchPlan) -> list[str]:
    """Return the request that each pool's engine would get, without secrets."""
    from shoal.engines import pool_config
    from shoal.engines.engine import AllocationRequest, agent_options
    from shoal.pack.environments.recipe import PLACEHOLDER
    from shoal.wire.credentials import Credentials

    lines: list[str] = []
    if plan.pools is None:
        return lines
    coordinator = Path(plan.directory).name
    for name, pool_table in plan.pools.pools.items():
        pool, engine = pool_config.parse(name, pool_table)
        price = f", {pool.price_per_h:g}/h" if pool.price_per_h else ""
        machines, members = counted(pool.limit, "machine"), counted(pool.slots, "member")
        lines += [f"pool         {name}: {pool.engine}, up to {machines} of {members}{price}"]
        environment = PLACEHOLDER if engine.options.environment else None
        request = AllocationRequest(
            f"{name}-1",
            coordinator,
            launch_plan.URL_PLACEHOLDER,
            Credentials("<token>"),
            pool.slots,
            agent_options(plan.pools.agent, engine),
            environment=environment,
        )
        rendered = engine.render(request)
        lines += [f"             {shlex.join(rendered.argv)}"]
        lines += [f"             | {line}" for line in rendered.text.splitlines()]
    return lines
