"""Files that scripts save while they train."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SCRIPT = """
import torch
import shoal.torch as shoal

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run = shoal.join()
run.attach(model, optimizer)
data = torch.utils.data.TensorDataset(torch.ones(32, 4))
for (x,) in run.batches(data, size=8, epochs=3):
    run.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if run.epoch_ended:
        run.save("newest.pt", {"epoch": run.epoch})
        if run.epoch == 1:
            run.save("model.pt", {"step": run.step})
run.save("model.pt", {"step": run.step})
"""


def test_file_saved_in_every_epoch_is_replaced(stage: Any) -> None:
    torch = pytest.importorskip("torch")
    stage.environ["SHOAL_PRELOAD"] = "torch,torch._dynamo,shoal.torch"
    (stage.path / "saves.py").write_text(SCRIPT)
    ran = stage.shoal("run", "-n", "2", "saves.py", timeout_s=150)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert torch.load(stage.path / "newest.pt") == {"epoch": 2}
    assert torch.load(stage.path / "model.pt") == {"step": 12}
    assert not list(stage.path.glob("*.part"))
