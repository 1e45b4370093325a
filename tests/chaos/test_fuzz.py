"""Garbage to every port of a run, seeded and bounded: the run trains on, also after a loss and a restart.

`SHOAL_FUZZ_MESSAGES` and `SHOAL_FUZZ_SEED` set the size and the seed; `benchmarks.fuzz` does it by the million.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.process.faults.checked_run import checked_run
from tests.process.servers.served_run import served_run

from shoal.testing.fuzz.fuzzed_run import FuzzedRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3000)]

MESSAGES = int(os.environ.get("SHOAL_FUZZ_MESSAGES", "1000"))
SEED = int(os.environ.get("SHOAL_FUZZ_SEED", "1"))
# Half of the steps take a second each while the run is held, so that it outlasts the messages on any machine.
EPOCHS = max(200, MESSAGES // 20)
HANG_S = 1000.0
PATIENT = ("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")


def test_run_trains_on_whatever_its_ports_receive(tmp_path: Path) -> None:
    with checked_run(tmp_path, "2:3", PATIENT, epochs=EPOCHS) as run:
        run.until_size(3)
        with FuzzedRun(run, SEED) as fuzzed:
            print("seed", SEED, fuzzed.send(MESSAGES), fuzzed.fuzzer.unanswered)
            fuzzed.check_health()
            fuzzed.check_training_goes_on()
        run.finish(timeout_s=HANG_S)
        assert len({event["sum"] for event in run.events_of("done")}) == 1, "members end with different states"
        run.check_parameters(torch.load(run.records / "final.pt", weights_only=True))


def test_servers_go_on_whatever_their_ports_receive(tmp_path: Path) -> None:
    with served_run(tmp_path, "2:2", "stale:2", *PATIENT, epochs=EPOCHS) as run:
        run.until(run.replicated, "a backup of every part")
        with FuzzedRun(run, SEED) as fuzzed:
            print("seed", SEED, fuzzed.send(MESSAGES), fuzzed.fuzzer.unanswered)
            fuzzed.check_health()
            run.kill(run.servers()[0])
            run.until(run.replicated, "a backup of every part again")
        run.finish(timeout_s=HANG_S)
        run.check_counts()
