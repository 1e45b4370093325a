"""Train a model of a few hundred thousand parameters, and leave the loop at step AT as HOW says; WHO names who does.

The member SLOW applies the sum of step AT, or of every step from AT on if HOW is "endless", a second after the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch

import shoal.torch as shoal

HOW, WHO, AT = os.environ["HOW"], os.environ.get("WHO", ""), int(os.environ.get("AT", "12"))
SLOW = os.environ.get("SLOW", "")
STEPS = 24


def record(event: str, **fields: Any) -> None:
    member = os.environ.get("SHOAL_MEMBER", "alone")
    line = json.dumps({"event": event, "member": member, "pid": os.getpid(), "at": time.time(), **fields})
    with open(os.path.join(os.environ["RECORDS"], f"{member.replace('/', '-')}.jsonl"), "a", encoding="utf-8") as file:
        file.write(line + "\n")


def digest(model: torch.nn.Module) -> str:
    content = hashlib.sha256()
    for parameter in model.parameters():
        content.update(parameter.detach().numpy().tobytes())
    return content.hexdigest()


def is_first_try(member: str) -> bool:
    """Return whether this script did not fail before, on any member if WHO is empty."""
    path = os.path.join(os.environ["RECORDS"], f"tried-{member.replace('/', '-')}")
    if os.path.exists(path):
        return False
    with open(path, "w", encoding="utf-8"):
        return True


def train(run: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    data = torch.utils.data.TensorDataset(torch.randn(96, 256, generator=torch.Generator().manual_seed(1)))
    epochs = 100_000 if HOW == "endless" else STEPS // 3
    for (x,) in run.batches(data, size=32, epochs=epochs, seed=3):
        run.backward((model(x) ** 2).mean())
        if run.member == SLOW and (run.step + 1 == AT or (HOW == "endless" and run.step + 1 > AT)):
            record("late", step=run.step + 1)
            time.sleep(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if run.committed:
            record("commit", step=run.step, world=run.world, size=run.size, state=digest(model))
        if run.step == AT and run.committed and WHO in ("", run.member):
            if HOW == "break":
                break
            if HOW == "return":
                return "returned"
            if HOW == "exit":
                record("exit", step=run.step, state=digest(model))
                sys.exit(0)
            if HOW == "raise" and is_first_try(run.member):
                raise ValueError("a bad sample")
            if HOW == "caught":
                raise StopIteration
    return "ended"


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(2)
    run = shoal.join()
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    run.attach(model, optimizer)
    record("ready")
    try:
        how = train(run, model, optimizer)
    except StopIteration:
        how = "caught"
    record("after", how=how, step=run.step, state=digest(model))
    run.save(os.path.join(os.environ["RECORDS"], "model.pt"))


if __name__ == "__main__":
    main()
