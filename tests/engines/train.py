"""Training script for tests of engines: slow, and it records every step that it commits."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import shoal.torch as shoal
from shoal.testing.scripts.hold import pause_while_held

OUT = Path(os.environ["RECORDS"])
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ.get("STEPS", "200"))
torch.set_num_threads(1)


def main() -> None:
    run = shoal.join()
    log = (OUT / f"{run.member.replace('/', '-')}.{os.getpid()}.jsonl").open("a", buffering=1)

    def record(event: str, **fields: object) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.monotonic()}
        log.write(json.dumps(base | fields) + "\n")

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    model, optimizer = run.attach(model, optimizer)
    x = torch.randn(STEPS * 24, 8, dtype=torch.float64)
    if "EVALUATED" in os.environ:
        run.evaluate(lambda: record("evaluated", step=run.step) or {"loss": 1.0})
    record("ready", cwd=os.getcwd())
    for a, b in run.batches(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), size=24, seed=3):
        loss = torch.nn.functional.mse_loss(model(a), b)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if run.committed:
            record("commit", step=run.step, world=run.world, size=run.size)
            pause_while_held(OUT, run.step, STEPS)
    run.save(OUT / "final.pt")
    record("done", step=run.step)


if __name__ == "__main__":
    main()
