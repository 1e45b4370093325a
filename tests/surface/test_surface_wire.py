"""Message types, the HTTP API's structs, and settings."""

import dataclasses
import re
import typing
from collections.abc import Callable

import msgspec

from shoal import settings
from shoal.core import world
from shoal.core.runs.spec import MachineInfo
from shoal.wire import api
from shoal.wire.agent_messages import FromAgent, ToAgent
from shoal.wire.member_messages import FromMember, ToMember
from shoal.wire.protocol import PROTOCOL

UNIONS = {"FromMember": FromMember, "ToMember": ToMember, "FromAgent": FromAgent, "ToAgent": ToAgent}
MODULES = ("typing.", "shoal.wire.member_messages.", "shoal.wire.agent_messages.", "shoal.core.world.")


def described(kind: type) -> list[str]:
    hints = typing.get_type_hints(kind)
    return [
        f"{kind.__name__}",
        *(f"    {name}: {show(hint)}" for name, hint in hints.items() if not name.startswith("__")),
    ]


def is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def show(hint: object) -> str:
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    for module in MODULES:
        text = text.replace(module, "")
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", text)


def test_message_types_are_frozen(frozen: Callable[[str, str], None]) -> None:
    lines = [f"protocol {PROTOCOL}"]
    for name, union in UNIONS.items():
        lines.append(f"\n# {name}")
        for kind in sorted(typing.get_args(union), key=lambda kind: str(kind.__name__)):
            lines += described(kind)
    lines.append("\n# inside them")
    for kind in (MachineInfo, world.Address, world.Seat, world.World):
        lines += described(kind)
    frozen("messages.txt", "\n".join(lines))


def test_http_api_is_frozen(frozen: Callable[[str, str], None]) -> None:
    kinds = [kind for kind in vars(api).values() if dataclasses.is_dataclass(kind) or is_struct(kind)]
    frozen("views.txt", "\n".join(line for kind in kinds for line in described(kind)))


def test_every_message_is_immutable_strict_and_tagged() -> None:
    for union in UNIONS.values():
        for kind in typing.get_args(union):
            config = kind.__struct_config__
            assert config.frozen, f"{kind.__name__} can be changed"
            assert config.forbid_unknown_fields, f"{kind.__name__} takes unknown fields"
            assert config.tag == kind.__name__.removesuffix("Msg")


def test_settings_are_frozen(frozen: Callable[[str, str], None]) -> None:
    frozen("settings.txt", "\n".join(f"{key.name}: {key.kind} = {key.default!r}" for key in settings.declared()))


def test_every_setting_has_a_help_text() -> None:
    assert [key.name for key in settings.declared() if not key.help] == []
