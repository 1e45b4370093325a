from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from benchmarks import profiles


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One application on one and two GPUs of a node, whose step takes 0.1 s and 10 or 5 ms a sample."""
    (tmp_path / "toy").mkdir()
    rows = ["placement,local_bsz,step_time,sync_time"]
    for gpus, sizes in ((1, (8, 16, 64)), (2, (8, 32))):
        rows += [f"{gpus},{size},{0.1 + 0.01 * size},0.001" for size in sizes]
    rows.append("12,8,9.0,0.1")
    (tmp_path / "toy" / "placements.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_devices_are_interpolated_between_measured_sizes(directory: Path) -> None:
    one, two = profiles.read(directory)["toy"]
    assert (one.least, one.most, two.most) == (8, 64, 64)
    assert one.seconds[40] == pytest.approx(0.5)
    assert one.seconds[0] == 0
    assert two.seconds[40] == pytest.approx(0.3)


def test_no_split_is_faster_than_the_oracle(directory: Path) -> None:
    devices = tuple(profiles.read(directory)["toy"])
    mix = profiles.Mix("toy", devices, 60)
    best = min(max(devices[0].seconds[b], devices[1].seconds[60 - b]) for b in range(61))
    assert profiles.oracle_s(mix) == pytest.approx(best, rel=1e-6)


def test_the_model_comes_near_the_oracle_and_the_ratio_law_less(directory: Path) -> None:
    found = profiles.compare(profiles.read(directory), count=10, noise=0.0, seed=0)
    over = found["over_oracle"]
    assert over["model/all"]["3"] <= 1.03
    assert over["model/all"]["12"] <= over["ratio/all"]["12"] + 0.01
    assert over["equal/all"]["12"] == over["equal/all"]["0"] > 1.05
    assert "model/all" in profiles.render(found)


def test_without_profiles_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_PROFILES", raising=False)
    monkeypatch.setattr(sys, "argv", ["profiles"])
    profiles.main()
    assert "skipped" in capsys.readouterr().err


def test_the_figures_are_written_as_json(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    arguments = ["--data", str(directory), "--mixes", "2", "--noise", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["profiles", *arguments])
    profiles.main()
    assert json.loads(out.read_text())[0]["mixes"] == 2


@pytest.mark.skipif("SHOAL_PROFILES" not in os.environ, reason="SHOAL_PROFILES names no directory of profiles")
def test_on_measured_devices_three_changes_are_enough() -> None:
    found = profiles.compare(profiles.read(Path(os.environ["SHOAL_PROFILES"])), count=12, noise=0.0, seed=0)
    assert found["over_oracle"]["model/affine"]["3"] <= 1.02
    assert found["over_oracle"]["model/all"]["3"] <= 1.05
