"""Script for fault tests: a small float64 model that records every committed step.

The JSON in FAULTS is its plan. `die` names members that kill themselves at a point of a step:
before the forward pass, in the middle of the backward pass, before, in or after the optimizer's step, at the end,
before the model is saved, or while they save it, before another member asks to; `die_by` names the signal. Every step
takes `pause_s` longer. `drift` names a member that edits its own parameters after a step.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

import shoal.torch as shoal
from shoal.testing.scripts.hold import pause_while_held
from shoal.torch.state.capture import checksum

PLAN = json.loads(os.environ.get("FAULTS", "{}"))
OUT = Path(os.environ["RECORDS"])
torch.set_num_threads(1)
torch.manual_seed(0)


class Numbered(torch.utils.data.Dataset):
    """Samples that know their number."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(PLAN.get("data_seeds", {}).get(os.environ.get("SHOAL_MEMBER"), 1))
        self.x = torch.randn(count, 16, generator=generator, dtype=torch.float64)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return i, self.x[i], self.y[i]


def watch_size(fits: int, _model, _inputs, found: torch.Tensor) -> None:
    def check(gradient: torch.Tensor) -> None:
        if len(gradient) > fits:
            raise torch.OutOfMemoryError(f"a backward pass of {len(gradient)} samples does not fit")

    found.register_hook(check)


def build():
    torch.manual_seed(3)
    width = PLAN.get("widths", {}).get(os.environ.get("SHOAL_MEMBER"), PLAN.get("width", 32))
    layers = [torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).double()
    if "compile" in PLAN:
        model = torch.compile(model, backend=PLAN["compile"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)


def batches(run, data: Numbered):
    size, epochs = PLAN.get("batch", 64), PLAN.get("epochs", 4)
    if "shards" in PLAN:
        parts = torch.arange(len(data)).tensor_split(PLAN["shards"])
        return run.stream([partial(map, data.__getitem__, part.tolist()) for part in parts], size, epochs)
    how = {name: PLAN[name] for name in ("workers", "micro", "shares") if name in PLAN}
    return run.batches(data, size, epochs, seed=5, **how)


def main() -> None:
    run = shoal.join()
    me = run.member.replace("/", "-")
    log = (OUT / f"{me}.{os.environ.get('SHOAL_INCARNATION', 'alone')}.jsonl").open("a", buffering=1)
    first_life = len(list(OUT.glob(f"{me}.*.jsonl"))) == 1
    deaths = {
        (d["step"], d["point"], d.get("piece")) for d in PLAN.get("die", []) if d["member"] == run.member and first_life
    }

    def record(event: str, **fields) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.time()}
        log.write(json.dumps(base | fields) + "\n")

    def die(point: str) -> None:
        turn = run._trainer.current
        if {(run.step, point, None), (run.step, point, turn.index if turn is not None else 0)} & deaths:
            deaths.clear()
            if PLAN.get("die_by") == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), getattr(signal, PLAN.get("die_by", "SIGKILL")))
            time.sleep(0.5)  # after SIGCONT, let the news of what has happened arrive first

    model, optimizer, scheduler = run.attach(*build())
    middle = list(model.parameters())[2]
    middle.register_post_accumulate_grad_hook(lambda _: die("backward"))
    optimizer.register_step_post_hook(lambda *_: die("in the optimizer"))
    if run.member in PLAN.get("fits", {}):
        model.register_forward_hook(partial(watch_size, PLAN["fits"][run.member]))
    data = Numbered(PLAN.get("samples", 512))
    record("ready")
    steps = PLAN.get("steps") or PLAN.get("epochs", 4) * len(data) // PLAN.get("batch", 64)
    turn, counted = None, []
    for ids, x, y in batches(run, data):
        if run._trainer.current is not turn:
            turn, counted = run._trainer.current, []
        counted += ids.tolist() if run.share else []
        if run.step == PLAN.get("steps"):
            break
        if run.step == PLAN.get("raise_at") and run.member == PLAN.get("raise_in"):
            raise RuntimeError("the script is wrong")
        step, world = run.step, run.world
        die("forward")
        loss = torch.nn.functional.mse_loss(model(x), y)
        if len(x) > PLAN.get("loss_fits", {}).get(run.member, len(x)):
            raise torch.OutOfMemoryError(f"out of memory: a loss of {len(x)} samples does not fit")
        run.backward(loss)
        die("before the optimizer")
        optimizer.step()
        die("after")
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(PLAN.get("pause_s", 0.0))
        if run.committed:
            sum_ = checksum({"model": model})
            took = {"busy_s": turn.data_s + turn.compute_s, "wait_s": turn.wait_s}
            record("commit", step=step, world=world, size=run.size, ids=counted, sum=sum_, **took)
            if PLAN.get("drift") == [run.member, step]:
                middle.data += 0.5
            pause_while_held(OUT, step, steps)
    die("at the end")
    if (run.step, "saving", None) in deaths:
        torch.save = lambda *_: ((OUT / "saving").touch(), die("saving"))
    while any(d["point"] == "saving" for d in PLAN.get("die", [])) and not deaths and not (OUT / "saving").exists():
        time.sleep(0.02)
    run.save(OUT / "final.pt")
    alike = checksum({"model": model, "scheduler": scheduler})
    sum_ = checksum({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    record("done", step=run.step, sum=sum_, alike=alike)
    print("done", run.step, flush=True)


if __name__ == "__main__":
    sys.exit(main())
