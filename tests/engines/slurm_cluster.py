"""Real Slurm cluster of several nodes on this machine: own munge, controller and directories, on loopback only."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from shoal.testing.wait import until

PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
NODES = ("n1", "n2", "n3", "n4")
WAIT_LIMIT_S = 180.0
PATH = os.pathsep.join(("/usr/sbin", "/sbin", os.environ.get("PATH", os.defpath)))

CONF = """\
ClusterName=shoaltest
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={controller_port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
EnforcePartLimits=ALL
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=5
SlurmdTimeout=8
SlurmctldTimeout=5
InactiveLimit=0
KillWait={kill_wait_s}
WaitTime=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
{nodes}
PartitionName=low Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=n1,n2,n3 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=n1,n2,n3 MaxTime=10 State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=spot Nodes=n3 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=gpu Nodes=n4 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=physics Nodes=n1 AllowAccounts=physics MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
"""
GRES = "NodeName=n4 Name=gpu Type=a100 File={root}/gpu[0-1]\n"


def missing() -> str:
    """Return why Slurm cannot be started here; "" if it can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root here"
    absent = [package for command, package in PACKAGES.items() if shutil.which(command, path=PATH) is None]
    return f"not installed: {' '.join(absent)}; run scripts/setup-engines slurm" if absent else ""


class Cluster:
    """munged, slurmctld and one slurmd per node; `root` has no spaces in it.

    A job that is cancelled has `kill_wait_s` between SIGTERM and SIGKILL.
    """

    def __init__(self, root: Path, kill_wait_s: int = 20) -> None:
        self.root, self.kill_wait_s = root, kill_wait_s
        self.conf = root / "etc" / "slurm.conf"
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.conf)}
        self._guard: subprocess.Popen[bytes] | None = None

    # --- its daemons

    def start(self) -> None:
        argv = (sys.executable, __file__, str(self.root))
        self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        for name in ("etc", "state", "log", "munge", *(f"spool/{node}" for node in NODES)):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        controller_port, *ports = _free_ports(len(NODES) + 1)
        nodes = (
            f"NodeName={node} NodeHostName=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000"
            + (" Gres=gpu:a100:2" if node == "n4" else "")
            for node, port in zip(NODES, ports, strict=True)
        )
        given = {"root": self.root, "controller_port": controller_port, "kill_wait_s": self.kill_wait_s}
        self.conf.write_text(CONF.format(nodes="\n".join(nodes), **given))
        (self.root / "etc" / "gres.conf").write_text(GRES.format(root=self.root))
        for gpu in ("gpu0", "gpu1"):
            (self.root / gpu).touch()
        self._start_munge()
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.until(lambda: set(self.states().values()) == {"idle"}, "all nodes to be idle")

    def _start_munge(self) -> None:
        where = self.root / "munge"
        where.chmod(0o755)
        key = where / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        given = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._run("munged", "--force", "--num-threads=2", *(f"--{name}={where / file}" for name, file in given.items()))

    def start_controller(self) -> None:
        self._run("slurmctld", "-f", str(self.conf))
        self.until(lambda: self.ask("scontrol", "ping").returncode == 0, "the controller")

    def stop_controller(self) -> None:
        """Stop the controller; jobs keep running."""
        _end([_pid(self.root / "slurmctld.pid")], signal.SIGTERM)

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-N", node, "-f", str(self.conf))

    def lose_node(self, node: str) -> None:
        """Simulate a power failure: kill the daemon and every process of its jobs at once."""
        _end(self.on_node(node), signal.SIGKILL)

    def on_node(self, node: str) -> set[int]:
        """Return the daemon of a node, what it started, and every process of its jobs."""
        held = {pid for pid, env in self._ours().items() if f"SLURMD_NODENAME={node}" in env}
        stepds = {parent for parent in map(_parent, held) if parent and _name(parent).startswith("slurmstepd")}
        return set(filter(_alive, (_pid(self.root / f"slurmd.{node}.pid"), *stepds, *held)))

    def stop(self) -> None:
        """Stop everything, whatever happened before."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", f"--user={os.getuid()}")
        _end([_pid(self.root / "slurmctld.pid")], signal.SIGKILL)
        while ours := self._ours():
            _end(ours, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait(WAIT_LIMIT_S)

    def _ours(self) -> dict[int, list[str]]:
        """Return daemons and jobs of this cluster by the environment that they inherited."""
        found = _environments()
        return {pid: env for pid, env in found.items() if f"SLURM_CONF={self.conf}" in env and pid != os.getpid()}

    @property
    def controller(self) -> psutil.Process:
        return psutil.Process(_pid(self.root / "slurmctld.pid"))

    def clear(self) -> None:
        """Cancel all jobs, and wait until nothing is left of them and all nodes are idle."""
        self.ask("scancel", f"--user={os.getuid()}")
        self.until(lambda: set(self.states().values()) == {"idle"} and not self.job_processes(), "an empty cluster")

    def job_processes(self) -> dict[int, str]:
        """Return the processes of jobs on all nodes."""
        named = {pid for pid, env in self._ours().items() if any(one.startswith("SLURM_JOB_ID=") for one in env)}
        return {pid: _command(pid) for pid in named if not _name(pid).startswith("slurmstepd")}

    # --- its commands

    def ask(self, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env=self.env, input=text, capture_output=True, text=True, timeout=WAIT_LIMIT_S)

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.split("\n")
        return dict(line.split() for line in lines if line)

    def until(self, ready: Callable[[], object], what: str, within_s: float = WAIT_LIMIT_S) -> None:
        until(ready, what, within_s, details=self.log, poll_s=0.1)

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted((self.root / "log").glob("*.log")))

    def _run(self, *argv: str) -> None:
        subprocess.run(argv, env=self.env, check=True, timeout=WAIT_LIMIT_S, stdin=subprocess.DEVNULL)


def _free_ports(count: int) -> list[int]:
    """Return ports outside the ephemeral range: a restarted daemon needs its own port back."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = 10_000 + secrets.randbelow(20_000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
        return found


def _environments() -> dict[int, list[str]]:
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(pid)] = Path("/proc", pid, "environ").read_text(errors="replace").split("\0")
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def _pid(path: Path) -> int:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _end(pids: Iterable[int], number: int) -> None:
    """Signal processes and wait until they have ended; kill those that do not."""
    waiting = {pid for pid in pids if pid}
    deadline = time.monotonic() + 10.0
    for pid in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    while waiting := {pid for pid in waiting if _alive(pid)}:
        if time.monotonic() > deadline:
            for pid in waiting:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    # If the tests are killed, the pipe from them closes and ends it.
    sys.stdin.read()
    if Path(sys.argv[1]).exists():
        Cluster(Path(sys.argv[1])).stop()
