"""Fuzz every port of a run by the million: `python -m benchmarks.fuzz --messages 1000000 --seed 1`.

The run has three members and trains all the time; with `--sync stale:2` it has parameter servers as well. Afterwards no
process may have grown, no traceback may be in a log, and the run must train on after the death of a member and of the
coordinator. The seed names the messages; several seeds beside each other share the work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks import machine
from shoal.testing.fuzz.fuzzed_run import FuzzedRun
from shoal.testing.run_under_test import RunUnderTest, closing
from shoal.testing.scripts import train_torch
from shoal.testing.scripts.task import TrainingTask

SETTINGS = ("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")
STEPS_BEFORE = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", default="step")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as scratch:
        # Steps with pauses: the processor is for the messages.
        environ = TrainingTask(epochs=100_000, pause_s=0.2).environ()
        settings = (*SETTINGS, f"sync={options.sync}")
        with closing(RunUnderTest(Path(scratch), Path(train_torch.__file__), "2:3", settings, environ)) as run:
            run.until(lambda: len(run.pids()) >= 3, "three members")
            run.until_step(STEPS_BEFORE)
            with FuzzedRun(run, options.seed) as fuzzed:
                sent = fuzzed.send(options.messages)
                fuzzed.check_health()
                fuzzed.check_training_goes_on()
            figures = {
                "machine": machine.describe(),
                "seed": options.seed,
                "sync": options.sync,
                "sent": dict(sent),
                "unanswered": dict(fuzzed.fuzzer.unanswered),
                "bytes_first": fuzzed.memory[0],
                "bytes_last": fuzzed.memory[-1],
                "took_s": round(time.monotonic() - began),
            }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
