"""Progress of a script that was started by hand."""

from __future__ import annotations

from shoal.worker.session.standalone import PROGRESS_EVERY_S, Progress, StandaloneSession


def test_progress_is_printed_every_few_seconds_and_at_the_end() -> None:
    lines: list[str] = []
    now = 0.0
    session = StandaloneSession(Progress(lines.append, lambda: now))
    session.status = lambda: {"epoch": 9, "total_steps": 160, "loss": 0.93821}
    for _ in range(160):
        session.commit()
        now += PROGRESS_EVERY_S / 128
    session.finish(lambda _exchange: None)
    session.leave_loop()
    assert lines == ["step 129/160  epoch 9  loss 0.9382", "step 160/160  epoch 9  loss 0.9382"]


def test_progress_without_a_known_end_or_loss_is_the_step_and_epoch() -> None:
    lines: list[str] = []
    session = StandaloneSession(Progress(lines.append, lambda: 0.0))
    session.commit()
    session.leave_loop()
    assert lines == ["step 1  epoch 0"]


def test_session_prints_nothing_unless_it_is_to_show_progress(capsys) -> None:
    session = StandaloneSession()
    session.commit()
    session.finish(lambda _exchange: None)
    assert capsys.readouterr() == ("", "")
