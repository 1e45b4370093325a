"""What a command would start: rendered first, started after."""

from __future__ import annotations

import importlib.machinery
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.core import sync_mode
from shoal.core.fleet import requirements as fleet_requirements
from shoal.core.membership.state import EVALUATOR, SERVER
from shoal.engines import pool_config
from shoal.errors import BadBudget, BadCount, BadPool, BadRole, BadScript, HomeUnusable
from shoal.launch import address
from shoal.launch.coordinator_target import LOCAL
from shoal.launch.settings_layers import ResolvedSettings
from shoal.pack.environments import recipe
from shoal.settings import parse_settings
from shoal.wire.api import RoleSpec, RunSpec
from shoal.wire.pool_files import CoordinatorPools, hiring_of

URL = "<url>"
LOCAL_POOL = {"engine": "local"}
ROLES_ON = {EVALUATOR: "evaluator_on", SERVER: "servers_on"}
OPTION_OF = {EVALUATOR: "--evaluator-on", SERVER: "--servers-on"}
KERAS_PRELOAD = "numpy,keras,shoal.keras,shoal.keras.backends.{},websockets.sync.client,psutil"


class LaunchPlan(msgspec.Struct, frozen=True):
    """A coordinator and an agent to start, and the run to submit to it, or to resume.

    There is no agent if it hires them. `ship` is the directory that is sent along, empty if none is, and `packed` what
    is sent besides, by where it belongs there; `token_file` stays here, should it be in that directory.
    """

    directory: str
    coordinator: tuple[str, ...]
    agent: tuple[str, ...]
    spec: RunSpec | None = None
    resume: str = ""
    members: tuple[int, int] | None = None
    budget: float | None = None
    made: bool = False
    hires: CoordinatorPools | None = None
    ship: str = ""
    packed: dict[str, str] = {}
    token_file: str = ""


def new_directory(home: Path) -> Path:
    """Where the next coordinator would live; its name sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return home / "coordinators" / f"{stamp}-{secrets.token_hex(2)}"


def render(directory: Path, choices: ResolvedSettings, spec: RunSpec | None, port: int = 0) -> LaunchPlan:
    """The processes of an embedded coordinator; `<url>` stands for what it will answer on."""
    python = (sys.executable, "-P", "-m")
    before = hiring_of(directory) if spec is None else None
    hires = hires_of(choices, pools_of(spec) if spec is not None else (), before)
    host = choices.text("host") or address.of_coordinator(table["engine"] for table in hires.pools.values())
    port = port or int(choices.text("port"))
    named = ("--address", choices.text("address")) if choices.text("address") else ()
    coordinator = (*python, "shoal.coordinator", "--dir", str(directory), "--host", host, "--port", str(port), *named)
    if hires.pools:
        return LaunchPlan(str(directory), coordinator, (), spec, hires=hires, ship=shipped(choices, spec))
    token_file = str(directory / "token")
    agent = (*python, "shoal.agent", "--url", URL, "--token-file", token_file, "--name", LOCAL)
    preload = "" if choices.text("preload") or spec is None else _preload(spec)
    options = ("--dir", str(directory), *agent_options(choices), *(("--preload", preload) if preload else ()))
    return LaunchPlan(str(directory), coordinator, (*agent, *options), spec)


def hires_of(
    choices: ResolvedSettings, names: Collection[str] | None = None, before: CoordinatorPools | None = None
) -> CoordinatorPools:
    """What a coordinator may hire: from these pools and those that it had, or from all that shoal.toml describes."""
    had = before.pools if before is not None else {}
    chosen = choices.pools if names is None else (*names, *had)
    tables = {name: dict(choices.pools.get(name, had.get(name, LOCAL_POOL))) for name in chosen}
    if tables and names is None:
        # What it had hired of the others is watched and given back; they are asked for nothing more.
        nothing = {"limit": 0, "environment": ""}
        tables |= {name: {**table, **nothing} for name, table in had.items() if name not in tables}
    base, where = choices.file.parent if choices.file is not None else Path.cwd(), str(choices.file or "")
    for name, table in tables.items():
        found = table.get("environment", "" if table.get("engine") == LOCAL else choices.text("environment"))
        if found:
            table["environment"] = recipe.resolved(str(found), base, f"[pool.{name}] of {where}")
        pool_config.parse(name, table, where)
    return CoordinatorPools(tables, (*agent_options(choices), "--orphan", choices.text("orphan_timeout_s")))


def named_pools(choices: ResolvedSettings, setting: str = "on") -> tuple[str, ...]:
    """The pools of ``--on``, or of another such setting."""
    return tuple(name.strip() for name in choices.text(setting).split(",") if name.strip())


def chosen_pools(choices: ResolvedSettings, roles: Mapping[str, RoleSpec]) -> tuple[str, ...]:
    """The pools of ``--on`` and ``--where``, checked; none for this machine as it is."""
    names, where = named_pools(choices), wanted_labels(choices)
    if names in ((), (LOCAL,)) and LOCAL not in choices.pools and not where:
        # Where some role goes elsewhere, those who stay are hired here.
        return (LOCAL,) if any(role.on for role in roles.values()) else ()
    return labelled(choices, checked_pools(choices), where)


def checked_pools(choices: ResolvedSettings, setting: str = "on") -> tuple[str, ...]:
    """The pools of a setting, if shoal.toml describes them all."""
    names = named_pools(choices, setting)
    for name in names:
        if name not in choices.pools and name != LOCAL:
            known = sorted({*choices.pools, LOCAL})
            raise BadPool(
                f"there is no pool {name!r}",
                where=choices.source(setting),
                do=f"describe it under [pool.{name}] in shoal.toml; there are: {', '.join(known)}",
            )
    if len(set(names)) < len(names):
        raise BadPool(f"a pool is named twice in {choices.text(setting)!r}", where=choices.source(setting))
    return names


def wanted_labels(choices: ResolvedSettings) -> dict[str, str]:
    """The labels of ``--where``."""
    return fleet_requirements.parse_where(choices.text("where"), choices.source("where"))


def labelled(choices: ResolvedSettings, names: tuple[str, ...], where: Mapping[str, str]) -> tuple[str, ...]:
    """Those of these pools, or of all that shoal.toml describes, whose machines carry labels."""
    tables = {name: choices.pools.get(name, LOCAL_POOL) for name in (*choices.pools, *names)}
    described = [pool_config.parse(name, table, str(choices.file or ""))[0] for name, table in tables.items()]
    return fleet_requirements.matching(described, names, where)


def roles_of(choices: ResolvedSettings, *, standing: bool = False) -> dict[str, RoleSpec]:
    """The roles that have pools of their own; a standing coordinator knows best which there are."""
    found = {}
    for role, setting in ROLES_ON.items():
        names = named_pools(choices, setting) if standing else checked_pools(choices, setting)
        has = (
            bool(choices.found["evaluator"].value)
            if role == EVALUATOR
            else sync_mode.parse(choices.text("sync")).served
        )
        if names and not has and choices.source(setting) == OPTION_OF[role]:
            raise BadRole(
                f"this run has no {role} to start on {', '.join(names)}",
                where=choices.source(setting),
                do="add --evaluator" if role == EVALUATOR else "add --sync stale:3, or another that has servers",
            )
        if names and has:
            found[role] = RoleSpec(on=names)
    return found


def pools_of(spec: RunSpec) -> tuple[str, ...]:
    """All pools that a run takes machines from, for whatever role."""
    return tuple(dict.fromkeys((*spec.on, *(name for role in spec.roles.values() for name in role.on))))


def budget_of(choices: ResolvedSettings) -> float | None:
    """What the run may spend, None for any amount."""
    return float(choices.text("budget")) or None


def shipped(choices: ResolvedSettings, spec: RunSpec | None) -> str:
    """The directory that is sent along, if some machine of the run's own pools does not see it."""
    if spec is None or (choices.text("ship") == "auto" and not is_apart(choices, spec)):
        return ""
    return sent_away(choices, spec)


def is_apart(choices: ResolvedSettings, spec: RunSpec) -> bool:
    """Whether some machine of the run's own pools does not see this disk."""
    taken = [pool_config.parse(name, choices.pools.get(name, LOCAL_POOL))[1] for name in pools_of(spec)]
    return not all(engine.shared for engine in taken)


def sent_away(choices: ResolvedSettings, spec: RunSpec) -> str:
    """The directory that is sent to whoever may not see it."""
    if choices.text("ship") == "never" or (choices.text("ship") == "auto" and not pools_of(spec)):
        return ""
    script = spec.argv[0]
    if not spec.module and not (Path(spec.cwd) / script).resolve().is_relative_to(Path(spec.cwd).resolve()):
        raise BadScript(
            f"{script} is not below the directory that is sent to other machines",
            where=spec.cwd,
            do="start the run in the directory of your project",
        )
    return spec.cwd


def with_script(launch: LaunchPlan) -> LaunchPlan:
    """A launch whose script is where machines that get the project look for it, also if Git ignores it."""
    spec = launch.spec
    if not launch.ship or spec is None or spec.module:
        return launch
    root, script = Path(launch.ship), Path(spec.argv[0])
    if script.is_absolute() or ".." in script.parts:
        script = (root / script).resolve().relative_to(root.resolve())
    argv = (str(script), *spec.argv[1:])
    packed = {**launch.packed, script.as_posix(): str(root / script)}
    return msgspec.structs.replace(launch, spec=replace(spec, argv=argv), packed=packed)


def _preload(spec: RunSpec) -> str:
    """What members are to find imported, if that is not what most scripts need."""
    script = Path(spec.cwd) / spec.argv[0]
    try:
        text = "" if spec.module or spec.compat else script.read_text(errors="replace")
    except OSError:
        return ""
    # A script that chooses the backend itself must import Keras itself.
    if "shoal.keras" not in text or "KERAS_BACKEND" in text:
        return ""
    return KERAS_PRELOAD.format(os.environ.get("KERAS_BACKEND", "tensorflow"))


def agent_options(choices: ResolvedSettings) -> tuple[str, ...]:
    """The options of an agent that come from settings."""
    given = {
        "--interface": choices.text("interface"),
        "--preload": choices.text("preload"),
        "--notice-source": choices.text("notice.source"),
        "--notice-url": choices.text("notice.url"),
        "--grace": choices.text("notice.grace_s"),
    }
    return tuple(part for option, value in given.items() if value for part in (option, value))


def spec_of(
    script: str,
    arguments: tuple[str, ...],
    *,
    module: bool,
    compat: str,
    choices: ResolvedSettings,
    standing: bool = False,
) -> RunSpec:
    """The run that is asked for, checked as far as it can be without starting it.

    A standing coordinator has pools of its own.
    """
    cwd = Path.cwd()
    check_module(script, cwd) if module else check_script(script, cwd)
    _check_words(script, *arguments, str(cwd))
    default_name = script.rpartition(".")[2] if module else Path(script).stem
    parse_settings(choices.for_run())
    roles = roles_of(choices, standing=standing)
    return RunSpec(
        name=choices.text("name") or default_name,
        argv=(script, *arguments),
        cwd=str(cwd),
        members=parse_members(choices.text("members"), choices.source("members")),
        module=module,
        settings=choices.for_run(),
        compat=compat,
        on=named_pools(choices) if standing else chosen_pools(choices, roles),
        priority=int(choices.text("priority")),
        roles=roles,
        where=wanted_labels(choices),
        budget=budget_of(choices),
    )


def parse_members(text: str, where: str = "") -> tuple[int, int]:
    """(MIN, MAX) from `N` or `MIN:MAX`."""
    low, colon, high = text.strip().partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise BadCount(f"{text!r} is no number of members", where=where, do="write -n 4, or -n MIN:MAX such as -n 2:8")
    found = (int(low), int(high) if colon else int(low))
    if found[0] < 1:
        raise BadCount("a run needs at least one member", where=where, do="write -n 1, or -n 1:8")
    if found[1] < found[0]:
        do = f"write -n {found[1]}:{found[0]}" if found[1] > 0 else "write -n MIN:MAX"
        raise BadCount(f"MIN is greater than MAX in {text}", where=where, do=do)
    return found


def check_budget(amount: float | None, where: str = "") -> None:
    """Refuse what is no amount of money: nothing could ever be counted against it."""
    if amount is not None and not 0.0 < amount < math.inf:
        raise BadBudget(f"{amount:g} is no budget", where=where, do="give an amount, such as --budget 12.50")


def check_script(script: str, cwd: Path) -> None:
    path = cwd / script
    if not path.exists():
        near = _near(path)
        raise BadScript(f"there is no script {script}", where=str(cwd), do=f"did you mean {near}?" if near else "")
    if not path.is_file():
        raise BadScript(f"{script} is not a file", where=str(cwd), do="name the script itself")
    if not os.access(path, os.R_OK):
        raise BadScript(f"{script} cannot be read", where=str(cwd), why="permission denied", do=f"chmod u+r {script}")


def _check_words(*words: str) -> None:
    """What is passed to members is text; on this command line, and as names of files, it may be any bytes."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise BadScript(f"{word!r} cannot be passed on to members", why="it is not UTF-8") from error


def check_module(module: str, cwd: Path) -> None:
    # Only the outermost package is looked for: finding an inner one would import, and so run, the user's code.
    first = module.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(first, [str(cwd), *sys.path]) is None:
        raise BadScript(f"there is no module {module}", where=str(cwd), do="check the name, or install it")


def make(directory: Path, *, exist_ok: bool = False) -> None:
    """Make a coordinator's or an agent's directory, for its owner only."""
    try:
        directory.mkdir(parents=True, mode=0o700, exist_ok=exist_ok)
    except OSError as error:
        raise HomeUnusable(
            f"{directory} cannot be made", why=error.strerror or str(error), do="set SHOAL_HOME to a directory of yours"
        ) from error


def unmake(directory: Path) -> None:
    """Take away the directory of a coordinator that never had a run."""
    shutil.rmtree(directory, ignore_errors=True)


def _near(path: Path) -> str:
    import difflib

    siblings = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return near[0] if near else ""
