"""Script for tests of evaluators: a small model that counts its own steps, so that a score can depend on them."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import shoal.torch as shoal

PLAN = json.loads(os.environ.get("FAULTS", "{}"))
OUT = Path(os.environ["RECORDS"])
ROLE = os.environ.get("SHOAL_ROLE", "trainer")
WAITED = {"evaluations": 0, "gate": 0}
torch.set_num_threads(1)


class Counting(torch.nn.Module):
    """Linear model that counts how often it was trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = torch.nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.body(x)


def hold(step: int) -> None:
    """Block at the steps at which the test needs the evaluator to have reached some point."""
    needed = min(PLAN.get("hold", 0), step // 20)
    gate = step >= PLAN.get("gate", 10**9) and not WAITED["gate"]
    deadline = time.monotonic() + 240.0
    if needed > WAITED["evaluations"] or gate:
        while time.monotonic() < deadline and (evaluations() < needed or (gate and not (OUT / "go").exists())):
            time.sleep(0.02)
        WAITED.update(evaluations=needed, gate=int(gate or WAITED["gate"]))


def group() -> str:
    """Return the autogroup of this process, by which the kernel shares the processor between sessions."""
    file = Path("/proc/self/autogroup")
    return file.read_text().strip() if file.exists() else ""


def sum_of(model: torch.nn.Module) -> float:
    return float(sum(tensor.double().sum() for tensor in model.state_dict().values()))


def evaluations() -> int:
    return sum(file.read_text().count('"evaluate"') for file in OUT.glob("*evaluator*.jsonl"))


def main() -> None:
    run = shoal.join()
    me = run.member.replace("/", "-")
    log = (OUT / f"{me}.{os.environ.get('SHOAL_INCARNATION', 'alone')}.jsonl").open("a", buffering=1)

    def record(event: str, **fields) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.monotonic()}
        log.write(json.dumps(base | fields) + "\n")

    torch.manual_seed(0)
    width = 9 if ROLE == "evaluator" and PLAN.get("bad") == "model" else 8
    x = torch.randn(512, width)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = Counting(width)
    model, optimizer = run.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def score():
        deadline = time.monotonic() + 240.0
        while PLAN.get("score_waits") and not (OUT / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        seen = int(model.seen)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        about = {"training": model.training, "nice": os.nice(0), "group": group()}
        record("evaluate", step=run.step, seen=seen, sum=sum_of(model), **about)
        returned = {"text": "good", "word": {"loss": "good"}, "nan": {"peak": float("nan")}}.get(PLAN.get("bad"))
        return returned or {"loss": loss, "step": seen, "peak": -abs(run.step - PLAN.get("peak", 10**6))}

    record("ready", role=ROLE)
    if PLAN.get("bad") != "unasked":
        export = OUT / "best.pt" if PLAN.get("export") else None
        run.evaluate(score, best=PLAN.get("best"), patience=PLAN.get("patience"), export=export)
    for a, b in run.batches(data, 64, PLAN.get("epochs", 4), seed=5):
        loss = torch.nn.functional.mse_loss(model(a), b)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(PLAN.get("pause_s", 0.0))
        if run.committed:
            record("commit", step=run.step - 1, world=run.world, size=run.size)
            hold(run.step)
        if run.step == PLAN.get("leave_at") and run.member == PLAN.get("leaves", run.member):
            break
    record("done", step=run.step, sum=sum_of(model))


if __name__ == "__main__":
    sys.exit(main())
