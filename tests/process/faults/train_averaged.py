"""Train with what a language model's script attaches: a disabled GradScaler, and an average of the weights."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shoal.torch as shoal

DIES_AT = 6


def record(event: str, **fields: Any) -> None:
    member = os.environ.get("SHOAL_MEMBER", "alone")
    line = json.dumps({"event": event, "member": member, "pid": os.getpid(), "at": time.time(), **fields})
    with open(os.path.join(os.environ["RECORDS"], f"{member.replace('/', '-')}.jsonl"), "a", encoding="utf-8") as file:
        file.write(line + "\n")


def die_once() -> None:
    """Kill this process in the middle of a step, unless it was done before."""
    marker = os.path.join(os.environ["RECORDS"], "died")
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


run = shoal.join()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=False)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
run.attach(model, optimizer, scaler, averaged)
record("ready")
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
for (batch,) in run.batches(torch.utils.data.TensorDataset(x), size=32, epochs=6, seed=3, micro=8):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    run.backward(scaler.scale(loss))
    if run.step == DIES_AT and run.member == "local/1":
        die_once()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    averaged.update_parameters(model)
    optimizer.zero_grad()
    if run.committed:
        record("commit", step=run.step, world=run.world, size=run.size)
values = b"".join(value.numpy().tobytes() for value in averaged.state_dict().values())
record("after", step=run.step, updates=int(averaged.n_averaged), average=hashlib.sha256(values).hexdigest())
