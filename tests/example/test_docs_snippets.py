"""Every PyTorch snippet of the documentation runs, with the names that its page takes for granted."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = (
    "docs/index.md",
    "docs/exact.md",
    "docs/howto/batchnorm.md",
    "docs/howto/checkpoints.md",
    "docs/howto/data.md",
    "docs/howto/emulate.md",
    "docs/howto/evaluator.md",
    "docs/howto/gradients.md",
    "docs/howto/script-changes.md",
    "docs/howto/streams.md",
)
# Other frameworks, or hardware that is not here.
SKIPPED = ("shoal.keras", "model.fit", "cuda")
FEATURES, CLASSES = 8, 3


def snippets() -> list[Any]:
    """Return every snippet of the pages that PyTorch on a CPU can run."""
    found = []
    for page in PAGES:
        for index, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)):
            if not any(word in code for word in SKIPPED):
                found.append(pytest.param(code, id=f"{page.removeprefix('docs/')}:{index}"))
    return found


class Counter:
    """State of a script's own, as checkpoints.md has it."""

    def __init__(self) -> None:
        self.count = 0

    def set(self, count: int) -> None:
        self.count = count


def context(folder: Path) -> dict[str, Any]:
    """Return what the pages take for granted: a run, a model, data."""
    import shoal.torch as shoal

    torch.manual_seed(0)
    inputs, targets = torch.randn(4096, FEATURES), torch.randint(CLASSES, (4096,))
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    (folder / "data").mkdir()
    for shard in range(4):
        rows = [json.dumps([inputs[i].tolist(), int(targets[i])]) for i in range(shard * 256, shard * 256 + 256)]
        (folder / "data" / f"{shard}.jsonl").write_text("\n".join(rows))

    def encode(line: str) -> tuple[torch.Tensor, torch.Tensor]:
        row, label = json.loads(line)
        return torch.tensor(row), torch.tensor(label)

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, y)

    return {
        "torch": torch,
        "shoal": shoal,
        "run": shoal.join(),
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "dataset": dataset,
        "validation": torch.utils.data.DataLoader(dataset, batch_size=256),
        "loss_fn": loss_fn,
        "evaluate": lambda model: 0.5,
        "validate": lambda model: 0.5,
        "counter": Counter(),
        "padding": -1,
        "encode": encode,
        "glob": lambda pattern: [str(path) for path in sorted(folder.glob(pattern))],
        "cross_entropy": lambda output, y, ignore_index: loss_fn(output, y),
    }


def completed(code: str) -> str:
    """Return a snippet with the loop and the attach that its page leaves out."""
    head = "run.attach(model, optimizer, scheduler)\n" if "run.attach" not in code and "run." in code else ""
    code = code.replace("    ...\n", "    run.backward(loss_fn(model(x), y))\n    optimizer.step()\n")
    if "run.backward" in code and "for x, y in" not in code:
        code = code.replace("model(x).flatten(0, 1)", "model(x)")
        body = code if "loss =" in code else "loss = loss_fn(model(x), y)\n" + code
        body += "" if "optimizer.step()" in body else "\noptimizer.step()"
        code = "for x, y in run.batches(dataset, size=512):\n" + textwrap.indent(body, "    ")
    elif "run.epoch_ended" in code and "for x, y in" not in code:
        return ""
    return head + code.replace("epochs=10", "epochs=1").replace("workers=4", "workers=0")


@pytest.mark.parametrize("code", snippets())
def test_snippet_of_the_docs_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = context(tmp_path)
    try:
        exec(compile(completed(code), "snippet", "exec"), names)
    finally:
        names["run"].close()
