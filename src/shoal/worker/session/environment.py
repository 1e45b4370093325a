"""What the agent told this member through its environment; environment variables are read only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from shoal.errors import BadSettings, IncompleteEnvironment
from shoal.settings import RunSettings, Value, parse_settings
from shoal.store.blob_store import CoordinatorAccess


@dataclass(frozen=True, slots=True)
class MemberEnvironment:
    """Who this member is, and where its coordinator is; `values` are the settings, checked and complete.

    `host` and `others` are the addresses at which its peers may reach it; `grace_s` is how long it may take to hand
    over once it is told to go, 0 if nobody has said so. `store` is where checkpoints go if this machine does not see
    the run's directory; `apart` is what stands here for the directory of who started the run, if this machine does not
    see that: what is saved there goes back.
    """

    url: str
    token_file: str
    run: str
    member: str
    incarnation: str
    host: str
    settings: dict[str, Value]
    values: RunSettings
    run_dir: str
    role: str = "trainer"
    speed: float = 0.0
    grace_s: float = 0.0
    others: tuple[str, ...] = ()
    store: str = ""
    apart: str = ""

    @property
    def access(self) -> CoordinatorAccess:
        return CoordinatorAccess(self.url, self.token_file)


def read(environ: Mapping[str, str]) -> MemberEnvironment | None:
    """This member's environment, or None if it was not started by an agent: then it is a run of one."""
    url = environ.get("SHOAL_URL")
    if not url:
        return None
    settings = _decode(environ.get("SHOAL_SETTINGS") or "{}")
    host, *others = _need(environ, "SHOAL_HOST").split(",")
    return MemberEnvironment(
        url=url,
        token_file=_need(environ, "SHOAL_TOKEN_FILE"),
        run=_need(environ, "SHOAL_RUN"),
        member=_need(environ, "SHOAL_MEMBER"),
        incarnation=_need(environ, "SHOAL_INCARNATION"),
        host=host,
        settings=settings,
        values=parse_settings(settings),
        run_dir=_need(environ, "SHOAL_RUN_DIR"),
        role=environ.get("SHOAL_ROLE") or "trainer",
        speed=_number(environ.get("SHOAL_SPEED", "")),
        grace_s=_number(environ.get("SHOAL_GRACE_S", "")),
        others=tuple(others),
        store=environ.get("SHOAL_STORE", ""),
        apart=environ.get("SHOAL_APART", ""),
    )


def _decode(text: str) -> dict[str, Value]:
    try:
        return msgspec.json.decode(text, type=dict[str, Value])
    except msgspec.DecodeError as error:
        raise BadSettings("SHOAL_SETTINGS is not a JSON object of plain values", why=str(error)) from error


def _number(text: str) -> float:
    """A guess that cannot be read is no guess."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 < value < float("inf") else 0.0


def _need(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise IncompleteEnvironment(
            f"{name} is not set",
            why="SHOAL_URL is, so this process should have been started by an agent",
            do="start it with shoal run, or unset SHOAL_URL to train alone",
        )
    return value
