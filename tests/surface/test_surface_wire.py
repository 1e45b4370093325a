"""Message types, the HTTP API's structs, and settings."""

import dataclasses
import typing
from collections.abc import Callable

import msgspec

from shoal import settings
from shoal.core import world
from shoal.wire import api
from shoal.wire import member_messages as messages


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
    return text.replace("typing.", "").replace("shoal.wire.member_messages.", "").replace("shoal.core.world.", "")


def test_message_types_are_frozen(frozen: Callable[[str, str], None]) -> None:
    lines = [f"protocol {messages.PROTOCOL}"]
    for name in ("FromMember", "ToMember", "FromAgent", "ToAgent"):
        lines.append(f"\n# {name}")
        for kind in sorted(typing.get_args(getattr(messages, name)), key=lambda kind: str(kind.__name__)):
            lines += described(kind)
    lines.append("\n# inside them")
    for kind in (messages.MachineInfo, world.Address, world.Seat, world.World):
        lines += described(kind)
    frozen("messages.txt", "\n".join(lines))


def test_the_http_api_is_frozen(frozen: Callable[[str, str], None]) -> None:
    kinds = [kind for kind in vars(api).values() if dataclasses.is_dataclass(kind) or is_struct(kind)]
    frozen("views.txt", "\n".join(line for kind in kinds for line in described(kind)))


def test_every_message_is_frozen_strict_and_tagged() -> None:
    for name in ("FromMember", "ToMember", "FromAgent", "ToAgent"):
        for kind in typing.get_args(getattr(messages, name)):
            facts = kind.__struct_config__
            assert facts.frozen, f"{kind.__name__} can be changed"
            assert facts.forbid_unknown_fields, f"{kind.__name__} takes unknown fields"
            assert facts.tag == kind.__name__.removesuffix("Msg")


def test_settings_are_frozen(frozen: Callable[[str, str], None]) -> None:
    frozen("settings.txt", "\n".join(f"{key.name}: {key.kind} = {key.default!r}" for key in settings.declared()))


def test_every_setting_says_what_it_means() -> None:
    assert [key.name for key in settings.declared() if not key.help] == []
