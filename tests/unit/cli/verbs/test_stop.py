"""What `shoal stop` says about what is kept."""

from __future__ import annotations

from tests.unit.views import run_view

from shoal.cli.verbs import stop


def test_stop_without_any_checkpoint_says_that_resume_starts_over() -> None:
    shown = stop.text(run_view(status="stopped", step=80, checkpoint_step=None))
    assert "stopped at step 80, no checkpoint" in shown
    assert shown.endswith("shoal resume train-7f3k starts over at step 0: there is no checkpoint")


def test_stop_after_an_older_checkpoint_says_how_many_steps_are_repeated() -> None:
    shown = stop.text(run_view(status="stopped", step=80, checkpoint_step=60), " --url u --token-file t")
    assert "checkpoint of step 60" in shown
    assert shown.endswith("shoal resume train-7f3k --url u --token-file t continues at step 60 and repeats 20 steps")


def test_stop_with_a_checkpoint_repeats_nothing() -> None:
    shown = stop.text(run_view(status="stopped", step=80, checkpoint_step=80))
    assert shown.endswith("shoal resume train-7f3k continues at step 80")


def test_run_that_ended_by_itself_is_not_to_be_resumed() -> None:
    assert "resume" not in stop.text(run_view(status="done", step=80))
