"""Settings of Shoal, each declared once: name, type, default and help.

`RunSettings` belong to a run and travel with it; `LaunchSettings` belong to the command that starts it. A setting's
name may be dotted (``checkpoint.every_s``): in shoal.toml the part before the dot is its table; settings without a dot
are in ``[run]``. The environment variable of a setting is its name in capitals (``SHOAL_CHECKPOINT_EVERY_S``).
To add a setting, declare it here; the command line, shoal.toml, the documentation and the checks follow.

May import: core grammars, errors.
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
    """Settings of a run, with their defaults."""

    lease_s: Annotated[float, Meta(gt=0, description="silence after which a member counts as lost")] = 3.0
    heartbeat_s: Annotated[float, Meta(gt=0, description="interval at which a member renews its lease")] = 0.5
    regroup_s: Annotated[float, Meta(ge=0, description="time for members to report after their world broke")] = 0.5
    reconnect_s: Annotated[float, Meta(gt=0, description="interval between attempts to reach a lost coordinator")] = 1.0
    hang_timeout_s: Annotated[float, Meta(gt=0, description="duration after which a step counts as hung")] = 300.0
    connect_timeout_s: Annotated[
        float, Meta(gt=0, description="time for the members of a world to connect to each other")
    ] = 5.0
    checkpoint_every_s: Annotated[float, Meta(ge=0, description="seconds between checkpoints, 0 for never")] = 300.0
    checkpoint_every_steps: Annotated[int, Meta(ge=0, description="steps between checkpoints, 0 for never")] = 0
    checkpoint_keep: Annotated[int, Meta(ge=1, description="number of checkpoints to keep")] = 2
    checkpoint_to: Annotated[
        str, Meta(description="path or fsspec URL of checkpoints, empty for the run's directory")
    ] = ""
    restarts_user: Annotated[int, Meta(ge=0, description="restarts of a member after errors in user code")] = 2
    restarts_infrastructure: Annotated[int, Meta(ge=0, description="restarts of a member after other failures")] = 10
    backoff_s: Annotated[
        float, Meta(ge=0, description="delay before the first restart of a member; doubles each time")
    ] = 0.2
    backoff_max_s: Annotated[float, Meta(ge=0, description="longest delay before a restart")] = 30.0
    interface: Annotated[str, Meta(description="network interface that members listen on, empty for automatic")] = ""
    ports: Annotated[str, Meta(pattern=PORTS, description="port range for members, such as 29400-29499")] = ""
    batch: Annotated[str, Meta(description="global batch size: N, auto or auto:MIN:MAX; empty for the script's")] = ""
    lr_scaling: Annotated[
        Literal["auto", "adascale", "sqrt", "off"],
        Meta(description="learning-rate scaling when the batch size changes"),
    ] = "auto"
    shares_policy: Annotated[str, Meta(description="share policy: model, ratio, equal or fixed:3,1")] = "model"
    shares_threshold: Annotated[float, Meta(ge=0, lt=1, description="fraction of a step that new shares must save")] = (
        0.02
    )
    shares_window: Annotated[int, Meta(ge=1, description="steps to measure between changes of shares")] = 10
    shares_min: Annotated[
        float, Meta(ge=0, description="least share, in samples; below 1, as a fraction of the batch")
    ] = 0.0
    shares_max: Annotated[
        float, Meta(gt=0, description="largest share, in samples; up to 1, as a fraction of the batch")
    ] = 1.0
    shares_mode: Annotated[Literal["continuous", "epoch", "once"], Meta(description="when shares may change")] = (
        "continuous"
    )
    noise_every_steps: Annotated[
        int, Meta(ge=0, description="steps between measurements of the gradient noise, 0 for never")
    ] = 10
    threads: Annotated[int, Meta(ge=0, description="CPU threads of a member, 0 to divide the machine's cores")] = 0
    exact: Annotated[int, Meta(ge=0, description="exact mode: number of shards of a batch, 0 for off")] = 0
    exchange: Annotated[
        Literal["auto", "ring", "gloo", "nccl"], Meta(description="backend of the gradient exchange")
    ] = "auto"
    sync: Annotated[str, Meta(description="synchronisation mode: step, stale:K, async or local:H")] = "step"
    outer_lr: Annotated[float, Meta(gt=0, description="with local:H, outer learning rate")] = 1.0
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="with local:H, outer Nesterov momentum")] = 0.0
    servers: Annotated[
        int, Meta(ge=1, description="number of parameter servers, with stale:K, async or --compat ps")
    ] = 2
    ticket_sizing: Annotated[
        Literal["time", "staleness", "equal"], Meta(description="sizing of batches with stale:K and async")
    ] = "time"
    evaluator: Annotated[bool, Meta(description="run an evaluator process that scores checkpoints")] = False
    evaluate_every_s: Annotated[
        float, Meta(gt=0, description="with an evaluator, default seconds between checkpoints")
    ] = 30.0
    tensorboard: Annotated[bool, Meta(description="write TensorBoard event files to the run's directory")] = True
    emulate: Annotated[str, Meta(description="relative speeds that members emulate, such as 1,0.5")] = ""
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="how long to retry failing pools before the run starts")
    ] = 600.0


class LaunchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_dotted):
    """Settings of the command that starts a run; they do not travel with it."""

    members: Annotated[int | str, Meta(description="number of members: N or MIN:MAX")] = 1
    name: Annotated[str, Meta(description="name of the run, empty for the script's")] = ""
    on: Annotated[str, Meta(description="pools to take machines from, in order, such as spot,lab")] = ""
    where: Annotated[str, Meta(description="labels that machines must have, such as gpu=a100,zone=b")] = ""
    evaluator_on: Annotated[str, Meta(description="pools for the evaluator, empty for those of the run")] = ""
    servers_on: Annotated[str, Meta(description="pools for parameter servers, empty for those of the run")] = ""
    budget: Annotated[float, Meta(ge=0, description="spending limit for machines, 0 for none")] = 0.0
    priority: Annotated[int, Meta(description="runs of higher priority get machines first")] = 0
    ship: Annotated[
        Literal["auto", "always", "never"], Meta(description="whether to send the project along with the run")
    ] = "auto"
    environment: Annotated[
        str, Meta(description="environment for pool machines, such as requirements.txt, empty for none")
    ] = ""
    ship_limit_mb: Annotated[float, Meta(gt=0, description="largest project to send, in MB")] = 256.0
    retain_days: Annotated[
        float, Meta(ge=0, description="age in days at which shoal run removes ended runs, 0 for never")
    ] = 0.0
    orphan_timeout_s: Annotated[float, Meta(gt=0, description="how long pool machines look for a lost coordinator")] = (
        1800.0
    )
    host: Annotated[str, Meta(description="address the coordinator listens on, empty for automatic, :: for all")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port the coordinator listens on, 0 for any")] = 0
    address: Annotated[
        str, Meta(description="addresses of the coordinator for other machines to try first, comma-separated")
    ] = ""
    preload: Annotated[str, Meta(description="modules to import before members start, such as torch,torchvision")] = ""
    notice_source: Annotated[
        str, Meta(description="source of preemption notices: aws, gcp, azure, slurm or file:PATH")
    ] = ""
    notice_url: Annotated[str, Meta(description="base URL of the notice source, empty for its default")] = ""
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
        """The table of shoal.toml that holds it."""
        return self.name.partition(".")[0] if "." in self.name else "run"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "SHOAL_" + self.name.replace(".", "_").upper()


def declared() -> tuple[SettingInfo, ...]:
    """Return all settings, those of the command first."""
    return (*_infos_of(LaunchSettings, travels=False), *_infos_of(RunSettings, travels=True))


def parse_settings(settings: Mapping[str, Value]) -> RunSettings:
    """Check settings with dotted names and fill in the defaults; text such as "5" is taken for a number."""
    names = [info.name for info in _infos_of(RunSettings, travels=True)]
    for name in settings:
        if name not in names:
            raise unknown(name, names)
    checked: RunSettings = _convert(settings, RunSettings)
    return checked


def parse_value(name: str, value: object, where: str = "") -> Value:
    """Check the value of one setting and return it converted; `where` is named in the error."""
    fields = {
        field.encode_name: kind for kind in (LaunchSettings, RunSettings) for field in msgspec.structs.fields(kind)
    }
    if name not in fields:
        raise unknown(name, list(fields), where)
    checked = _convert({name: value}, fields[name], where)
    converted: Value = msgspec.to_builtins(checked)[name]
    return converted


def unknown(name: str, names: list[str], where: str = "") -> BadSettings:
    """Return the error for an unknown setting, with the most similar name."""
    near = difflib.get_close_matches(name, names, n=1)
    do = f"did you mean {near[0]}?" if near else "shoal config lists all settings"
    return BadSettings(f"unknown setting {name!r}", where=where, do=do)


def _convert(values: Mapping[str, Any], kind: Any, where: str = "") -> Any:
    try:
        converted = msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        path = str(error).partition(" - at ")[2]
        name = path.strip("`$.").strip("[]'\"")
        raise _invalid(name, values.get(name), _hint_of(kind, name), where) from error
    span = port_range(getattr(converted, "ports", ""))
    if span is not None and (len(span) == 0 or span.start < 1 or span.stop > 65536):
        raise _invalid("ports", values["ports"], _hint_of(kind, "ports"), where)
    _check_meaning(converted, where)
    return converted


def _check_meaning(converted: Any, where: str) -> None:
    """Raise if a setting violates its own grammar, or if settings contradict each other."""
    if getattr(converted, "ports", "") and getattr(converted, "exchange", "") == "gloo":
        why = "Gloo listens on ports of its own choice"
        raise BadSettings("ports cannot be used with exchange=gloo", where=where, why=why, do="use exchange=ring")
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


def _invalid(name: str, value: object, hint: Any, where: str) -> BadSettings:
    """Return the error for an invalid value, with what is valid and, for a choice, the most similar one."""
    kind = get_args(hint)[0] if get_args(hint) else hint
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    near = difflib.get_close_matches(str(value), choices, n=1)
    do = f"did you mean {near[0]}?" if near else "shoal config lists all settings"
    return BadSettings(f"invalid value for {name}: {value!r}", where=where, why=f"expected {_expected(hint)}", do=do)


def _hint_of(kind: Any, name: str) -> Any:
    """Return the annotated type of a setting."""
    for field in msgspec.structs.fields(kind):
        if field.encode_name == name:
            return get_type_hints(kind, include_extras=True)[field.name]
    return str


def _expected(hint: Any) -> str:
    """Return what a setting accepts, in words: "a number > 0", or "step, epoch or once"."""
    kind, *metas = get_args(hint) or (hint,)
    if get_origin(kind) is Literal:
        *most, last = get_args(kind)
        return f"{', '.join(most)} or {last}"
    if any(meta.pattern == PORTS for meta in metas):
        return "a range of ports from 1 to 65535, such as 29400-29499"
    nouns = {float: "a number", int: "an integer", bool: "true or false", str: "text"}
    noun = " or ".join(nouns[part] for part in (get_args(kind) or (kind,)))
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {bound:g}"
        for meta in metas
        for name, sign in signs.items()
        if (bound := getattr(meta, name)) is not None
    ]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _infos_of(kind: type[msgspec.Struct], *, travels: bool) -> tuple[SettingInfo, ...]:
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
    return "|".join(kind.__name__ for kind in get_args(hint) or (hint,))
