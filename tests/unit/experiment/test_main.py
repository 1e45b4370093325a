"""The member main of `shoal.run`."""

from __future__ import annotations

import pytest

from shoal.errors import BadFiles, ExperimentFailed, IncompleteEnvironment
from shoal.experiment import __main__ as member_main


def test_main_outside_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_RUN", raising=False)
    with pytest.raises(IncompleteEnvironment, match="outside a run"):
        member_main.main("/nowhere")


class Contents:
    """The manifest of a pack whose function is `build`."""

    class function:  # noqa: N801 - the name of the field
        name = "build"


def test_exception_of_the_function_names_it_and_stays_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> object:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(member_main.function, "load", lambda pack, contents, remote: build)
    with pytest.raises(ExperimentFailed, match="build raised ZeroDivisionError: by zero") as error:
        member_main._call_experiment_fn(Contents, "/pack", apart=False)  # type: ignore[arg-type]
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_error_of_shoal_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> object:
        raise BadFiles("reserved")

    monkeypatch.setattr(member_main.function, "load", lambda pack, contents, remote: build)
    with pytest.raises(BadFiles):
        member_main._call_experiment_fn(Contents, "/pack", apart=False)  # type: ignore[arg-type]
