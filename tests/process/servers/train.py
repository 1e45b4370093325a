"""Script for tests of servers: a small model, and two vectors in which the servers count every sample.

The counters are parameters, one in each of two shards, and an optimizer of its own kind counts in them: so what is
checked at the end is what was really applied, shard by shard.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

import shoal.torch as shoal
from shoal.testing.scripts.hold import pause_while_held

PLAN = json.loads(os.environ.get("FAULTS", "{}"))
OUT = Path(os.environ["RECORDS"])
SAMPLES, BATCH, EPOCHS = PLAN.get("samples", 512), PLAN.get("batch", 64), PLAN.get("epochs", 4)
torch.set_num_threads(1)


class Numbered(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 16, generator=generator, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return i, self.x[i], self.y[i]


class Counted(torch.nn.Module):
    """A model that adds the counters of the samples that it sees to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = torch.nn.ParameterList(torch.zeros(SAMPLES, dtype=torch.float64) for _ in range(2))
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 1)
        ).double()

    def forward(self, ids, x, y):
        counted = sum(counter[ids].mean() for counter in self.counters)
        return torch.nn.functional.mse_loss(self.body(x), y), counted


class CountingSGD(torch.optim.SGD):
    """SGD that counts, instead of stepping, where a group says so."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"] if group.get("counts") else ():
                if p.grad is not None:
                    seen = p.grad[p.grad > 0]
                    p.add_(torch.round(p.grad / seen.min()) if seen.numel() else 0.0)
                    p.grad = None
        return super().step(closure)


def main() -> None:
    run = shoal.join()
    me = run.member.replace("/", "-")
    log = (OUT / f"{me}.{os.environ.get('SHOAL_INCARNATION', 'alone')}.jsonl").open("a", buffering=1)

    def record(event: str, **fields) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.monotonic()}
        log.write(json.dumps(base | fields) + "\n")

    class Drops(logging.Handler):
        def emit(self, told: logging.LogRecord) -> None:
            if told.levelno >= logging.WARNING:
                record("dropped", whom=told.args[0])

    logging.getLogger("shoal.parameter_server").addHandler(Drops())
    torch.manual_seed(hash(run.member) % 1000)
    model = Counted()
    groups = [{"params": list(model.body.parameters())}, {"params": list(model.counters), "counts": True}]
    optimizer = CountingSGD(groups, lr=PLAN.get("lr", 0.1), momentum=0.9)
    model, optimizer, scheduler = run.attach(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9))
    record("ready", role=os.environ.get("SHOAL_ROLE", "trainer"))
    slow = PLAN.get("slow", {}).get(run.member, 0.0)
    how = {"workers": PLAN.get("workers", 0), "micro": PLAN.get("micro")}
    for ids, x, y in run.batches(Numbered(), BATCH, EPOCHS, seed=5, **how):
        granted = getattr(run._trainer.current, "granted", None)
        told = {"clock": granted.clock, "low": granted.min_clock, "ticket": granted.ticket.key} if granted else {}
        record("begin", samples=len(ids), **told)
        if run.step >= PLAN.get("hangs", {}).get(run.member, EPOCHS * SAMPLES) and not (OUT / "hung").exists():
            (OUT / "hung").touch()
            time.sleep(3600)
        loss, counted = model(ids, x, y)
        run.backward(loss + counted)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(slow + PLAN.get("pause_s", 0.0))
        if run.committed:
            record("commit", loss=loss.item(), step=run.step, **told)
            pause_while_held(OUT, run.step, EPOCHS * SAMPLES // BATCH)
        if run.step >= PLAN.get("leaves", {}).get(run.member, EPOCHS * SAMPLES):
            record("left", step=run.step)
            break
    else:
        run.save(OUT / "final.pt")
        record("done", step=run.step, counts=[c.unique().tolist() for c in model.counters])
    print("done", run.step, flush=True)
    while (OUT / "stay").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
