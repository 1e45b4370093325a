"""Options that verbs share, and how errors are shown."""

from __future__ import annotations

import json
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.errors import UnknownRun
from shoal.launch.coordinator_target import CoordinatorTarget


def invoke(function: Callable[..., None], *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(click.command()(with_output_options(function)), arguments)
    return result.exit_code, result.stdout, result.stderr


# click collects the options of a command on its function, so each command needs a function of its own.
def showing() -> Callable[..., None]:
    def show(output: OutputOptions) -> None:
        output.note("on the way")
        output.result({"answer": 42}, lambda: "forty-two")

    return show


def failing() -> Callable[..., None]:
    def fail(output: OutputOptions) -> None:
        raise UnknownRun("unknown run x", do="shoal ps")

    return fail


@pytest.mark.parametrize(
    ("option", "printed"),
    [((), "on the way\nforty-two\n"), (("-q",), "forty-two\n"), (("--json",), '{\n  "answer": 42\n}\n')],
)
def test_result_is_text_or_json_and_notes_are_optional(option: tuple[str, ...], printed: str) -> None:
    assert invoke(showing(), *option)[1] == printed


def test_error_goes_to_standard_error_with_its_exit_code() -> None:
    code, out, err = invoke(failing())
    assert (code, out) == (UnknownRun.exit_code, "")
    assert "unknown run x" in err
    assert "Traceback" not in err
    assert "Traceback" in invoke(failing(), "-v")[2]
    assert json.loads(invoke(failing(), "--json")[2])["do"] == "shoal ps"


def test_target_comes_from_options_or_the_environment() -> None:
    targets = []

    def verb(output: OutputOptions, target: CoordinatorTarget) -> None:
        targets.append((target.url, target.token_file))

    command = click.command()(with_target_options(with_output_options(verb)))
    CliRunner().invoke(command, ["--url", "http://a:1"])
    CliRunner().invoke(command, env={"SHOAL_URL": "http://b:1", "SHOAL_TOKEN_FILE": "t"})
    assert targets == [("http://a:1", ""), ("http://b:1", "t")]
