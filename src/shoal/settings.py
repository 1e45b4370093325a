"""Every setting of Shoal, declared once: its name, type, default and meaning.

`Settings` are those of a run, which travel with it; `Launching` are those of the command that starts it. A setting's
name is dotted (``checkpoint.every_s``); in shoal.toml the part before the dot is its table, and ``[run]`` holds the
rest.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from shoal.core import emulation, sync_mode
from shoal.core.addresses import port_range as port_range
from shoal.core.batch import setting
from shoal.core.shares import settings as shares_settings
from shoal.errors import BadPlan, BadSettings, BadSize

Value = str | int | float | bool
TABLES = ("checkpoint", "restarts", "notice", "shares", "noise", "outer", "evaluate")
PORTS = r"^(\d+-\d+)?$"


def _dotted(field: str) -> str:
    table, _, rest = field.partition("_")
    return f"{table}.{rest}" if table in TABLES and rest else field


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_dotted):
    """The settings of a run, as shoal.toml and `--set` give them, with their defaults."""

    lease_s: Annotated[float, Meta(gt=0, description="silence after which the others go on without a member")] = 3.0
    heartbeat_s: Annotated[float, Meta(gt=0, description="how often a member renews its lease")] = 0.5
    regroup_s: Annotated[float, Meta(ge=0, description="how long a broken world waits for its members to answer")] = 0.5
    reconnect_s: Annotated[float, Meta(gt=0, description="how often a lost coordinator is tried again")] = 1.0
    hang_timeout_s: Annotated[float, Meta(gt=0, description="one step longer than this is reported as a hang")] = 300.0
    connect_timeout_s: Annotated[
        float, Meta(gt=0, description="time that members of a world have to reach each other")
    ] = 5.0
    checkpoint_every_s: Annotated[float, Meta(ge=0, description="seconds between checkpoints, 0 for never")] = 300.0
    checkpoint_every_steps: Annotated[int, Meta(ge=0, description="steps between checkpoints, 0 for never")] = 0
    checkpoint_keep: Annotated[int, Meta(ge=1, description="how many checkpoints are kept")] = 2
    checkpoint_to: Annotated[str, Meta(description="path or fsspec URL of checkpoints, empty for the run's own")] = ""
    restarts_user: Annotated[int, Meta(ge=0, description="restarts of a member after errors of the user's code")] = 2
    restarts_infrastructure: Annotated[int, Meta(ge=0, description="restarts of a member after any other crash")] = 10
    backoff_s: Annotated[float, Meta(ge=0, description="wait before the first restart of a member; it doubles")] = 0.2
    backoff_max_s: Annotated[float, Meta(ge=0, description="longest wait before a restart")] = 30.0
    interface: Annotated[str, Meta(description="network interface that members listen on, empty to choose")] = ""
    ports: Annotated[str, Meta(pattern=PORTS, description="port range of members, such as 29400-29499")] = ""
    batch: Annotated[str, Meta(description="global batch: a number, auto or auto:32:1024; empty for the script's")] = ""
    lr_scaling: Annotated[
        Literal["auto", "adascale", "sqrt", "off"], Meta(description="how the learning rate follows the batch")
    ] = "auto"
    shares_policy: Annotated[str, Meta(description="who gets how much: model, ratio, equal or fixed:3,1")] = "model"
    shares_threshold: Annotated[float, Meta(ge=0, lt=1, description="part of a step that new shares must save")] = 0.02
    shares_window: Annotated[int, Meta(ge=1, description="steps that are measured between changes of shares")] = 10
    shares_min: Annotated[float, Meta(ge=0, description="least share, in samples, or below 1 a part of all")] = 0.0
    shares_max: Annotated[float, Meta(gt=0, description="largest share, in samples, or up to 1 a part of all")] = 1.0
    shares_mode: Annotated[Literal["continuous", "epoch", "once"], Meta(description="when shares may change")] = (
        "continuous"
    )
    noise_every_steps: Annotated[
        int, Meta(ge=0, description="steps between looks at the gradient noise, 0 for never")
    ] = 10
    threads: Annotated[int, Meta(ge=0, description="CPU threads of a member, 0 to divide the machine's cores")] = 0
    exact: Annotated[int, Meta(ge=0, description="shards of a batch, if no bit may depend on members, 0 for off")] = 0
    exchange: Annotated[Literal["auto", "ring", "gloo", "nccl"], Meta(description="how gradients travel")] = "auto"
    sync: Annotated[str, Meta(description="how members keep together: step, stale:K, async or local:H")] = "step"
    outer_lr: Annotated[float, Meta(gt=0, description="with local:H, how far to go towards the members' mean")] = 1.0
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="with local:H, Nesterov momentum of rounds")] = 0.0
    servers: Annotated[
        int, Meta(ge=1, description="how many hold the parameters, with stale:K, async or --compat ps")
    ] = 2
    ticket_sizing: Annotated[
        Literal["time", "staleness", "equal"], Meta(description="what balances the batches of stale:K and async")
    ] = "time"
    evaluator: Annotated[bool, Meta(description="whether a process beside the training scores its checkpoints")] = False
    evaluate_every_s: Annotated[
        float, Meta(gt=0, description="with an evaluator, seconds between checkpoints if nothing else says")
    ] = 30.0
    tensorboard: Annotated[bool, Meta(description="write event files for TensorBoard into the run's directory")] = True
    emulate: Annotated[str, Meta(description="speeds of the machines that members behave like, such as 1,0.5")] = ""
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="how long a run that has not begun asks pools that only fail")
    ] = 600.0


class LaunchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_dotted):
    """The settings of the command that starts a run; they do not travel with it."""

    members: Annotated[int | str, Meta(description="how many members: N, or MIN:MAX")] = 1
    name: Annotated[str, Meta(description="name of the run, empty for the script's")] = ""
    on: Annotated[str, Meta(description="pools to take machines from, in this order, such as spot,lab")] = ""
    where: Annotated[str, Meta(description="labels that machines must carry, such as gpu=a100,zone=b")] = ""
    evaluator_on: Annotated[str, Meta(description="pools for the evaluator alone, empty for where the others are")] = ""
    servers_on: Annotated[str, Meta(description="pools for servers alone, empty for where the others are")] = ""
    budget: Annotated[float, Meta(ge=0, description="what machines may cost in all, 0 for any amount")] = 0.0
    priority: Annotated[int, Meta(description="runs of higher priority get machines first")] = 0
    ship: Annotated[
        Literal["auto", "always", "never"], Meta(description="whether the project is sent along with the run")
    ] = "auto"
    environment: Annotated[
        str, Meta(description="what machines of pools install or unpack, as requirements.txt, empty for nothing")
    ] = ""
    ship_limit_mb: Annotated[float, Meta(gt=0, description="the largest project that is sent")] = 256.0
    orphan_timeout_s: Annotated[
        float, Meta(gt=0, description="how long hired machines look for a lost coordinator")
    ] = 1800.0
    host: Annotated[str, Meta(description="address the coordinator listens on, empty to choose, :: for all")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port the coordinator listens on, 0 for any")] = 0
    address: Annotated[
        str, Meta(description="addresses of the coordinator that machines elsewhere try first, with commas")
    ] = ""
    preload: Annotated[str, Meta(description="modules that members find imported, such as torch,torchvision")] = ""
    notice_source: Annotated[str, Meta(description="who warns of preemption: aws, gcp, azure, slurm or file:PATH")] = ""
    notice_url: Annotated[str, Meta(description="base URL of that source, empty for its usual one")] = ""
    notice_grace_s: Annotated[float, Meta(ge=0, description="time to hand over after SIGTERM to the agent")] = 30.0


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as `shoal config` and the documentation show it."""

    name: str
    kind: str
    default: Value
    help: str
    travels: bool

    @property
    def table(self) -> str:
        return self.name.partition(".")[0] if "." in self.name else "run"

    @property
    def variable(self) -> str:
        return "SHOAL_" + self.name.replace(".", "_").upper()


def declared() -> tuple[SettingInfo, ...]:
    """All settings, those of the command first."""
    return (*_keys_of(LaunchSettings, travels=False), *_keys_of(RunSettings, travels=True))


def parse_settings(settings: Mapping[str, Value]) -> RunSettings:
    """Check settings with dotted keys and fill in the defaults; text such as "5" is taken for a number."""
    known = [key.name for key in _keys_of(RunSettings, travels=True)]
    for name in settings:
        if name not in known:
            raise unknown(name, known)
    checked: RunSettings = _convert(settings, RunSettings)
    return checked


def parse_value(name: str, value: object, where: str = "") -> Value:
    """Check one setting by itself; `where` is named in the error."""
    fields = {
        field.encode_name: kind for kind in (LaunchSettings, RunSettings) for field in msgspec.structs.fields(kind)
    }
    if name not in fields:
        raise unknown(name, list(fields), where)
    checked = _convert({name: value}, fields[name], where)
    found: Value = msgspec.to_builtins(checked)[name]
    return found


def unknown(name: str, known: list[str], where: str = "") -> BadSettings:
    """The error for a setting that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, known, n=1)
    do = f"did you mean {near[0]}?" if near else "shoal config prints all settings"
    return BadSettings(f"there is no setting {name!r}", where=where, do=do)


def _convert(values: Mapping[str, Any], kind: Any, where: str = "") -> Any:
    try:
        converted = msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        name = path.strip("`$.").strip("[]'\"") or "a setting"
        shown = f"{name} cannot be {values[name]!r}" if name in values else f"{name} has a value that it cannot take"
        raise BadSettings(shown, where=where, why=why, do="shoal config prints all settings") from error
    sync_mode.parse(getattr(converted, "sync", "step"))
    ports = getattr(converted, "ports", "")
    span = port_range(ports)
    if span is not None and (len(span) == 0 or span.start < 1 or span.stop > 65536):
        raise BadSettings(f"ports cannot be {ports!r}", where=where, why="it is no range of ports from 1 to 65535")
    _check_meaning(converted, where)
    return converted


def _check_meaning(converted: Any, where: str) -> None:
    """Settings that have a grammar of their own, and those that must fit together."""
    if getattr(converted, "ports", "") and getattr(converted, "exchange", "") == "gloo":
        why = "Gloo listens on ports of its own choice"
        raise BadSettings("ports cannot be kept with exchange=gloo", where=where, why=why, do="use exchange=ring")
    emulation.parse(getattr(converted, "emulate", ""), where)
    sync_mode.parse(getattr(converted, "sync", "step"))
    bounds = {
        bound: getattr(converted, f"shares_{bound}") for bound in ("min", "max") if hasattr(converted, "shares_max")
    }
    try:
        setting.resolve_batch(getattr(converted, "batch", ""), 1, sys.maxsize)
        shares_settings.parse(getattr(converted, "shares_policy", "equal"), **bounds)
    except (BadSize, BadPlan) as error:
        raise BadSettings(error.what, where=where, why=error.why, do=error.do) from error


def _keys_of(kind: type[msgspec.Struct], *, travels: bool) -> tuple[SettingInfo, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        SettingInfo(
            name=field.encode_name,
            kind=_name_of(get_args(hints[field.name])[0]),
            default=field.default,
            help=get_args(hints[field.name])[1].description or "",
            travels=travels,
        )
        for field in msgspec.structs.fields(kind)
    )


def _name_of(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return "|".join(one.__name__ for one in get_args(hint) or (hint,))
