"""Run a script, log the time of each optimizer step, and slow it down so that people can watch.

python examples/watched.py FOLDER SCRIPT [ARGS]

FOLDER/PID.txt gets a line "time step" for every step. While FOLDER/pace exists, no step is shorter than the seconds
in it.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

import shoal.torch as shoal

folder, script = Path(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
lines = (folder / f"{os.getpid()}.txt").open("w", buffering=1)
join, runs, last = shoal.join, [], [0.0]


def joined():
    runs.append(join())
    return runs[0]


def note(*_):
    now = time.time()
    lines.write(f"{now:.6f} {runs[0].step}\n")
    pace = folder / "pace"
    if pace.exists():
        time.sleep(max(0.0, min(last[0] + float(pace.read_text() or 0) - now, 1.0)))
    last[0] = time.time()


shoal.join = joined
register_optimizer_step_post_hook(note)
runpy.run_path(script, run_name="__main__")
