"""The launch plan: which processes a command would start, and what it would submit to them.

Planning has no effects but reading files; `supervisor.Supervisor` carries the plan out. See the package docstring for
the order of its steps.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from shoal.engines import pool_config
from shoal.errors import BadScript, HomeUnusable
from shoal.launch.coordinator_target import LOCAL
from shoal.launch.pool_selection import LOCAL_POOL, lacks_shared_disk, run_pools
from shoal.launch.settings_layers import ResolvedSettings
from shoal.pack.environments import recipe
from shoal.wire.api import RunSpec
from shoal.wire.pool_files import CoordinatorPools, read_pools

# Stands in the agent's arguments for the coordinator's URL, which is known only once it listens.
URL_PLACEHOLDER = "<url>"
LOOPBACK = "127.0.0.1"
ALL_INTERFACES = "::"
KERAS_PRELOAD = "numpy,keras,shoal.keras,shoal.keras.backends.{},websockets.sync.client,psutil"


class LaunchPlan(msgspec.Struct, frozen=True):
    """A coordinator and an agent to start, and the run to submit (`spec`) or to resume (`resume`, a run id).

    `agent` is empty if the coordinator allocates machines from `pools`. `directory` is the coordinator's; it is created
    first if `creates_directory`. `ship` is the project directory to upload, empty for none; `packed` are further files
    by their name at the destination. `token_file` is never uploaded, even if it lies in the project directory.
    """

    directory: str
    coordinator: tuple[str, ...]
    agent: tuple[str, ...]
    spec: RunSpec | None = None
    resume: str = ""
    members: tuple[int, int] | None = None
    budget: float | None = None
    creates_directory: bool = False
    pools: CoordinatorPools | None = None
    ship: str = ""
    packed: dict[str, str] = {}
    token_file: str = ""


def new_coordinator_directory(home: Path) -> Path:
    """Return a path for the next coordinator; the names sort by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return home / "coordinators" / f"{stamp}-{secrets.token_hex(2)}"


def plan_launch(directory: Path, settings: ResolvedSettings, spec: RunSpec | None, port: int = 0) -> LaunchPlan:
    """Return the plan for a coordinator of our own; without a `spec`, for one that resumes with its former pools."""
    python = (sys.executable, "-P", "-m")
    former = read_pools(directory) if spec is None else None
    pools = coordinator_pools(settings, run_pools(spec) if spec is not None else (), former)
    host = settings.text("host") or listen_host(table["engine"] for table in pools.pools.values())
    port = port or int(settings.text("port"))
    address = ("--address", settings.text("address")) if settings.text("address") else ()
    coordinator = (*python, "shoal.coordinator", "--dir", str(directory), "--host", host, "--port", str(port), *address)
    if pools.pools:
        return LaunchPlan(str(directory), coordinator, (), spec, pools=pools, ship=_directory_to_ship(settings, spec))
    token_file = str(directory / "token")
    agent = (*python, "shoal.agent", "--url", URL_PLACEHOLDER, "--token-file", token_file, "--name", LOCAL)
    preload = "" if settings.text("preload") or spec is None else _keras_preload(spec)
    options = ("--dir", str(directory), *agent_options(settings), *(("--preload", preload) if preload else ()))
    return LaunchPlan(str(directory), coordinator, (*agent, *options), spec)


def listen_host(engines: Iterable[str]) -> str:
    """Return loopback if all machines are this one; otherwise all interfaces, since any may be the reachable one."""
    return LOOPBACK if all(engine == "local" for engine in engines) else ALL_INTERFACES


def coordinator_pools(
    settings: ResolvedSettings, names: Collection[str] | None = None, former: CoordinatorPools | None = None
) -> CoordinatorPools:
    """Return the pools that a coordinator may use: the named and its former ones, or, without names, all configured."""
    former_tables = former.pools if former is not None else {}
    chosen = settings.pools if names is None else (*names, *former_tables)
    tables = {name: dict(settings.pools.get(name, former_tables.get(name, LOCAL_POOL))) for name in chosen}
    retired = set(former.retired if former is not None else ()) - settings.pools.keys()
    if tables and names is None:
        # A pool that is no longer configured stays, so that its allocations are used, watched and released.
        retired |= former_tables.keys() - tables.keys()
        tables |= {name: {**former_tables[name], "environment": ""} for name in former_tables if name in retired}
    base, where = settings.file.parent if settings.file is not None else Path.cwd(), str(settings.file or "")
    for name, table in tables.items():
        environment = table.get("environment", "" if table.get("engine") == LOCAL else settings.text("environment"))
        if environment:
            table["environment"] = recipe.resolve(str(environment), base, f"[pool.{name}] of {where}")
        pool_config.parse(name, table, where)
    options = (*agent_options(settings), "--orphan", settings.text("orphan_timeout_s"))
    return CoordinatorPools(tables, options, tuple(sorted(retired & tables.keys())))


def agent_options(settings: ResolvedSettings) -> tuple[str, ...]:
    """Return the options of an agent that come from settings."""
    options = {
        "--interface": settings.text("interface"),
        "--preload": settings.text("preload"),
        "--notice-source": settings.text("notice.source"),
        "--notice-url": settings.text("notice.url"),
        "--grace": settings.text("notice.grace_s"),
    }
    return tuple(part for option, value in options.items() if value for part in (option, value))


def _directory_to_ship(settings: ResolvedSettings, spec: RunSpec | None) -> str:
    """Return the directory to upload, empty if all machines of the run's pools see this disk."""
    if spec is None or (settings.text("ship") == "auto" and not lacks_shared_disk(settings, spec)):
        return ""
    return directory_for_standing(settings, spec)


def directory_for_standing(settings: ResolvedSettings, spec: RunSpec) -> str:
    """Return the directory to upload to a standing coordinator, whose machines may not see this disk; or empty."""
    if settings.text("ship") == "never" or (settings.text("ship") == "auto" and not run_pools(spec)):
        return ""
    script = spec.argv[0]
    if not spec.module and not (Path(spec.cwd) / script).resolve().is_relative_to(Path(spec.cwd).resolve()):
        raise BadScript(
            f"{script} is outside the directory that is sent to other machines",
            where=spec.cwd,
            do="start the run in the directory of your project",
        )
    return spec.cwd


def with_script(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with the script among the uploaded files, even if Git ignores it, and named relative to them."""
    spec = plan.spec
    if not plan.ship or spec is None or spec.module:
        return plan
    root, script = Path(plan.ship), Path(spec.argv[0])
    if script.is_absolute() or ".." in script.parts:
        script = (root / script).resolve().relative_to(root.resolve())
    argv = (str(script), *spec.argv[1:])
    packed = {**plan.packed, script.as_posix(): str(root / script)}
    return msgspec.structs.replace(plan, spec=replace(spec, argv=argv), packed=packed)


def _keras_preload(spec: RunSpec) -> str:
    """Return the modules that members of a Keras script should find imported; empty for the agent's default."""
    script = Path(spec.cwd) / spec.argv[0]
    try:
        text = "" if spec.module or spec.compat else script.read_text(errors="replace")
    except OSError:
        return ""
    # A script that chooses the backend itself must import Keras itself.
    if "shoal.keras" not in text or "KERAS_BACKEND" in text:
        return ""
    return KERAS_PRELOAD.format(spec.env.get("KERAS_BACKEND") or os.environ.get("KERAS_BACKEND", "tensorflow"))


def create_directory(directory: Path, *, exist_ok: bool = False) -> None:
    """Create a coordinator's or an agent's directory, accessible to its owner only."""
    try:
        directory.mkdir(parents=True, mode=0o700, exist_ok=exist_ok)
    except OSError as error:
        raise HomeUnusable(
            f"cannot create {directory}",
            why=error.strerror or str(error),
            do="set SHOAL_HOME to a directory that you can write",
        ) from error


def remove_directory(directory: Path) -> None:
    """Remove the directory of a coordinator that never had a run."""
    shutil.rmtree(directory, ignore_errors=True)
