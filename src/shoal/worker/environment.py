"""What the agent told this member through its environment; environment variables are read only here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from shoal.errors import BadSettings, IncompleteEnvironment

Value = str | int | float | bool
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Delay = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a run, as `[run]` of shoal.toml and `--set` give them, with their defaults."""

    lease_s: Seconds = 3.0
    beat_s: Seconds = 0.5
    gather_s: Delay = 0.5
    reconnect_s: Seconds = 1.0
    stall_s: Seconds = 300.0
    connect_s: Seconds = 5.0
    checkpoint_every_s: Delay = msgspec.field(default=300.0, name="checkpoint.every_s")
    checkpoint_every_steps: Count = msgspec.field(default=0, name="checkpoint.every_steps")
    checkpoint_keep: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(default=2, name="checkpoint.keep")
    checkpoint_to: str = msgspec.field(default="", name="checkpoint.to")
    budget_user: Count = msgspec.field(default=2, name="budget.user")
    budget_infrastructure: Count = msgspec.field(default=10, name="budget.infrastructure")
    backoff_s: Delay = 0.2
    backoff_max_s: Delay = 30.0
    interface: str = ""
    ports: Annotated[str, msgspec.Meta(pattern=r"^(\d+-\d+)?$")] = ""
    threads: Count = 0
    exchange: Literal["auto", "ring", "gloo", "nccl"] = "auto"


@dataclass(frozen=True, slots=True)
class Environment:
    """Who this member is, and where its coordinator is; `values` are the settings, checked and complete."""

    url: str
    token_file: str
    run: str
    member: str
    incarnation: str
    host: str
    settings: dict[str, Value]
    values: Settings
    run_dir: str


def read(environ: Mapping[str, str]) -> Environment | None:
    """This member's environment, or None if it was not started by an agent: then it is a run of one."""
    url = environ.get("SHOAL_URL")
    if not url:
        return None
    settings = _decode(environ.get("SHOAL_SETTINGS") or "{}")
    return Environment(
        url=url,
        token_file=_need(environ, "SHOAL_TOKEN_FILE"),
        run=_need(environ, "SHOAL_RUN"),
        member=_need(environ, "SHOAL_MEMBER"),
        incarnation=_need(environ, "SHOAL_INCARNATION"),
        host=_need(environ, "SHOAL_HOST"),
        settings=settings,
        values=parse_settings(settings),
        run_dir=_need(environ, "SHOAL_RUN_DIR"),
    )


def parse_settings(settings: Mapping[str, Value]) -> Settings:
    """Check settings with dotted keys and fill in the defaults; text such as "5" is taken for a number."""
    known = [field.encode_name for field in msgspec.structs.fields(Settings)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            do = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
            raise BadSettings(f"there is no setting {key!r}", do=do)
    try:
        return msgspec.convert(dict(settings), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise BadSettings("a setting has a value that it cannot take", why=str(error), do="see shoal config") from error


def _decode(text: str) -> dict[str, Value]:
    try:
        return msgspec.json.decode(text, type=dict[str, Value])
    except msgspec.DecodeError as error:
        raise BadSettings("SHOAL_SETTINGS is not a JSON object of plain values", why=str(error)) from error


def _need(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise IncompleteEnvironment(
            f"{name} is not set",
            why="SHOAL_URL is, so this process should have been started by an agent",
            do="start it with shoal run, or unset SHOAL_URL to train alone",
        )
    return value
