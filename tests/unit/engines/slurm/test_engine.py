"""Command and script for sbatch, to the letter."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.engines.engine import AllocationRequest
from shoal.engines.slurm.engine import Slurm, SlurmOptions, log_message
from shoal.wire.credentials import Credentials

REQUEST = AllocationRequest("lab-1", "c0ffee", "https://head:7077", Credentials("secret-token"), 2, ("--grace", "20"))


def rendered(**options: object):
    table = {"directory": "/shared/ann/.shoal", "python": "/shared/venv/bin/python", **options}
    return Slurm("lab", msgspec.convert(table, SlurmOptions)).render(REQUEST)


def test_allocation_is_a_job_of_one_task_whose_script_becomes_the_agent():
    request = rendered()
    assert request.argv == (
        "sbatch",
        "--parsable",
        "--job-name=shoal-c0ffee-lab-1",
        "--comment=Shoal's agent lab-1",
        "--dependency=singleton",
        "--nodes=1",
        "--ntasks=1",
        "--chdir=/shared/ann/.shoal/allocations/c0ffee/lab-1",
        "--output=/shared/ann/.shoal/allocations/c0ffee/lab-1/job.log",
        "--open-mode=append",
        "--export=ALL",
        "--signal=B:USR1@60",
        "--requeue",
    )
    assert request.text == (
        "#!/bin/sh\n"
        "set -e\n"
        "umask 077\n"
        "home=/shared/ann/.shoal/allocations/c0ffee/lab-1\n"
        'mkdir -p "$home"\n'
        "trap '' USR1\n"
        '[ -r "$home/token" ] || {'
        ' echo "shoal: $home/token does not exist on $(hostname): set directory to one on a shared disk" >&2;'
        " exit 78; }\n"
        "exec /shared/venv/bin/python -P -m shoal.agent"
        ' --url https://head:7077 --token-file "$home/token" --name lab-1 --dir "$home"'
        " --slots 2 --notice-source slurm:60 --grace 20"
        ' >>"$home/agent.log" 2>&1\n'
    )
    assert request.env == {}


def test_options_of_the_pool_are_passed_to_sbatch():
    request = rendered(
        partition="gpu,big",
        account="physics",
        qos="high",
        constraint="a100&nvlink",
        gres="gpu:a100:1",
        gpus="a100:1",
        cpus_per_task=8,
        memory="16G",
        time_limit="1-12:00:00",
        nodelist="n[1-4]",
        exclude="n3",
        requeue=False,
        notice_s=300,
        extra=["--reservation=school", "--exclusive"],
    )
    assert request.argv[11:] == (
        "--signal=B:USR1@300",
        "--no-requeue",
        "--partition=gpu,big",
        "--account=physics",
        "--qos=high",
        "--constraint=a100&nvlink",
        "--gres=gpu:a100:1",
        "--gpus=a100:1",
        "--cpus-per-task=8",
        "--mem=16G",
        "--time=1-12:00:00",
        "--nodelist=n[1-4]",
        "--exclude=n3",
        "--reservation=school",
        "--exclusive",
    )
    assert "--notice-source slurm:300" in request.text


def test_setup_lines_run_in_a_login_shell():
    text = rendered(setup=["module load cuda/12"]).text
    assert text.startswith("#!/bin/bash -l\n")
    assert text.index("module load cuda/12\n") < text.index("exec ")


def test_percent_sign_in_the_directory_is_escaped():
    assert "--output=/a%%j/allocations/c0ffee/lab-1/job.log" in rendered(directory="/a%j").argv


def test_rendered_request_has_no_token():
    request = rendered()
    assert "secret-token" not in " ".join((*request.argv, request.text, *request.env.values()))


@pytest.mark.parametrize("option", ["--job-name=x", "-Jx", "-J", "--array=1-9", "-N4", "--wrap=ls", "ls", "", "--wait"])
def test_reserved_option_in_extra_is_refused(option):
    with pytest.raises(msgspec.ValidationError, match="one that Shoal sets itself"):
        rendered(extra=[option])


@pytest.mark.parametrize("options", [{"partiton": "x"}, {"notice_s": 0}, {"cpus_per_task": -1}, {"time_limit": 1.5}])
def test_invalid_option_is_an_error(options):
    with pytest.raises(msgspec.ValidationError):
        rendered(**options)


def test_log_message_is_the_agents_or_else_the_scripts(tmp_path: Path):
    assert "do the nodes share that directory?" in log_message(tmp_path)
    (tmp_path / "job.log").write_text("line 8: python: not found\n")
    assert log_message(tmp_path) == "line 8: python: not found"
    (tmp_path / "agent.log").write_text("first\nlast\n")
    assert log_message(tmp_path) == "last"
