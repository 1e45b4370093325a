"""Slurm engine on a real cluster of several nodes, which these tests start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.engines.slurm_cluster import PATH, Cluster, missing

from shoal.engines.engine import AllocationRequest, Engine
from shoal.engines.slurm.engine import Slurm, SlurmOptions
from shoal.errors import AllocationRefused, EngineUnreachable
from shoal.testing.engine_conformance import SCENARIOS, EngineSite
from shoal.wire.api import RunSpec
from shoal.wire.credentials import Credentials

pytestmark = [
    pytest.mark.engines,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"SKIPPED: no Slurm on this machine: {missing()}"),
]

TRAIN = Path(__file__).parents[1] / "process" / "faults" / "train.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not below pytest's own directory: the path of munge's socket has to be short.
    found = Cluster(Path(tempfile.mkdtemp(prefix="shoal-slurm-")))
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield the cluster with the environment of its login node; cancel whatever a test leaves in it."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("PATH", PATH)
    yield cluster
    cluster.clear()


class SlurmSite(EngineSite):
    def __init__(self, path: Path, cluster: Cluster) -> None:
        super().__init__(path)
        self.cluster = cluster
        self.options = SlurmOptions(directory=str(path / "home"), look_s=0.2)

    def engine(self, **changes: object) -> Engine:
        return Slurm("pool", msgspec.structs.replace(self.options, **changes))

    def kill(self, allocation: str) -> None:
        os.kill(self.agent_pid(allocation), signal.SIGKILL)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        self.cluster.stop_controller()
        yield
        self.cluster.start_controller()

    def home(self, allocation: str) -> Path:
        return self.path / "home" / "allocations" / self.tag / allocation

    def agent_pid(self, allocation: str) -> int:
        """Return the agent's pid; the batch script became the agent, so there is one process."""
        found = self.cluster.job_processes().items()
        (pid,) = (pid for pid, argv in found if " -m shoal.agent " in argv and f"{self.home(allocation)} " in argv)
        return pid

    def left(self) -> list[str]:
        """Return the processes of our jobs."""
        return [f"{pid} {argv}" for pid, argv in self.cluster.job_processes().items()]

    def log(self, allocation: str) -> str:
        return (self.home(allocation) / "agent.log").read_text()

    def seen_as(self, engine: Engine, allocation: str, state: str) -> bool:
        return any(one.allocation == allocation and one.state == state for one in engine.watch(self.tag))

    def why(self, engine: Engine, allocation: str) -> str:
        return next((one.why for one in engine.watch(self.tag) if one.allocation == allocation), "")


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> Iterator[SlurmSite]:
    with SlurmSite(tmp_path, slurm) as found:
        assert isinstance(found, SlurmSite)
        yield found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_slurm_engine_conforms(scenario: Callable[[EngineSite], None], site: SlurmSite) -> None:
    scenario(site)


# --- what Slurm takes back


def test_preempted_allocation_gets_notice_and_returns_after_requeue(site: SlurmSite) -> None:
    engine = site.engine(nodelist="n1", cpus_per_task=2)
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    first = site.agent_pid("pool-1")
    began = time.time()
    _preempt(site, "n1")
    site.until(lambda: "preempted by another job" in site.log("pool-1"), "the notice")
    # The agent may be gone again before it is asked; what it told stays in the journal.
    journal = site.path / "coordinator" / "journal.jsonl"
    heard = re.compile(r'"AgentNotice".*preempted by another job')
    site.until(lambda: heard.search(journal.read_text()), "the coordinator to hear of it")
    within_s = _within_s(site.log("pool-1"), "preempted by another job")
    # The partition's GraceTime is 10 s, and the time that it took to be told is not in it any more.
    assert 10.0 - (time.time() - began) - 1.0 <= within_s <= 11.0
    (seen,) = engine.watch(site.tag)
    assert seen.ends_at is not None
    assert seen.ends_at <= time.time() + 11.0
    assert "preempts it" in seen.why
    site.until(lambda: site.seen_as(engine, "pool-1", "waiting"), "the allocation to wait again")
    assert "requeued" in site.why(engine, "pool-1")
    site.until(lambda: not psutil.pid_exists(first), "the agent to be ended")
    site.until(lambda: "no node is free" in site.why(engine, "pool-1"), "the allocation to wait for a node only")
    site.cluster.ask("scancel", "--name=rush")
    site.until(lambda: site.seen_as(engine, "pool-1", "running"), "the allocation to come back")
    site.until_agents("pool-1")
    assert site.agent_pid("pool-1") != first


def test_preempted_allocation_without_requeue_is_gone(site: SlurmSite) -> None:
    engine = site.engine(partition="spot", cpus_per_task=2, requeue=False)
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    _preempt(site, "n3")
    site.until(lambda: "PREEMPTED" in site.why(engine, "pool-1"), "the allocation to be gone")
    assert site.seen_as(engine, "pool-1", "gone")
    site.until_agents()


def test_allocation_near_its_time_limit_gets_notice_and_ends(site: SlurmSite) -> None:
    began = time.time()
    engine = site.engine(time_limit=1, notice_s=50)
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    (seen,) = engine.watch(site.tag)
    assert seen.ends_at is not None
    assert began + 50 <= seen.ends_at <= time.time() + 61
    site.until(lambda: "time limit" in _notice(site, "pool-1"), "the notice")
    # Slurm may warn a minute early, and does not say when to the second.
    assert seen.ends_at - time.time() - 2 <= _within_s(site.log("pool-1"), "time limit") <= 61
    # Slurm looks at time limits every half a minute.
    job = site.cluster.ask("squeue", "--noheader", "--format=%A").stdout.strip()
    site.cluster.ask("scontrol", "update", f"JobId={job}", "EndTime=now+1")
    site.until(lambda: "it reached its time limit" in site.why(engine, "pool-1"), "the time limit")
    assert site.seen_as(engine, "pool-1", "gone")
    site.until_agents()


def test_allocation_on_a_lost_node_returns_only_with_requeue(site: SlurmSite) -> None:
    again, once = site.engine(nodelist="n2"), site.engine(nodelist="n2", requeue=False)
    again.submit(site.request("pool-1"))
    once.submit(site.request("pool-2"))
    site.until_agents("pool-1", "pool-2")
    site.cluster.lose_node("n2")
    site.until_agents()
    site.until(lambda: "NODE_FAIL" in site.why(again, "pool-2"), "Slurm to see that the node is lost")
    site.until(lambda: site.seen_as(again, "pool-1", "waiting"), "the allocation to wait again")
    site.cluster.start_node("n2")
    site.until_agents("pool-1")
    assert set(site.allocations(again)) == {"pool-1"}


# --- what others do to it


def test_job_cancelled_by_hand_hands_over_and_leaves_nothing(site: SlurmSite) -> None:
    engine = site.engine()
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    script, born = site.path / "member.py", site.path / "born"
    script.write_text(
        f"import os, time\nif not os.fork():\n    os.setsid()\n    os.fork()\n"
        f"open({str(born)!r}, 'a').write('x')\ntime.sleep(600)\n"
    )
    site.client.submit(RunSpec("run", (str(script),), str(site.path), (1, 1)))
    site.until(lambda: born.exists() and len(born.read_text()) == 3, "the member and its children")
    assert len(site.left()) >= 5, "the agent, its warm process, the member and two more"
    job = site.cluster.ask("squeue", "--noheader", "--format=%A").stdout.strip()
    site.cluster.ask("scancel", job)
    site.until(lambda: site.seen_as(engine, "pool-1", "gone"), "the allocation to be gone")
    site.until(lambda: not site.left(), "its processes to be gone")
    assert "it was cancelled" in site.why(engine, "pool-1") or "it is ending" in site.why(engine, "pool-1")
    assert "SIGTERM" in site.log("pool-1")


def test_allocation_cancelled_during_training_costs_no_step(site: SlurmSite) -> None:
    engine = site.engine()
    handles = [
        engine.submit(replace(site.request(allocation), options=("--grace", "15")))
        for allocation in ("pool-1", "pool-2")
    ]
    site.until_agents("pool-1", "pool-2")
    records = site.path / "records"
    records.mkdir()
    plan = {"RECORDS": str(records), "FAULTS": json.dumps({"epochs": 500, "pause_s": 0.03}), "OMP_NUM_THREADS": "1"}
    site.client.submit(RunSpec("run", (str(TRAIN),), str(site.path), (1, 2), env=plan))
    site.until(lambda: _last_commit(records).get("size") == 2, "a world of two")
    engine.cancel(handles[0])
    site.until(lambda: _last_commit(records).get("size") == 1, "a world of one")
    # Who stays may be done with a step of the next world before the coordinator hears that the other has left.
    site.until(lambda: _journal(site, "MemberLeft"), "the word of the one that left")
    left = [entry["fields"]["member"] for entry in _journal(site, "MemberLeft")]
    assert [name.partition("/")[0] for name in left] == ["pool-1"]
    # Slurm has signalled the member, and its agent has too: that was one notice, and nothing broke.
    assert not _journal(site, "WorldBroken")


def test_agent_hands_over_before_slurm_kills_it(site: SlurmSite) -> None:
    engine = site.engine()
    engine.submit(replace(site.request("pool-1"), options=("--preload", "msgspec", "--grace", "60")))
    site.until_agents("pool-1")
    (argv,) = (
        one for one in site.left() if " -m shoal.agent " in one and "--name pool-1 " in one and "zygote" not in one
    )
    assert "--grace 15 " in f"{argv} ", "the site grants 20 s"


def _last_commit(records: Path) -> dict[str, Any]:
    commits = [one for file in records.glob("*.jsonl") for one in _whole_lines(file) if one["event"] == "commit"]
    return max(commits, key=lambda one: one["at"], default={})


def _journal(site: SlurmSite, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in _whole_lines(site.path / "coordinator" / "journal.jsonl") if entry["kind"] == kind]


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file: the last one may be in the middle of being written."""
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def test_unconfirmed_submission_is_not_repeated(site: SlurmSite) -> None:
    hung = HangsAtSubmission("pool", site.options)
    hung.controller = site.cluster.controller
    with pytest.raises(EngineUnreachable, match="Slurm does not answer"):
        hung.submit(site.request("pool-1"))
    hung.controller.resume()
    engine = site.engine()
    site.until(lambda: site.cluster.ask("squeue", "--noheader").stdout.strip(), "the controller to have taken the job")
    handle = engine.submit(site.request("pool-1"))
    # As if the look before it had come too early.
    rendered = engine.render(site.request("pool-1"))
    assert site.cluster.ask(*rendered.argv, text=rendered.text).returncode == 0
    site.until_agents("pool-1")
    time.sleep(2.0)
    states = site.cluster.ask("squeue", "--noheader", "--format=%T").stdout.split()
    assert sorted(states) == ["PENDING", "RUNNING"], "the second waits for the end of the first"
    assert [one.state for one in engine.watch(site.tag)] == ["running"]
    engine.cancel(handle)
    site.until(lambda: not site.cluster.ask("squeue", "--noheader").stdout.strip(), "every job of it to be gone")
    site.until_agents()


class HangsAtSubmission(Slurm):
    """Engine whose controller hangs during a submission, and accepts the job when it continues."""

    controller: psutil.Process

    def _run(self, argv, *given, **named):
        if argv[0] == "sbatch":
            self.controller.suspend()
        return super()._run(argv, *given, **named)


def test_submission_of_a_dead_coordinator_is_found_by_the_next(site: SlurmSite) -> None:
    engine = site.engine()
    died = subprocess.run(
        [sys.executable, "-c", _SUBMITS_AND_DIES, str(site.path), site.tag, site.client.url], timeout=180, check=False
    )
    assert died.returncode == -signal.SIGKILL
    site.until(lambda: set(site.allocations(engine)) == {"pool-1"}, "the allocation to be found")
    (handle,) = (one.handle for one in engine.watch(site.tag))
    assert engine.submit(site.request("pool-1")) == handle
    site.until_agents("pool-1")


_SUBMITS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from shoal.engines.engine import AllocationRequest
from shoal.engines.slurm.engine import Slurm, SlurmOptions
from shoal.wire import credentials

path, tag, url = sys.argv[1:]
class Dies(Slurm):
    def _run(self, argv, *rest, **more):
        said = super()._run(argv, *rest, **more)
        if argv[0] == "sbatch":
            os.kill(os.getpid(), signal.SIGKILL)
        return said

found = credentials.read(Path(path, "coordinator", "token"))
engine = Dies("pool", SlurmOptions(directory=f"{path}/home"))
engine.submit(AllocationRequest("pool-1", tag, url, found, 1, ("--preload", "msgspec", "--grace", "2")))
"""


def test_stopped_controller_is_unreachable(site: SlurmSite) -> None:
    engine = site.engine()
    with site.cut():
        for ask in (
            lambda: engine.submit(site.request("pool-1")),
            engine.capacity,
            lambda: engine.cancel("shoal-t-pool-1"),
        ):
            with pytest.raises(EngineUnreachable, match="Slurm does not answer"):
                ask()


# --- what it waits for, and what it says


def test_waiting_allocation_says_what_it_waits_for(site: SlurmSite) -> None:
    engine = site.engine(nodelist="n1", cpus_per_task=2)
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    engine.submit(site.request("pool-2"))
    site.until(lambda: "no node is free (Resources)" in site.why(engine, "pool-2"), "the reason")
    engine.cancel(engine.submit(site.request("pool-1")))
    site.until_agents("pool-2")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"partition": "nix"}, "unknown partition"),
        ({"partition": "physics"}, "invalid account"),
        ({"partition": "short", "time_limit": 60}, "the time limit is"),
        ({"time_limit": "soon"}, "the time limit is"),
        ({"constraint": "fast"}, "no node satisfies constraint"),
        ({"gres": "tpu:1"}, "unknown generic resource"),
        ({"gpus": 1}, "no node of the partition has that many"),
        ({"cpus_per_task": 99}, "no node of the partition has that many"),
        ({"memory": "99T"}, "that much memory"),
        ({"nodelist": "n99"}, "unknown node"),
        ({"extra": ("--reservation=r",)}, "invalid reservation"),
        ({"extra": ("--frobnicate",)}, "unknown option of sbatch"),
    ],
    ids=str,
)
def test_impossible_request_is_refused_with_the_cause(
    slurm: Cluster, tmp_path: Path, options: dict[str, object], what: str
) -> None:
    site = SlurmSite(tmp_path, slurm)
    ask = _ask(site.tag)
    with pytest.raises(AllocationRefused, match=what) as refused:
        site.engine(**options).submit(ask)
    assert refused.value.why
    assert refused.value.do
    assert "[pool.pool]" in refused.value.where
    assert not site.home("pool-1").exists(), "nothing is left of it, least of all the token"


def test_sizes_are_requested_and_directories_of_jobs_are_removed(site: SlurmSite) -> None:
    engine = site.engine()
    with pytest.raises(AllocationRefused, match="no node of the partition has that many"):
        engine.submit(replace(site.request("pool-1"), cpus=99))
    handle = engine.submit(replace(site.request("pool-2"), cpus=2, memory_bytes=100 << 20))
    said = subprocess.run(["squeue", "-h", f"--name={handle}", "-o", "%C %m"], capture_output=True, text=True).stdout
    assert said.split() == ["2", "100M"]
    engine.submit(site.request("pool-3"))
    engine.cancel(handle)

    def is_removed_a_day_later() -> bool:
        for path in site.path.rglob("home/allocations/*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (0.0, 0.0))
        engine.clean_up(site.tag, ())
        return not site.home("pool-2").exists()

    # Its agent may have something to write until the very end.
    site.until(is_removed_a_day_later, "what it left to be removed")
    assert (site.home("pool-3") / "token").exists()


def test_unwritable_directory_is_named(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = SlurmSite(tmp_path, slurm).engine(directory=str(tmp_path / "file"))
    with pytest.raises(AllocationRefused, match="cannot write the token") as refused:
        engine.submit(_ask("t1"))
    assert refused.value.why == "Not a directory"


def test_unknown_partition_has_no_capacity(slurm: Cluster, tmp_path: Path) -> None:
    (offer,) = SlurmSite(tmp_path, slurm).engine(partition="nix").capacity()
    assert (offer.kind, offer.count) == ("nix", 0)


def test_machine_without_slurm_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = Slurm("pool", SlurmOptions(directory=str(tmp_path)))
    with pytest.raises(AllocationRefused, match="squeue is not installed on this machine") as refused:
        engine.submit(_ask("t1"))
    assert "login node" in refused.value.do


def test_machine_without_a_cluster_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    with pytest.raises(AllocationRefused, match="find no cluster"):
        Slurm("pool", SlurmOptions(directory=str(tmp_path))).submit(_ask("t1"))


def test_agent_that_cannot_start_logs_why(site: SlurmSite) -> None:
    engine = site.engine(python="/no/such/python")
    engine.submit(site.request("pool-1"))
    site.until(lambda: site.seen_as(engine, "pool-1", "gone"), "the allocation to be gone")
    site.until(lambda: "/no/such/python" in site.why(engine, "pool-1"), "the reason")
    assert "exit code 127" in site.why(engine, "pool-1")


def test_directory_that_nodes_do_not_share_is_named(site: SlurmSite) -> None:
    engine = site.engine(extra=("--hold",))
    engine.submit(site.request("pool-1"))
    # As on a node that sees another file system of this name.
    (site.home("pool-1") / "token").unlink()
    job = site.cluster.ask("squeue", "--noheader", "--format=%A").stdout.strip()
    assert site.cluster.ask("scontrol", "release", job).returncode == 0
    site.until(lambda: "set directory to one on a shared disk" in site.why(engine, "pool-1"), "the reason")


def test_token_is_only_in_a_file_of_its_owner(site: SlurmSite) -> None:
    engine, ask = site.engine(), site.request("pool-1")
    handle = engine.submit(ask)
    site.until_agents("pool-1")
    file = site.home("pool-1") / "token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    job = site.cluster.ask("squeue", "--noheader", "--format=%A").stdout.strip()
    shown = site.cluster.ask("scontrol", "--details", "show", "job", job).stdout
    script = site.cluster.ask("scontrol", "write", "batch_script", job, "-").stdout
    assert "shoal.agent" in script
    born = Path(f"/proc/{site.agent_pid('pool-1')}/environ").read_text()
    assert ask.credentials.token not in shown + script + born
    engine.cancel(handle)
    assert not file.exists()


def test_capacity_is_what_the_nodes_have_free(site: SlurmSite) -> None:
    engine = site.engine(cpus_per_task=2)
    offers = {one.kind: one for one in engine.capacity()}
    assert (offers["low"].count, offers["low"].cpus) == (3, 2)
    gpus = offers["gpu (gpu:a100:2)"]
    assert (gpus.count, gpus.gpus, gpus.memory_bytes) == (1, 2, 4000 << 20)
    engine.submit(site.request("pool-1"))
    site.until_agents("pool-1")
    offers = {one.kind: one for one in site.engine(partition="low", cpus_per_task=2).capacity()}
    assert list(offers) == ["low"]
    assert offers["low"].count == 2


def _ask(tag: str) -> AllocationRequest:
    return AllocationRequest("pool-1", tag, "http://127.0.0.1:1", Credentials("secret-token"))


def _preempt(site: SlurmSite, node: str) -> None:
    """Submit a job that preempts all others on this node."""
    argv = ("sbatch", "--partition=high", f"--nodelist={node}", "--cpus-per-task=2", "--output=/dev/null")
    assert site.cluster.ask(*argv, "--job-name=rush", "--wrap=sleep 600").returncode == 0


def _notice(site: SlurmSite, allocation: str) -> str:
    return next((one.notice for one in site.client.agents() if one.agent == allocation), "")


def _within_s(log: str, why: str) -> float:
    (found,) = re.findall(rf"notice from slurm: {why}.*, within (\d+) s", log)
    return float(found)
