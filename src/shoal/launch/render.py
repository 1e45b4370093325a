"""What a command would start: rendered first, started after."""

from __future__ import annotations

import importlib.machinery
import os
import secrets
import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from shoal.config import parse_settings
from shoal.engines import pools
from shoal.errors import BadCount, BadPool, BadScript, HomeUnusable
from shoal.launch import address
from shoal.launch.place import LOCAL
from shoal.launch.sources import Choices
from shoal.pack import environment
from shoal.wire.hires import Hires, hiring_of
from shoal.wire.views import RunSpec

URL = "<url>"
LOCAL_POOL = {"engine": "local"}
KERAS_PRELOAD = "numpy,keras,shoal.keras,shoal.keras.{},websockets.sync.client,psutil"


class Launch(msgspec.Struct, frozen=True):
    """A coordinator and an agent to start, and the run to submit to it, or to resume.

    There is no agent if it hires them. `ship` is the directory that is sent along, empty if none is.
    """

    directory: str
    coordinator: tuple[str, ...]
    agent: tuple[str, ...]
    spec: RunSpec | None = None
    resume: str = ""
    members: tuple[int, int] | None = None
    made: bool = False
    hires: Hires | None = None
    ship: str = ""


def new_directory(home: Path) -> Path:
    """Where the next coordinator would live; its name sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return home / "coordinators" / f"{stamp}-{secrets.token_hex(2)}"


def render(directory: Path, choices: Choices, spec: RunSpec | None, port: int = 0) -> Launch:
    """The processes of an embedded coordinator; `<url>` stands for what it will answer on."""
    python = (sys.executable, "-P", "-m")
    hires = hires_of(choices, chosen_pools(choices))
    host = choices.text("host") or address.of_coordinator(table["engine"] for table in hires.pools.values())
    coordinator = (*python, "shoal.coordinator", "--dir", str(directory), "--host", host, "--port", str(port))
    if hires.pools:
        return Launch(str(directory), coordinator, (), spec, hires=hires, ship=shipped(choices, spec))
    if (before := hiring_of(directory)) is not None:
        return Launch(str(directory), coordinator, (), spec, hires=before)
    token_file = str(directory / "token")
    agent = (*python, "shoal.agent", "--url", URL, "--token-file", token_file, "--name", LOCAL)
    preload = "" if choices.text("preload") or spec is None else _preload(spec)
    options = ("--dir", str(directory), *agent_options(choices), *(("--preload", preload) if preload else ()))
    return Launch(str(directory), coordinator, (*agent, *options), spec)


def hires_of(choices: Choices, names: Collection[str] | None = None) -> Hires:
    """What a coordinator may hire: from these pools, or from all that shoal.toml describes."""
    tables = {name: dict(choices.pools.get(name, LOCAL_POOL)) for name in (choices.pools if names is None else names)}
    base, where = choices.file.parent if choices.file is not None else Path.cwd(), str(choices.file or "")
    for name, table in tables.items():
        found = table.get("environment", "" if table.get("engine") == LOCAL else choices.text("environment"))
        if found:
            table["environment"] = environment.resolved(str(found), base, f"[pool.{name}] of {where}")
        pools.parse(name, table, where)
    return Hires(tables, (*agent_options(choices), "--orphan", choices.text("orphan_s")))


def named_pools(choices: Choices) -> tuple[str, ...]:
    """The pools of ``--on``."""
    return tuple(name.strip() for name in choices.text("on").split(",") if name.strip())


def chosen_pools(choices: Choices) -> tuple[str, ...]:
    """The pools of ``--on``, checked; none for this machine as it is."""
    names = named_pools(choices)
    if names in ((), (LOCAL,)) and LOCAL not in choices.pools:
        return ()
    for name in names:
        if name not in choices.pools and name != LOCAL:
            known = sorted({*choices.pools, LOCAL})
            raise BadPool(
                f"there is no pool {name!r}",
                where=choices.source("on"),
                do=f"describe it under [pool.{name}] in shoal.toml; there are: {', '.join(known)}",
            )
    if len(set(names)) < len(names):
        raise BadPool(f"a pool is named twice in {choices.text('on')!r}", where=choices.source("on"))
    return names


def shipped(choices: Choices, spec: RunSpec | None) -> str:
    """The directory that is sent along, if some machine of the run's own pools does not see it."""
    taken = [
        pools.parse(name, choices.pools.get(name, LOCAL_POOL))[1] for name in (spec.on if spec is not None else ())
    ]
    if spec is None or (choices.text("ship") == "auto" and all(engine.shared for engine in taken)):
        return ""
    return sent_away(choices, spec)


def sent_away(choices: Choices, spec: RunSpec) -> str:
    """The directory that is sent to whoever may not see it."""
    if choices.text("ship") == "never" or (choices.text("ship") == "auto" and not spec.on):
        return ""
    script = spec.argv[0]
    if not spec.module and not (Path(spec.cwd) / script).resolve().is_relative_to(Path(spec.cwd).resolve()):
        raise BadScript(
            f"{script} is not below the directory that is sent to other machines",
            where=spec.cwd,
            do="start the run in the directory of your project",
        )
    return spec.cwd


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


def agent_options(choices: Choices) -> tuple[str, ...]:
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
    script: str, arguments: tuple[str, ...], *, module: bool, compat: str, choices: Choices, standing: bool = False
) -> RunSpec:
    """The run that is asked for, checked as far as it can be without starting it.

    A standing coordinator has pools of its own.
    """
    cwd = Path.cwd()
    check_module(script, cwd) if module else check_script(script, cwd)
    default_name = script.rpartition(".")[2] if module else Path(script).stem
    parse_settings(choices.for_run())
    return RunSpec(
        name=choices.text("name") or default_name,
        argv=(script, *arguments),
        cwd=str(cwd),
        members=parse_members(choices.text("members"), choices.source("members")),
        module=module,
        settings=choices.for_run(),
        compat=compat,
        on=named_pools(choices) if standing else chosen_pools(choices),
        priority=int(choices.text("priority")),
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


def check_script(script: str, cwd: Path) -> None:
    path = cwd / script
    if not path.exists():
        near = _near(path)
        raise BadScript(f"there is no script {script}", where=str(cwd), do=f"did you mean {near}?" if near else "")
    if not path.is_file():
        raise BadScript(f"{script} is not a file", where=str(cwd), do="name the script itself")
    if not os.access(path, os.R_OK):
        raise BadScript(f"{script} cannot be read", where=str(cwd), why="permission denied", do=f"chmod u+r {script}")


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
