"""Real processes, a real kill -9, a real full disk: the last complete checkpoint is always there and whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import NoCheckpoint
from shoal.store import checkpoint
from shoal.store.blob_store import LocalStore

pytestmark = pytest.mark.process

COMMON = """
import sys
import numpy as np
from pathlib import Path
from shoal.errors import ShoalError
from shoal.store import checkpoint
from shoal.store.blob_store import LocalStore
from shoal.worker.transport.snapshot import Snapshot

def write(store, step, world=1, size=3_000_000):
    buffers = [np.full(each, step % 256, np.uint8) for each in (size, 9)]
    source = Snapshot(step, b"header %d" % step, buffers, readers=1)
    checkpoint.write(store, source, "checkpoint", run="r", world=world, meta={"step": step})
"""

ENDLESS = (
    COMMON
    + """
store, first, world = LocalStore(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
for step in range(first, first + 100_000):
    write(store, step, world)
    print(step, flush=True)
    checkpoint.prune(store, 2)
"""
)

FULL = (
    COMMON
    + """
class Blind(LocalStore):
    def free_bytes(self):
        return None

kind = {"blind": Blind, "sighted": LocalStore}[sys.argv[2]]
store = kind(Path(sys.argv[1]))
write(store, 1, size=1_500_000)
for step in (2, 3):
    try:
        write(store, step, size=3_000_000)
        print("written?!", flush=True)
    except ShoalError as error:
        print(error.code, error.why, flush=True)
loaded = checkpoint.read(store)
print("newest", loaded.entry.step, len(store.list()), set(loaded.buffers[0].tolist()), flush=True)
write(store, 4, size=100_000)
print("after", checkpoint.read(store).entry.step, flush=True)
"""
)


def newest(root: Path) -> int:
    try:
        loaded = checkpoint.read(LocalStore(root))
    except NoCheckpoint:
        return 0
    step = loaded.entry.step
    assert loaded.passed_over == ()
    assert loaded.header == b"header %d" % step
    assert all(np.all(buffer == step % 256) for buffer in loaded.buffers)
    return step


def test_kill_9_at_any_moment_never_costs_the_last_complete_checkpoint(tmp_path):
    chance = random.Random(7)
    torn = said = world = 0
    # On a busy machine few kills fall into a write.
    while world < 10 or (not torn and world < 200):
        world += 1
        before = newest(tmp_path)
        args = [sys.executable, "-c", ENDLESS, str(tmp_path), str(before + 1), str(world)]
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
            try:
                for _ in range(chance.randint(1, 2)):
                    line = process.stdout.readline()
                    assert line, "the writer ended by itself"
                    said = int(line)
                time.sleep(chance.random() * 0.03)
            finally:
                process.send_signal(signal.SIGKILL)
            said = max([said, *(int(line) for line in process.stdout.read().splitlines() if line)])
        torn += any(name.endswith(".partial") for name in os.listdir(tmp_path))
        assert newest(tmp_path) in (said, said + 1)
    assert torn, "no kill fell into a write: the test proves nothing"

    last = COMMON + f"store = LocalStore(Path(sys.argv[1]))\nwrite(store, {said + 5}, 99)\ncheckpoint.prune(store, 2)"
    subprocess.run([sys.executable, "-c", last, str(tmp_path)], timeout=180, check=True)
    assert newest(tmp_path) == said + 5
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def run_on_small_disk(tmp_path: Path, kind: str) -> list[str]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=4m tmpfs "$1" || exit 77; exec "$2" -c "$3" "$1/checkpoints" "$4"'
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", str(disk), sys.executable, FULL, kind],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine does not allow mounts")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_disk_that_fills_up_in_the_middle_of_a_write_costs_only_that_checkpoint(tmp_path):
    first, second, *rest = run_on_small_disk(tmp_path, "blind")
    assert first.startswith("S503")
    assert "No space left" in first
    assert second == first
    assert rest == ["newest 1 2 {1}", "after 4"]


def test_a_disk_that_is_too_small_is_found_out_beforehand(tmp_path):
    first, second, *rest = run_on_small_disk(tmp_path, "sighted")
    assert first.startswith("S503")
    assert "are free" in first
    assert second == first
    assert rest == ["newest 1 2 {1}", "after 4"]


def test_a_file_size_limit_costs_only_that_checkpoint(tmp_path):
    script = (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))\n" + FULL
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "blind"], capture_output=True, text=True, timeout=180, check=True
    )
    lines = done.stdout.splitlines()
    assert [line[:4] for line in lines[:2]] == ["S503", "S503"]
    assert lines[2:] == ["newest 1 2 {1}", "after 4"]


def test_a_read_only_directory_is_reported_with_a_remedy():
    script = COMMON + (
        "import os\nif os.geteuid() == 0: os.setuid(65534)\n"
        "try:\n    write(LocalStore(Path(sys.argv[1])), 2)\n"
        "except ShoalError as error:\n    print(error.code, error.do)\n"
    )
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        first = COMMON + "write(LocalStore(Path(sys.argv[1])), 1)"
        subprocess.run([sys.executable, "-c", first, place], timeout=180, check=True)
        root.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", script, place], capture_output=True, text=True, timeout=180, check=False
        )
        root.chmod(0o755)
        assert done.stdout.startswith("S502"), done.stderr
        assert "checkpoint.to" in done.stdout
        assert newest(root) == 1
