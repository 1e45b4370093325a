"""A script that uses only TF_CONFIG: it listens at its own address and connects to all other workers."""

import json
import os
import socket
import sys
import time
from pathlib import Path

OUT = Path(os.environ["RECORDS"])
PLAN = json.loads(os.environ["FAULTS"])


def main() -> None:
    config = json.loads(os.environ["TF_CONFIG"])
    workers, index = config["cluster"]["worker"], config["task"]["index"]
    host, _, port = workers[index].rpartition(":")
    with socket.create_server((host, int(port))):
        note = {"event": "ready", "at": time.time(), "pid": os.getpid(), "config": config}
        with (OUT / f"{os.getpid()}.jsonl").open("w") as file:
            file.write(json.dumps(note) + "\n")
        for worker in workers:
            meet(worker)
        print("worker", index, "met all", len(workers), flush=True)
        until = OUT / "go"
        while not until.exists():
            time.sleep(0.05)


def meet(worker: str) -> None:
    host, _, port = worker.rpartition(":")
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
