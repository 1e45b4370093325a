"""Runs a script and writes down when each of its optimizer steps was applied; `examples/demo.py` reads that.

python examples/watched.py FOLDER SCRIPT [ARGS]
"""

import os
import runpy
import sys
import time
from pathlib import Path

import torch.optim

import shoal.torch as shoal

folder, script = Path(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
lines = (folder / f"{os.getpid()}.txt").open("w", buffering=1)
join, runs = shoal.join, []


def joined(*args, **options):
    runs.append(join(*args, **options))
    return runs[0]


def note(*_):
    lines.write(f"{time.time():.6f} {runs[0].step}\n")


shoal.join = joined
torch.optim.optimizer.register_optimizer_step_post_hook(note)
runpy.run_path(script, run_name="__main__")
