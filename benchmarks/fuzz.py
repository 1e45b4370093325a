"""Fuzz every port of a run by the million: `python -m benchmarks.fuzz --messages 1000000 --seed 1`.

The run has three members and trains all the time. Afterwards no process may have grown, no traceback may be in a log,
and the run must train on after the death of a member and of the coordinator. The seed names the messages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks import machine
from shoal.testing.fuzzed_run import FuzzedRun
from shoal.testing.run_under_test import RunUnderTest, closing
from shoal.testing.scripts import train_torch
from shoal.testing.scripts.task import TrainingTask

SETTINGS = ("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as scratch:
        environ = TrainingTask(epochs=100_000).environ()
        with closing(RunUnderTest(Path(scratch), Path(train_torch.__file__), "2:3", SETTINGS, environ)) as run:
            run.until_size(3)
            with FuzzedRun(run, options.seed) as fuzzed:
                sent = fuzzed.send(options.messages)
                fuzzed.check_health()
                fuzzed.check_training_goes_on()
            figures = {
                "machine": machine.describe(),
                "seed": options.seed,
                "sent": dict(sent),
                "unanswered": dict(fuzzed.fuzzer.unanswered),
                "bytes_first": fuzzed.memory[0],
                "bytes_last": fuzzed.memory[-1],
                "took_s": round(time.monotonic() - began),
            }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
