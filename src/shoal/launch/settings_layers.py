"""Settings in layers: default, file, environment, `--set` and options; each value knows where it came from.

A setting has one name everywhere. `checkpoint.every_s` is the entry `every_s` of `[checkpoint]` in shoal.toml, the
variable `SHOAL_CHECKPOINT_EVERY_S`, and `--set checkpoint.every_s=60`; settings without a dot are entries of `[run]`.
Layers are merged in the order above, and a later one wins. Each value is checked when its layer is read, so that an
error names the line, the variable or the option that the value came from.

Settings marked `travels` go with the run to the coordinator and the members; the others concern only this command.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import settings as shoal_settings
from shoal.errors import BadConfigFile, BadSettings, UsageError
from shoal.settings import SettingInfo, Value

Option = tuple[str, Value]
FILES = ("shoal.toml", "pyproject.toml")
POOL = "pool"
DEFAULT = "default"
PREFIX = "SHOAL_"
# Variables that Shoal reads or sets itself: for its users, for agents, and for members and what they start.
RESERVED_VARIABLES = re.compile(
    r"SHOAL_(AGENT_DIR|ALLOCATION|APART|COMPAT|COMPLETE|CPUS|FREEZE|GRACE_S|HOME|INCARNATION|MEMBER|MEMBER_HOSTS|"
    r"MEMBERS_MAX|MEMORY_BYTES|ROLE|RUN|RUN_DIR|SETTINGS|SPEED|STORE|TOKEN_FILE|URL)"
)
# Other variables are refused if they are this similar to that of a setting, and ignored if not.
SIMILAR = 0.8


@dataclass(frozen=True, slots=True)
class SettingValue:
    """The value of a setting and where it came from."""

    info: SettingInfo
    value: Value
    source: str


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """All settings by name, the file that was read, if any, and the pools that it describes."""

    values: Mapping[str, SettingValue]
    file: Path | None
    pools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return str(self.values[name].value)

    def source(self, name: str) -> str:
        return self.values[name].source

    def for_run(self) -> dict[str, Value]:
        """Return the settings that travel with a run."""
        return {name: setting.value for name, setting in self.values.items() if setting.info.travels}


def resolve(
    cwd: Path,
    environ: Mapping[str, str],
    assignments: Iterable[str] = (),
    options: Mapping[str, Option] = {},
) -> ResolvedSettings:
    """Merge the layers; later ones win. `options` maps a setting to the option's name and its value."""
    values = {info.name: SettingValue(info, info.default, DEFAULT) for info in shoal_settings.declared()}

    def put(name: str, value: object, source: str) -> None:
        checked = shoal_settings.parse_value(name, value, where=source)
        values[name] = SettingValue(values[name].info, checked, source)

    file = find_file(cwd)
    if file is not None:
        for name, value, source in read_file(file):
            put(name, value, source)
    check_variables(environ)
    for info in shoal_settings.declared():
        if info.variable in environ:
            put(info.name, environ[info.variable], f"environment {info.variable}")
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment} has no value", do="write --set KEY=VALUE")
        put(name.strip().removeprefix("run."), value.strip(), f"--set {assignment}")
    for name, (option, value) in options.items():
        put(name, value, option)
    return ResolvedSettings(values, file, read_pools(file) if file is not None else {})


def check_variables(environ: Iterable[str]) -> None:
    """Raise if an environment variable looks like a misspelt setting, such as SHOAL_LEASE for SHOAL_LEASE_S."""
    names = {info.variable.removeprefix(PREFIX) for info in shoal_settings.declared()}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in names or RESERVED_VARIABLES.fullmatch(variable):
            continue
        if near := difflib.get_close_matches(name, sorted(names), n=1, cutoff=SIMILAR):
            raise BadSettings(
                f"unknown environment variable {variable}",
                where=f"environment {variable}",
                why=f"no setting is called {name.lower()}",
                do=f"did you mean {PREFIX}{near[0]}? Otherwise unset {variable}",
            )


def find_file(cwd: Path) -> Path | None:
    """Return the nearest shoal.toml, or pyproject.toml with a [tool.shoal], in `cwd` or above it."""
    for directory in (cwd, *cwd.parents):
        for name in FILES:
            path = directory / name
            if path.is_file() and (name == "shoal.toml" or "shoal" in _load(path).get("tool", {})):
                return path
    return None


def read_file(path: Path) -> list[tuple[str, object, str]]:
    """Return each setting in the file as (name, value, "file:line")."""
    text, content = _text(path), _load(path)
    prefix = ""
    if path.name == "pyproject.toml":
        content, prefix = content["tool"]["shoal"], "tool.shoal."
    settings: list[tuple[str, object, str]] = []
    for table, entries in content.items():
        if table == POOL:
            continue
        if table not in ("run", *shoal_settings.TABLES) or not isinstance(entries, dict):
            where = f"{path}:{line_of(text, prefix + table, '')}"
            raise BadConfigFile(f"unknown table [{prefix}{table}]", where=where, do=_table_advice(table, prefix))
        for entry, value in entries.items():
            name = entry if table == "run" else f"{table}.{entry}"
            where = f"{path}:{line_of(text, prefix + table, entry)}"
            if isinstance(value, dict | list):
                raise BadSettings(f"{name} must not be a table or a list", where=where)
            settings.append((name, value, where))
    return settings


def _table_advice(table: str, prefix: str) -> str:
    tables = ("run", *shoal_settings.TABLES, "pool.NAME")
    if any(info.name == table for info in shoal_settings.declared()):
        return f"{table} belongs under [{prefix}run]"
    if near := difflib.get_close_matches(table, tables, n=1):
        return f"did you mean [{prefix}{near[0]}]?"
    return "the tables are " + ", ".join(f"[{prefix}{name}]" for name in tables)


def read_pools(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the tables ``[pool.NAME]`` of the file, unchecked."""
    content = _load(path)
    if path.name == "pyproject.toml":
        content = content["tool"]["shoal"]
    pools = content.get(POOL, {})
    wrong = next((name for name, table in pools.items() if not isinstance(table, dict)), None)
    if wrong is not None:
        raise BadConfigFile(f"pool.{wrong} is not a table", where=str(path), do=f"write [pool.{wrong}]")
    return dict(pools)


def line_of(text: str, table: str, entry: str) -> int:
    """Return the line that sets an entry of a table, else the line of the table, else 1; tomllib does not tell."""
    table_line, inside = 1, False
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
        if header:
            inside = header[1].replace('"', "").replace(" ", "") == table
            table_line = number if inside else table_line
            if inside and not entry:
                return number
        elif entry and inside and re.match(rf"\s*[\"']?{re.escape(entry)}[\"']?\s*=", line):
            return number
    return table_line


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfigFile(f"cannot read {path}", why=str(error)) from error


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else str(path)
        raise BadConfigFile("invalid TOML", where=where, why=str(error)) from error
