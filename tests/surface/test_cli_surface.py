"""The command line: verbs, options, exit codes, and the cost of `--help`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from shoal.cli.main import VERBS, shoal
from shoal.cli.main import run as run_line
from shoal.cli.output.summary import EXIT_CODES

HEAVY = ("torch", "numpy", "starlette", "uvicorn", "websockets", "rich", "psutil", "cryptography", "sqlite3", "asyncio")
# Loaded modules stand for the time of a start: seconds would depend on what else the machine does.
HELP_MODULES = 220


def options_of(command: click.Command) -> list[str]:
    """Return arguments and options, one per line, as a user types them."""
    lines = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            value = "" if parameter.is_flag or parameter.count else f" {parameter.make_metavar(click.Context(command))}"
            lines.append(f"  {', '.join((*parameter.opts, *parameter.secondary_opts))}{value}")
        else:
            lines.append(f"  {parameter.make_metavar(click.Context(command))}")
    return lines


def test_verbs_and_options_are_frozen(frozen: Callable[[str, str], None]) -> None:
    lines = ["shoal", *options_of(shoal)]
    for verb in VERBS:
        command = shoal.get_command(click.Context(shoal), verb)
        assert command is not None
        lines += [f"shoal {verb}", *options_of(command)]
    frozen("cli.txt", "\n".join(lines))


def test_exit_code_of_each_final_status_is_frozen(frozen: Callable[[str, str], None]) -> None:
    frozen("exit_codes.txt", "\n".join(f"{status}: {code}" for status, code in EXIT_CODES.items()))


@pytest.mark.parametrize("verb", VERBS)
def test_summary_of_a_verb_is_the_first_line_of_its_help(verb: str) -> None:
    command = shoal.get_command(click.Context(shoal), verb)
    assert command is not None
    assert (command.help or "").partition("\n")[0] == VERBS[verb]
    assert {"--json", "--quiet", "--verbose"} <= {name for parameter in command.params for name in parameter.opts}


def test_error_codes_are_unique() -> None:
    from shoal import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ShoalError)]
    codes = [kind.code for kind in kinds]
    assert sorted(codes) == sorted(set(codes))


def measured(*arguments: str) -> tuple[str, int, set[str]]:
    """Return what a command prints, how many modules it loads, and the heavy ones among them."""
    script = (
        "import sys, json\n"
        "from shoal.cli.main import run\n"
        f"code = run({list(arguments)!r})\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(json.dumps([code, len(sys.modules), loaded]), file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    code, count, loaded = json.loads(ran.stderr.splitlines()[-1])
    assert code == 0
    return ran.stdout, count, set(loaded)


def test_help_is_cheap_and_loads_nothing_heavy() -> None:
    text, count, loaded = measured("--help")
    assert not loaded
    assert count < HELP_MODULES
    assert all(verb in text for verb in VERBS)


@pytest.mark.parametrize("arguments", [("run", "--help"), ("config",), ("explain", "S201"), ("why", "--help")])
def test_verbs_that_need_nothing_heavy_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    _, _, loaded = measured(*arguments)
    assert not loaded


def test_ps_needs_no_framework_and_no_server(tmp_path: object) -> None:
    os.environ["SHOAL_HOME"] = str(tmp_path)
    try:
        _, _, loaded = measured("ps", "--json")
    finally:
        del os.environ["SHOAL_HOME"]
    assert not loaded & {"torch", "starlette", "uvicorn", "rich"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["rnu"], 2),
        (["run"], 2),
        (["run", "missing.py"], 2),
        (["run", "-n", "0", __file__], 2),
        (["run", "-n", "3:2", __file__], 2),
        (["run", "-n", "many", __file__], 2),
        (["run", "--set", "leas_s=1", __file__], 3),
        (["run", "--set", "lease_s=soon", __file__], 3),
        (["run", "--compat", "horovod", __file__], 2),
        (["run", "-m", "missing.inner.module"], 2),
        (["status", "missing"], 2),
        (["stop", "missing"], 2),
        (["resume", "missing"], 2),
        (["scale", "missing", "2:1"], 2),
        (["explain", "S999"], 2),
        (["status", "--url", "http://127.0.0.1:9"], 2),
        (["status", "--url", "nonsense", "--token-file", __file__], 2),
        (["config"], 0),
        (["explain"], 0),
        (["ps"], 0),
        (["nodes"], 0),
        (["completion", "bash"], 0),
    ],
)
def test_command_ends_with_its_exit_code_and_creates_nothing(
    arguments: list[str],
    code: int,
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SHOAL_HOME", f"{tmp_path}/home")
    assert run_line(arguments) == code
    errors = capsys.readouterr().err
    assert ("error[S" in errors) == (code != 0)
    assert not os.path.exists(f"{tmp_path}/home")


def test_errors_are_json_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["explain", "--json", "S999"]) == 2
    assert json.loads(capsys.readouterr().err)["code"] == "S115"
