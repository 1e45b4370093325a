"""`shoal explain`: the meaning of an error code."""

from __future__ import annotations

import difflib
import inspect

import click

from shoal import errors
from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options


@click.command()
@click.argument("code", required=False, shell_complete=completions.error_codes)
@with_output_options
def command(output: OutputOptions, code: str | None) -> None:
    """Explain an error code.

    Without CODE, all codes are listed.
    """
    kinds = errors.catalog()
    if code is None:
        texts = {name: inspect.getdoc(kind) or "" for name, kind in kinds.items()}
        output.result(texts, lambda: "\n".join(f"{name}  {_first_paragraph(text)}" for name, text in texts.items()))
        return
    kind = kinds.get(code.upper())
    if kind is None:
        near = difflib.get_close_matches(code.upper(), kinds, n=1)
        raise errors.UnknownCode(
            f"unknown error code {code}", do=f"did you mean {near[0]}?" if near else "shoal explain lists all codes"
        )
    text = inspect.getdoc(kind) or ""
    facts = {"code": kind.code, "name": kind.__name__, "exit_code": kind.exit_code, "text": text}
    output.result(facts, lambda: f"{kind.code} {kind.__name__} (exit code {kind.exit_code})\n\n{text}")


def _first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0].replace("\n", " ")
