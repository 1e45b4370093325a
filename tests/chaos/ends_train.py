"""Script whose loop ends in the way that the JSON in ENDS names; it records every committed step and its end.

`end` is break, return, exit, raise or natural; `who` is `all` or one member; `at` is the step at which it happens.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import shoal.torch as shoal
from shoal.torch.state.capture import checksum

PLAN = json.loads(os.environ["ENDS"])
OUT = Path(os.environ["RECORDS"])
torch.set_num_threads(1)


def main() -> None:
    run = shoal.join()
    name = f"{run.member.replace('/', '-')}.{os.environ['SHOAL_INCARNATION']}.jsonl"
    first_life = not list(OUT.glob(f"{run.member.replace('/', '-')}.*.jsonl"))
    log = (OUT / name).open("a", buffering=1)

    def record(event: str, **fields: object) -> None:
        log.write(
            json.dumps({"event": event, "member": run.member, "pid": os.getpid(), "at": time.time()} | fields) + "\n"
        )

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, PLAN["width"]), torch.nn.Tanh(), torch.nn.Linear(PLAN["width"], 1))
    model, optimizer = run.attach(model, torch.optim.Adam(model.parameters(), 1e-3))
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    mine = PLAN["who"] in ("all", run.member)
    record("ready")
    for features, targets in run.batches(data, 32, PLAN["epochs"], seed=5):
        if mine and run.step == PLAN["at"]:
            if PLAN["end"] == "break":
                break
            if PLAN["end"] == "return":
                record("done", step=run.step, sum=checksum({"model": model, "optimizer": optimizer}))
                return
            if PLAN["end"] == "exit":
                record("done", step=run.step, sum=checksum({"model": model, "optimizer": optimizer}))
                sys.exit(0)
            if PLAN["end"] == "raise" and first_life:
                raise RuntimeError("the script is wrong")
        step = run.step
        run.backward(torch.nn.functional.mse_loss(model(features), targets))
        optimizer.step()
        optimizer.zero_grad()
        if run.committed:
            record("commit", step=step, world=run.world, size=run.size)
    record("done", step=run.step, sum=checksum({"model": model, "optimizer": optimizer}))


if __name__ == "__main__":
    main()
