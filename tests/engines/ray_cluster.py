"""Ray cluster for tests: several raylets in namespaces of their own, all of which end when this process does.

In a network of its own Ray keeps to loopback and meets no other Ray; with pids of its own, one kill ends all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

CLIENT_PORT = 10001
OBJECT_STORE_BYTES = 80 << 20
CLONE_NEWNET = 0x40000000
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


def why_not() -> str:
    """Return what is missing for such a cluster; "" if nothing."""
    if os.geteuid() != 0:
        return "a Ray cluster of its own needs root, for namespaces"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"a Ray cluster of its own needs {tool} (iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "ip", "link"], capture_output=True, check=False)
    return f"no network namespace can be made here: {probe.stderr.decode().strip()}" if probe.returncode else ""


class RayCluster:
    """A head without processors, and workers that are added and killed.

    `apart` gives it a network of its own; without it, the one that this thread is in must lead nowhere else.
    """

    def __init__(self, settings: Mapping[str, str] = SETTINGS, *, apart: bool = True) -> None:
        # Ray's sockets are below it, and their paths may have 107 bytes.
        self.directory = tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp")
        self.workers = 0
        alone = ("unshare", *(("--net",) if apart else ()), "--pid", "--fork", "--kill-child", "--mount-proc")
        inside = 'ip link set lo up && exec "$0" "$@"'
        self._process = subprocess.Popen(
            [*alone, "sh", "-c", inside, sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(os.path.join(self.directory, "cluster.log"), "wb"),  # noqa: SIM115 - the child's
            env={**os.environ, **settings, "RAY_TMPDIR": self.directory},
            text=True,
        )
        self.address: str = ""
        try:
            self.address = self._answer()["address"]
        except BaseException:
            self.close()
            raise
        self.client_address = f"ray://127.0.0.1:{CLIENT_PORT}"

    def add(self, **given: Any) -> None:
        """Add a worker node."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        self._answer()

    def raylets(self) -> list[psutil.Process]:
        """Return the raylets of workers; that of the head is the first that was started."""
        return sorted(self._named("raylet"), key=lambda one: one.create_time())[1:]

    @contextlib.contextmanager
    def headless(self) -> Iterator[None]:
        """Suspend the head node while the context is active."""
        (gcs,) = self._named("gcs_server")
        gcs.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            gcs.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Move this thread, and what it starts, into the cluster's network while the context is active."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self._process.pid}/ns/net") as there:
            assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(before.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    def memory_bytes(self) -> int:
        return sum(one.memory_full_info().pss for one in self._processes())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _named(self, name: str) -> list[psutil.Process]:
        """Return processes of the cluster by name; some may have ended since."""
        found = []
        for one in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.name() == name and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            with open(os.path.join(self.directory, "cluster.log")) as log:
                raise AssertionError(f"the Ray cluster ended\n{log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> int:
    """Run a head inside the namespaces, and add a worker for each line that is read."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": "127.0.0.1", "include_log_monitor": False}
    head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": CLIENT_PORT, **small}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    threading.Thread(target=_reap, args=(cluster,), daemon=True).start()
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        cluster.add_node(**small, **json.loads(line))
        print(json.dumps({"added": True}), flush=True)
    return 0


def _reap(cluster: Any) -> None:
    """Reap ended raylets, as the init of a machine would: to its workers, a zombie raylet is alive."""
    while True:
        for node in cluster.list_all_nodes():
            for one in [one for kind in node.all_processes.values() for one in kind]:
                one.process.poll()
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
