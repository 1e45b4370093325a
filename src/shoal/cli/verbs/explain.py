"""`shoal explain`: what an error code means."""

from __future__ import annotations

import difflib
import inspect

import click

from shoal import errors
from shoal.cli.options import OutputOptions, with_frame


@click.command()
@click.argument("code", required=False)
@with_frame
def command(frame: OutputOptions, code: str | None) -> None:
    """Explain an error code.

    Without CODE, all are listed.
    """
    known = errors.catalog()
    if code is None:
        facts = {one: inspect.getdoc(kind) or "" for one, kind in known.items()}
        frame.answer(facts, lambda: "\n".join(f"{one}  {_first_sentence(text)}" for one, text in facts.items()))
        return
    kind = known.get(code.upper())
    if kind is None:
        near = difflib.get_close_matches(code.upper(), known, n=1)
        raise errors.UnknownCode(
            f"there is no error {code}", do=f"did you mean {near[0]}?" if near else "shoal explain lists all"
        )
    text = inspect.getdoc(kind) or ""
    fact = {"code": kind.code, "name": kind.__name__, "exit_code": kind.exit_code, "text": text}
    frame.answer(fact, lambda: f"{kind.code} {kind.__name__} (exit code {kind.exit_code})\n\n{text}")


def _first_sentence(text: str) -> str:
    return text.partition("\n\n")[0].replace("\n", " ")
