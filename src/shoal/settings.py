"""Settings of Shoal, each declared once: name, type, default and help.

`RunSettings` belong to a run and travel with it; `LaunchSettings` belong to the command that starts it. A setting's
name may be dotted (``checkpoint.every_s``): in shoal.toml the part before the dot is its table; settings without a dot
are in ``[run]``. The environment variable of a setting is its name in capitals (``SHOAL_CHECKPOINT_EVERY_S``).

To add a setting, declare it here, with its bounds in `Meta`; `--set`, shoal.toml, the environment, `shoal config`, the
reference page and the checks follow. A field `checkpoint_keep` is called ``checkpoint.keep`` because `TABLES` has
``checkpoint``: a new table goes there. Where a setting is read:

- a member reads `session.settings`, a `RunSettings`;
- a decision in `core` has values of its own (`MembershipSettings`, `RestartLimits`): add a field with the same default
  there, and its name in `core/runs/settings.py`;
- a setting of the launch is read in `launch/`; `agent_options` in `launch/launch_plan.py` hands it to agents.

May import: core grammars, errors.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from shoal.core import emulation, notice_source, sync_mode
from shoal.core.addresses import port_range as port_range
from shoal.core.batch import setting
from shoal.core.shares import settings as shares_settings
from shoal.errors import BadPlan, BadSettings, BadSize

Value = str | int | float | bool
TABLES = ("checkpoint", "restarts", "notice", "shares", "noise", "outer", "evaluate")
# The group of entry points in which plug-ins name their notice sources.
NOTICE_ENTRY_POINTS = "shoal.notice_sources"
PORTS = r"^([0-9]{1,5}-[0-9]{1,5})?$"
# Whatever a setting means, it is finite, and the journal can hold it; a duration is one that a timer can wait for.
MAX_SECONDS = 1e9
# What is repeated more often keeps the machine busy with nothing else.
MIN_INTERVAL_S = 0.01
MAX_NUMBER = 1 << 53
MAX_TEXT = 4096
# A member whose lease lasts for fewer heartbeats is lost whenever one of them is late.
MIN_HEARTBEATS_PER_LEASE = 2

Seconds = Annotated[float, Meta(le=MAX_SECONDS)]
Number = Annotated[float, Meta(le=MAX_NUMBER)]
Integer = Annotated[int, Meta(le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_LIMITS = tuple(meta for kind in (Seconds, Number, Text) for meta in get_args(kind)[1:])


def _dotted(field: str) -> str:
    table, _, rest = field.partition("_")
    return f"{table}.{rest}" if table in TABLES and rest else field


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_dotted):
    """Settings of a run, with their defaults."""

    lease_s: Annotated[Seconds, Meta(gt=0, description="silence after which a member counts as lost")] = 3.0
    heartbeat_s: Annotated[
        Seconds, Meta(ge=MIN_INTERVAL_S, description="interval at which a member renews its lease")
    ] = 0.5
    regroup_s: Annotated[Seconds, Meta(ge=0, description="time for members to report after their world broke")] = 0.5
    reconnect_s: Annotated[
        Seconds, Meta(ge=MIN_INTERVAL_S, description="interval between attempts to reach a lost coordinator")
    ] = 1.0
    hang_timeout_s: Annotated[Seconds, Meta(gt=0, description="duration after which a step counts as hung")] = 300.0
    orphan_timeout_s: Annotated[
        Seconds, Meta(gt=0, description="how long waiting members and pool machines look for a lost coordinator")
    ] = 1800.0
    connect_timeout_s: Annotated[
        Seconds, Meta(gt=0, description="time for the members of a world to connect to each other")
    ] = 5.0
    checkpoint_every_s: Annotated[Seconds, Meta(ge=0, description="seconds between checkpoints, 0 for never")] = 300.0
    checkpoint_every_steps: Annotated[Integer, Meta(ge=0, description="steps between checkpoints, 0 for never")] = 0
    checkpoint_keep: Annotated[Integer, Meta(ge=1, description="number of checkpoints to keep")] = 2
    checkpoint_to: Annotated[
        Text, Meta(description="path or fsspec URL of checkpoints, empty for the run's directory")
    ] = ""
    restarts_user: Annotated[Integer, Meta(ge=0, description="restarts of a member after errors in user code")] = 2
    restarts_infrastructure: Annotated[Integer, Meta(ge=0, description="restarts of a member after other failures")] = (
        10
    )
    backoff_s: Annotated[
        Seconds, Meta(ge=0, description="delay before the first restart of a member; doubles each time")
    ] = 0.2
    backoff_max_s: Annotated[Seconds, Meta(ge=0, description="longest delay before a restart")] = 30.0
    interface: Annotated[Text, Meta(description="network interface that members listen on, empty for automatic")] = ""
    ports: Annotated[Text, Meta(pattern=PORTS, description="port range for members, such as 29400-29499")] = ""
    batch: Annotated[Text, Meta(description="global batch size: N, auto or auto:MIN:MAX; empty for the script's")] = ""
    lr_scaling: Annotated[
        Literal["auto", "adascale", "sqrt", "off"],
        Meta(description="learning-rate scaling when the batch size changes"),
    ] = "auto"
    shares_policy: Annotated[Text, Meta(description="share policy: model, ratio, equal or fixed:3,1")] = "model"
    shares_threshold: Annotated[float, Meta(ge=0, lt=1, description="fraction of a step that new shares must save")] = (
        0.02
    )
    shares_window: Annotated[Integer, Meta(ge=1, description="steps to measure between changes of shares")] = 10
    shares_min: Annotated[
        Number, Meta(ge=0, description="least share, in samples; below 1, as a fraction of the batch")
    ] = 0.0
    shares_max: Annotated[
        Number, Meta(gt=0, description="largest share, in samples; up to 1, as a fraction of the batch")
    ] = 1.0
    shares_machines: Annotated[
        Text, Meta(description="facts about machines, such as: big speed=4 max=256, spot-* speed=1, local/0 share=3")
    ] = ""
    shares_mode: Annotated[Literal["continuous", "epoch", "once"], Meta(description="when shares may change")] = (
        "continuous"
    )
    noise_every_steps: Annotated[
        Integer, Meta(ge=0, description="steps between measurements of the gradient noise, 0 for never")
    ] = 10
    threads: Annotated[Integer, Meta(ge=0, description="CPU threads of a member, 0 to divide the machine's cores")] = 0
    exact: Annotated[Integer, Meta(ge=0, description="exact mode: number of shards of a batch, 0 for off")] = 0
    exchange: Annotated[
        Literal["auto", "ring", "gloo", "nccl"], Meta(description="backend of the gradient exchange")
    ] = "auto"
    on_divergence: Annotated[
        Literal["stop", "repair", "off"],
        Meta(
            description="when members hold different parameters: stop, let the minority copy the others', or no check"
        ),
    ] = "stop"
    sync: Annotated[Text, Meta(description="synchronisation mode: step, stale:K, async or local:H")] = "step"
    outer_lr: Annotated[Number, Meta(gt=0, description="with local:H, outer learning rate")] = 1.0
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="with local:H, outer Nesterov momentum")] = 0.0
    servers: Annotated[
        int, Meta(ge=1, le=256, description="number of parameter servers, with stale:K, async or --compat ps")
    ] = 2
    ticket_sizing: Annotated[
        Literal["time", "staleness", "equal"], Meta(description="sizing of batches with stale:K and async")
    ] = "time"
    evaluator: Annotated[bool, Meta(description="run an evaluator process that scores checkpoints")] = False
    evaluate_every_s: Annotated[
        Seconds, Meta(gt=0, description="with an evaluator, default seconds between checkpoints")
    ] = 30.0
    tensorboard: Annotated[bool, Meta(description="write TensorBoard event files to the run's directory")] = True
    emulate: Annotated[Text, Meta(description="relative speeds that members emulate, such as 1,0.5")] = ""
    visibility: Annotated[
        Literal["private", "shared"],
        Meta(description="whether other users of the coordinator may read logs and outputs"),
    ] = "private"
    start_timeout_s: Annotated[
        Seconds, Meta(gt=0, description="how long to retry failing pools before the run starts")
    ] = 600.0


class LaunchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_dotted):
    """Settings of the command that starts a run; they do not travel with it."""

    members: Annotated[Count | Text, Meta(description="number of members: N or MIN:MAX")] = 1
    name: Annotated[Text, Meta(description="name of the run, empty for the script's")] = ""
    on: Annotated[Text, Meta(description="pools to take machines from, in order, such as spot,lab")] = ""
    where: Annotated[Text, Meta(description="labels that machines must have, such as gpu=a100,zone=b")] = ""
    evaluator_on: Annotated[Text, Meta(description="pools for the evaluator, empty for those of the run")] = ""
    servers_on: Annotated[Text, Meta(description="pools for parameter servers, empty for those of the run")] = ""
    budget: Annotated[Number, Meta(ge=0, description="spending limit for machines, 0 for none")] = 0.0
    priority: Annotated[Integer, Meta(ge=-MAX_NUMBER, description="runs of higher priority get machines first")] = 0
    ship: Annotated[
        Literal["auto", "always", "never"], Meta(description="whether to send the project along with the run")
    ] = "auto"
    environment: Annotated[
        Text, Meta(description="environment for pool machines, such as requirements.txt, empty for none")
    ] = ""
    ship_limit_mb: Annotated[Number, Meta(gt=0, description="largest project to send, in MB")] = 256.0
    retain_days: Annotated[
        Number, Meta(ge=0, description="age in days at which shoal run removes ended runs, 0 for never")
    ] = 0.0
    host: Annotated[Text, Meta(description="address the coordinator listens on, empty for automatic, :: for all")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port the coordinator listens on, 0 for any")] = 0
    address: Annotated[
        Text, Meta(description="addresses of the coordinator for other machines to try first, comma-separated")
    ] = ""
    preload: Annotated[Text, Meta(description="modules to import before members start, such as torch,torchvision")] = ""
    notice_source: Annotated[
        Text, Meta(description="source of preemption notices: aws, gcp, azure, slurm or file:PATH")
    ] = ""
    notice_url: Annotated[Text, Meta(description="base URL of the notice source, empty for its default")] = ""
    notice_grace_s: Annotated[Seconds, Meta(ge=0, description="time to hand over after SIGTERM to the agent")] = 30.0


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


def notice_plug_ins() -> tuple[str, ...]:
    """Return the names of the notice sources that plug-ins on this machine add."""
    # Imported late, because it is slow and hardly ever needed.
    from importlib.metadata import entry_points

    return tuple(entry.name for entry in entry_points(group=NOTICE_ENTRY_POINTS))


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
    _check_lease(checked)
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
    except ValueError as error:  # a number of thousands of digits
        raise BadSettings("invalid value of a setting", where=where, why=str(error)) from error
    try:
        port_range(getattr(converted, "ports", ""))
    except ValueError as error:
        raise _invalid("ports", values["ports"], _hint_of(kind, "ports"), where) from error
    _check_meaning(converted, where)
    return converted


def _check_meaning(converted: Any, where: str) -> None:
    """Raise if a setting violates its own grammar, or if settings contradict each other."""
    if getattr(converted, "ports", "") and getattr(converted, "exchange", "") == "gloo":
        why = "Gloo listens on ports of its own choice"
        raise BadSettings("ports cannot be used with exchange=gloo", where=where, why=why, do="use exchange=ring")
    emulation.parse(getattr(converted, "emulate", ""), where)
    notice_source.check(getattr(converted, "notice_source", ""), notice_plug_ins, where)
    url = getattr(converted, "notice_url", "")
    if url and not url.startswith(("http://", "https://")):
        do = "write http://HOST:PORT, or leave it empty for the platform's own"
        raise BadSettings(f"invalid value for notice.url: {url!r:.200}", where=where, why="it is not a URL", do=do)
    sync_mode.parse(getattr(converted, "sync", "step"))
    bounds = {
        bound: getattr(converted, f"shares_{bound}") for bound in ("min", "max") if hasattr(converted, "shares_max")
    }
    try:
        setting.resolve_batch(getattr(converted, "batch", ""), 1, sys.maxsize)
        machines = getattr(converted, "shares_machines", "")
        shares_settings.parse(getattr(converted, "shares_policy", "equal"), **bounds, machines=machines)
    except (BadSize, BadPlan) as error:
        raise BadSettings(error.what, where=where, why=error.why, do=error.do) from error


def _check_lease(checked: RunSettings) -> None:
    """Raise if a member cannot send enough heartbeats within its lease."""
    lease_s, heartbeat_s = checked.lease_s, checked.heartbeat_s
    if heartbeat_s * MIN_HEARTBEATS_PER_LEASE > lease_s:
        most_s, least_s = lease_s / MIN_HEARTBEATS_PER_LEASE, heartbeat_s * MIN_HEARTBEATS_PER_LEASE
        raise BadSettings(
            f"lease_s={lease_s:g} is too short for heartbeat_s={heartbeat_s:g}",
            why=f"a member must be able to send {MIN_HEARTBEATS_PER_LEASE} heartbeats before it counts as lost",
            do=f"set heartbeat_s={most_s:g} or less, or lease_s={least_s:g} or more",
        )


def _invalid(name: str, value: object, hint: Any, where: str) -> BadSettings:
    """Return the error for an invalid value, with what is valid and, for a choice, the most similar one."""
    kind = get_args(hint)[0] if get_args(hint) else hint
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    near = difflib.get_close_matches(str(value), choices, n=1)
    do = f"did you mean {near[0]}?" if near else "shoal config lists all settings"
    what, why = f"invalid value for {name}: {value!r:.200}", f"expected {_expected(hint, value)}"
    return BadSettings(what, where=where, why=why, do=do)


def _hint_of(kind: Any, name: str) -> Any:
    """Return the annotated type of a setting."""
    for field in msgspec.structs.fields(kind):
        if field.encode_name == name:
            return get_type_hints(kind, include_extras=True)[field.name]
    return str


def _expected(hint: Any, value: object) -> str:
    """Return what a setting accepts, in words: "a number > 0", or "step, epoch or once".

    The limits that all settings have are named only if the value is beyond them.
    """
    kind, *metas = get_args(hint) or (hint,)
    if not _is_huge(value):
        metas = [meta for meta in metas if meta not in _LIMITS]
    if get_origin(kind) is Literal:
        *most, last = get_args(kind)
        return f"{', '.join(most)} or {last}"
    if any(meta.pattern == PORTS for meta in metas):
        return "a range of ports from 1 to 65535, such as 29400-29499"
    nouns = {float: "a number", int: "an integer", bool: "true or false", str: "text"}
    parts = get_args(kind) if get_origin(kind) is not None else (kind,)
    noun = " or ".join(nouns[get_args(part)[0] if get_args(part) else part] for part in parts)
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [
        f"{sign} {bound:g}"
        for meta in metas
        for name, sign in signs.items()
        if (bound := getattr(meta, name)) is not None
    ]
    bounds += [f"of at most {meta.max_length} characters" for meta in metas if meta.max_length]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _is_huge(value: object) -> bool:
    """Return whether a value is too large for any setting, or no number that one can wait for."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return True
    try:
        return not abs(float(value)) <= MAX_SECONDS  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return isinstance(value, int)


@cache
def _infos_of(kind: type[msgspec.Struct], *, travels: bool) -> tuple[SettingInfo, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        SettingInfo(
            name=field.encode_name,
            kind=_name_of(get_args(hints[field.name])[0]),
            default=field.default,
            help=get_args(hints[field.name])[-1].description or "",
            travels=travels,
        )
        for field in msgspec.structs.fields(kind)
    )


def _name_of(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    kinds = get_args(hint) or (hint,)
    return "|".join((get_args(kind) or (kind,))[0].__name__ for kind in kinds)
