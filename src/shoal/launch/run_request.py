"""The run that a user asks for, as a checked `RunSpec`; nothing is started to check it.

All that can be checked on this machine is checked here, so that a typing error costs a second and leaves nothing
behind: the script, the member count, the settings, the pools, the environment. The coordinator checks again what it
must not trust a client with, and alone what only it knows, such as its pools, budgets and the user's rights.
"""

from __future__ import annotations

import importlib.machinery
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from shoal.core.runs import admission
from shoal.errors import BadBudget, BadCount, BadScript, UsageError
from shoal.launch import pool_selection
from shoal.launch.settings_layers import ResolvedSettings
from shoal.settings import parse_settings
from shoal.wire.api import RunSpec

# Variables that tell a member who it is; a user's value would break the run.
RESERVED_PREFIX = "SHOAL_"


def build_run_spec(
    script: str,
    arguments: tuple[str, ...],
    *,
    module: bool,
    compat: str,
    settings: ResolvedSettings,
    env: Iterable[str] = (),
    standing: bool = False,
) -> RunSpec:
    """Return the run of a script; raise if the script, its arguments or the settings are invalid.

    `env` holds assignments KEY=VALUE for the members. A standing coordinator checks the names of its pools itself.
    """
    cwd = Path.cwd()
    check_module(script, cwd) if module else check_script(script, cwd)
    _check_encodable(script, *arguments, str(cwd))
    default_name = admission.printable_name(script.rpartition(".")[2] if module else Path(script).stem)
    parse_settings(settings.for_run())
    admission.check_name(settings.text("name"), settings.source("name"))
    roles = pool_selection.roles_with_pools(settings, standing=standing)
    on = pool_selection.named_pools(settings) if standing else pool_selection.select_pools(settings, roles)
    return RunSpec(
        name=settings.text("name") or default_name,
        argv=(script, *arguments),
        cwd=str(cwd),
        members=parse_members(settings.text("members"), settings.source("members")),
        env=parse_env(env),
        module=module,
        settings=settings.for_run(),
        compat=compat,
        on=on,
        priority=int(settings.text("priority")),
        roles=roles,
        where=pool_selection.required_labels(settings),
        budget=budget_limit(settings),
    )


def parse_members(text: str, where: str = "") -> tuple[int, int]:
    """Return (MIN, MAX) from `N` or `MIN:MAX`."""
    low, colon, high = text.strip().partition(":")
    if not re.fullmatch(r"[0-9]{1,15}", low) or (colon and not re.fullmatch(r"[0-9]{1,15}", high)):
        raise BadCount(f"invalid member count {text!r}", where=where, do="write -n 4, or -n MIN:MAX such as -n 2:8")
    least, most = int(low), int(high) if colon else int(low)
    if least < 1:
        raise BadCount("a run needs at least one member", where=where, do="write -n 1, or -n 1:8")
    if most < least:
        do = f"write -n {most}:{least}" if most > 0 else "write -n MIN:MAX"
        raise BadCount(f"MIN is greater than MAX in {text}", where=where, do=do)
    admission.check_members(least, most, where)
    return least, most


def parse_env(assignments: Iterable[str]) -> dict[str, str]:
    """Return the variables of ``--env KEY=VALUE``; the last assignment of a key wins."""
    env = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"invalid assignment --env {assignment}", do="write --env KEY=VALUE")
        if name.startswith(RESERVED_PREFIX):
            raise UsageError(
                f"--env cannot set {name}",
                why=f"variables that begin with {RESERVED_PREFIX} are Shoal's own",
                do="use --set KEY=VALUE for a setting",
            )
        _check_encodable(value)
        env[name] = value
    return env


def budget_limit(settings: ResolvedSettings) -> float | None:
    """Return the spending limit of the run, None for no limit."""
    return float(settings.text("budget")) or None


def check_budget(amount: float | None, where: str = "") -> None:
    """Raise BadBudget for an amount that spending could never be compared with: zero, negative or not finite."""
    if amount is not None and not 0.0 < amount < math.inf:
        raise BadBudget(f"invalid budget {amount:g}", where=where, do="give a positive amount, such as --budget 12.50")


def check_script(script: str, cwd: Path) -> None:
    """Raise BadScript unless the script is a readable file, and valid Python if its name ends in .py."""
    path = cwd / script
    if not path.exists():
        near = _similar_script(path)
        raise BadScript(f"no such script: {script}", where=str(cwd), do=f"did you mean {near}?" if near else "")
    if not path.is_file():
        raise BadScript(f"{script} is not a file", where=str(cwd), do="name the script itself")
    if not os.access(path, os.R_OK):
        raise BadScript(f"cannot read {script}", where=str(cwd), why="permission denied", do=f"chmod u+r {script}")
    if path.suffix == ".py":
        _check_syntax(script, path)


def _check_syntax(script: str, path: Path) -> None:
    """Raise BadScript with the line and a caret if the script cannot be compiled."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").rstrip("\n").expandtabs(1)
        indent = len(line) - len(line.lstrip())
        caret = " " * (max(error.offset or 1, indent + 1) - indent - 1) + "^"
        raise BadScript(
            f"{script} is not valid Python: {error.msg}",
            where=f"{path}, line {error.lineno}",
            why=f"{line.strip()}\n{'':<9}{caret}" if line.strip() else "",
        ) from None
    except ValueError as error:
        raise BadScript(f"{script} is not valid Python: {error}", where=str(path)) from None


def check_module(module: str, cwd: Path) -> None:
    """Raise BadScript unless the outermost package of a module can be found."""
    # Looking for an inner module would import its package, and so run the user's code here.
    package = module.partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(package, [str(cwd), *sys.path]) is None:
        raise BadScript(f"no such module: {module}", where=str(cwd), do="check the name, or install it")


def _check_encodable(*words: str) -> None:
    """Raise BadScript for words that are not UTF-8: they travel as JSON, but a command line may hold any bytes."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise BadScript(f"cannot pass {word!r} to members", why="it is not UTF-8") from error


def _similar_script(path: Path) -> str:
    import difflib

    siblings = [sibling.name for sibling in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return near[0] if near else ""
