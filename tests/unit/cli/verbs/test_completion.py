"""Shell completion."""

from __future__ import annotations

import pytest

from shoal.cli.main import run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_code_that_asks_shoal_for_completions(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert f"_SHOAL_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_without_a_shell_it_says_which_line_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion"]) == 0
    assert 'eval "$(shoal completion bash)"' in capsys.readouterr().out


def test_unknown_shell_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'tcsh'" in capsys.readouterr().err
