"""What a script can ask of its run, whatever its framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.worker.base_run import BaseRun
from shoal.worker.session import output_upload
from shoal.worker.session.standalone import StandaloneSession


class FakeSession(StandaloneSession):
    """A session that grants only the claims in `grants` and remembers those that were completed."""

    def __init__(self, *grants: str) -> None:
        super().__init__()
        self._grants, self.asked, self.completed, self.closed = grants, list[str](), list[str](), False

    def claim(self, name: str) -> bool:
        self.asked.append(name)
        return name in self._grants

    def complete_claim(self, name: str) -> None:
        self.completed.append(name)

    def close(self) -> None:
        self.closed = True


class Run(BaseRun):
    @property
    def share(self) -> int:
        return 8


def run_of(session: StandaloneSession) -> Run:
    codec: Any = None
    return Run(session, "alone", "", codec)


@pytest.fixture(autouse=True)
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    monkeypatch.setattr(output_upload, "upload_output", lambda _environment, path: sent.append(path))
    return sent


def test_run_shows_where_its_member_is() -> None:
    session = FakeSession()
    run = run_of(session)
    session.step = 7
    assert (run.step, run.rank, run.size, run.member) == (7, 0, 1, "alone")
    assert run.world == (session.world.number if session.world is not None else None)
    session.step = session.world = None
    assert (run.step, run.world) == (0, 0)


def test_only_the_member_with_the_claim_writes(tmp_path: Path, uploads: list[str]) -> None:
    path = str(tmp_path / "deep" / "model.pt")
    session = FakeSession(path)
    run = run_of(session)
    run._save_once(path, lambda: Path(path).touch(), looping=False)
    assert Path(path).exists(), "its folder is made"
    assert (session.completed, uploads) == ([path], [path])
    run_of(FakeSession())._save_once(path, lambda: pytest.fail("another member has written it"), looping=False)


def test_file_saved_in_a_loop_is_claimed_again_at_every_step(tmp_path: Path) -> None:
    session = FakeSession()
    run, path = run_of(session), str(tmp_path / "m")
    for step in (1, 2):
        session.step = step
        run._save_once(path, lambda: None, looping=True)
    assert session.asked == [f"{path} at step 1", f"{path} at step 2"]


def test_claim_is_not_completed_if_writing_fails(tmp_path: Path, uploads: list[str]) -> None:
    path = str(tmp_path / "m")
    session = FakeSession(path)

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_of(session)._save_once(path, fail, looping=False)
    assert (session.completed, uploads) == ([], [])


def test_state_of_the_script_is_a_part_of_the_state() -> None:
    run = run_of(FakeSession())
    loaded: list[int] = []
    run.state("counter", lambda: 5, loaded.append)
    part: Any = run._training_state.parts["user:counter"]
    assert part.state_dict() == 5
    part.load_state_dict(6)
    assert loaded == [6]


def test_closing_a_run_closes_its_session() -> None:
    session = FakeSession()
    run_of(session).close()
    assert session.closed
