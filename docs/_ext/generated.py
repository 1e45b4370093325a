"""Reference pages that are generated: commands, settings, error codes and the glossary."""

from __future__ import annotations

import inspect
import tomllib
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from sphinx.application import Sphinx

from shoal import errors
from shoal import settings as shoal_settings


def commands() -> str:
    """Return the page of every command with its options."""
    from shoal.cli.main import shoal

    lines = ["# Commands", "", "Generated from the commands; `shoal COMMAND --help` prints the same.", ""]
    lines += ["`--json`, `-q` and `-v` may also follow the verb.", ""]
    root = click.Context(shoal, info_name="shoal")
    lines += _command(shoal, root)
    for name in shoal.list_commands(root):
        command = shoal.get_command(root, name)
        if command is not None:
            lines += _command(command, click.Context(command, info_name=name, parent=root))
    return "\n".join(lines)


def _command(command: click.Command, context: click.Context) -> list[str]:
    usage = command.get_usage(context).removeprefix("Usage: ")
    text = inspect.cleandoc((command.help or "").replace("\b\n", "")).strip()
    lines = [f"## {context.command_path}", "", "```text", usage, "```", ""]
    lines += ["```text", text, "```", ""] if text else []
    records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    shared = set() if context.parent is None else {"--json", "-q, --quiet", "-v, --verbose"}
    records = [(left, right) for left, right in records if right and left not in shared]
    if records:
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| `{_cell(left)}` | {_cell(right)} |" for left, right in records]
    return [*lines, ""]


def settings() -> str:
    """Return the page of every setting in shoal/settings.py."""
    lines = [
        "# Settings",
        "",
        "Generated from `shoal/settings.py`. Set them with `--set NAME=VALUE`, in `shoal.toml`, or in",
        "`[tool.shoal]` of `pyproject.toml`; `shoal config` prints each value and its source. A name with a dot",
        "is a key of the table before the dot; the others belong to `[run]`.",
        "",
        "| setting | type | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for key in shoal_settings.declared():
        default = f"`{key.default!r}`" if key.default != "" else "empty"
        lines.append(f"| `{key.name}` | {_cell(key.kind)} | {default} | {_cell(key.help)} |")
    return "\n".join([*lines, ""])


def codes() -> str:
    """Return the page of every error code with the text of `shoal explain`."""
    lines = [
        "# Error codes",
        "",
        "Generated from `shoal/errors`; `shoal explain CODE` prints the same text. Every error says what went wrong,",
        "where, why, and what to do.",
        "",
        "```text",
        inspect.cleandoc(errors.__doc__ or "").split("::\n\n")[1].split("\n\n")[0],
        "```",
        "",
    ]
    for kind in sorted(_below(errors.ShoalError), key=lambda kind: kind.code):
        lines += [f"## {kind.code} {kind.__name__}", ""]
        lines += [inspect.getdoc(kind) or "", "", f"Exit code {kind.exit_code}.", ""]
    return "\n".join(lines)


def glossary() -> str:
    """Return the page of every word in docs/glossary.toml, with where it is in the source."""
    terms = tomllib.loads((Path(__file__).parents[1] / "glossary.toml").read_text())["term"]
    lines = ["# Glossary", "", "One word per idea, in the code, the messages, the command line and these pages.", ""]
    for group, members in groupby(terms, key=lambda term: term["group"]):
        lines += [f"## {group}", "", "| word | meaning | in the source |", "| --- | --- | --- |"]
        for term in members:
            code = f"`{term['code'].replace(':', '.')}`" if "code" in term else ""
            lines.append(f"| {term['word']} | {_cell(term['meaning'])} | {code} |")
        lines.append("")
    return "\n".join(lines)


def _below(kind: type[errors.ShoalError]) -> set[type[errors.ShoalError]]:
    children = {child for child in kind.__subclasses__() if child.__module__.startswith("shoal.errors.")}
    return children.union(*(_below(child) for child in children))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write(app: Sphinx) -> None:
    """Write the pages that changed before Sphinx reads its sources; builds stay incremental."""
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"commands": commands, "settings": settings, "errors": codes, "glossary": glossary}
    for name, make in pages.items():
        page, text = folder / f"{name}.md", make()
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the generator with Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
