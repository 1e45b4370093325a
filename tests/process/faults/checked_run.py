"""A real `shoal run` of train.py under test, and what must hold of it whatever members died."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shoal.core.data.sample_order import SampleOrder
from shoal.testing import run_under_test
from shoal.testing.wait import TIMEOUT_S

SCRIPT = Path(__file__).with_name("train.py")
# With float64 and smooth activations only the order of summation differs, about 1e-16 a step, which training may
# enlarge a little. A lost or repeated sample changes parameters by 1e-4 and more.
SUMMATION_ORDER = 1e-10


class CheckedRun(run_under_test.RunUnderTest):
    """A run whose records are checked against those of one undisturbed process; `plan` is what train.py reads."""

    script = SCRIPT

    def __init__(self, path: Path, members: str = "2:3", settings: tuple[str, ...] = (), **plan: Any) -> None:
        self.plan = plan
        self._resizes = any(setting.startswith("batch=") for setting in settings)
        super().__init__(path, self.script, members, settings, {"FAULTS": json.dumps(plan)})

    # --- checks

    def check(self) -> None:
        """Fail unless each sample counted once an epoch and all members have the result of one undisturbed member."""
        self.check_steps(self.order().total_steps)
        done = [e for e in self.events() if e["event"] == "done"]
        assert len({e["sum"] for e in done}) == 1, "members end with different states"
        finished = [e["fields"]["step"] for e in self.journal() if e["kind"] == "MemberDone"]
        assert set(finished) == {self.order().total_steps}
        self.check_parameters(torch.load(self.records / "final.pt", weights_only=True))

    def order(self) -> SampleOrder:
        plan = self.plan
        order = SampleOrder(plan.get("samples", 512), plan.get("batch", 64), plan.get("epochs", 4), 5)
        for entry in self.journal("AdjustmentReported") if self._resizes else ():
            if entry["fields"]["what"] == "batch":
                order = order.change_size(entry["fields"]["step"], entry["fields"]["values"]["batch"])
        return order

    def check_steps(self, total: int) -> None:
        order = self.order()
        steps: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for commit in self.commits():
            steps.setdefault(commit["step"], {}).setdefault(commit["world"], []).append(commit)
        for step in range(total):
            assert step in steps, f"no member recorded step {step}"
            for commits in steps[step].values():
                assert len({c["sum"] for c in commits}) == 1, f"members differ after step {step}"
            self._check_samples(steps[step][max(steps[step])], order, step)
        self.check_worlds()

    def _check_samples(self, commits: list[dict[str, Any]], order: SampleOrder, step: int) -> None:
        """Fail unless the last world that committed a step had each sample once; a dead member's may be missing."""
        batch = order.ids(step, 0, order.size_of(step)).tolist()
        seen = [i for c in commits for i in c["ids"]]
        assert len(seen) == len(set(seen)), f"a sample was counted twice in step {step}"
        assert set(seen) <= set(batch), f"step {step} has samples of another batch"
        if len(commits) == commits[0]["size"]:
            assert set(seen) == set(batch), f"step {step} lacks samples"

    def check_parameters(self, parameters: dict[str, torch.Tensor], steps: int | None = None) -> None:
        reference = torch.load(self.undisturbed(steps) / "final.pt", weights_only=True)
        worst = max((parameters[k] - reference[k]).abs().max().item() for k in parameters)
        assert worst < SUMMATION_ORDER, f"the parameters differ by {worst} from those of one undisturbed member"

    def undisturbed(self, steps: int | None) -> Path:
        """Return the records of the same script, run standalone once for all tests that need them."""
        known = ("samples", "batch", "epochs", "width", "compile", "shards")
        plan = json.dumps({k: v for k, v in self.plan.items() if k in known} | {"steps": steps}, sort_keys=True)
        session = next((folder for folder in self.records.parents if re.fullmatch(r"pytest-\d+", folder.name)), None)
        key = hashlib.sha256(f"{self.script} {plan}".encode()).hexdigest()[:16]
        out = (session or self.records.parent) / f"undisturbed-{key}"
        if not out.exists():
            partial = self.records.with_name(out.name)
            partial.mkdir()
            environ = {**os.environ, "RECORDS": str(partial), "FAULTS": plan}
            command = [sys.executable, str(self.script)]
            subprocess.run(command, env=environ, check=True, capture_output=True, timeout=4 * TIMEOUT_S)
            # Another worker may have been faster.
            with contextlib.suppress(OSError):
                partial.rename(out)
        return out


@contextlib.contextmanager
def checked_run(path: Path, *args: Any, **kwargs: Any) -> Iterator[CheckedRun]:
    run = CheckedRun(path, *args, **kwargs)
    try:
        yield run
    finally:
        run.close()
