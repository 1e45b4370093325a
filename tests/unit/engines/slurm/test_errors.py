"""Errors from what Slurm's commands print when they fail."""

from __future__ import annotations

import pytest

from shoal.engines.slurm.errors import failure, in_short
from shoal.errors import AllocationRefused, EngineUnreachable

SBATCH = ("sbatch", "--parsable")


def error_of(output: str, argv=SBATCH, **options: object):
    return failure(argv, output, options, "lab")


@pytest.mark.parametrize(
    "output",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"\n'
        "sbatch: error: Batch job submission failed: Protocol authentication error",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "sbatch: error: Batch job submission failed: Slurm backup controller in standby mode",
    ],
)
def test_unreachable_controller_is_transient(output):
    error = error_of(output)
    assert isinstance(error, EngineUnreachable)
    assert error.what == "Slurm does not answer"


def test_limit_of_submitted_jobs_is_transient():
    error = error_of(
        "sbatch: error: AssocMaxSubmitJobLimit\n"
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
        "(job submit limit, user's size and/or time limits)"
    )
    assert isinstance(error, EngineUnreachable)
    assert "too many jobs" in error.what
    assert "AssocMaxSubmitJobLimit" in error.why


@pytest.mark.parametrize(
    ("output", "what", "option"),
    [
        ("sbatch: error: invalid partition specified: x", "unknown partition", "partition"),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "account",
            "account",
        ),
        ("Batch job submission failed: Invalid qos specification", "unknown qos", "qos"),
        (
            "sbatch: error: QOSMaxWallDurationPerJobLimit\nsbatch: error: Batch job submission failed: "
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "a limit of the account or qos",
            "account",
        ),
        (
            "Batch job submission failed: User's group not permitted to use this partition",
            "may not submit",
            "partition",
        ),
    ],
)
def test_permanent_error_names_the_option_and_a_remedy(output, what, option):
    error = error_of(output, **{option: "mine"})
    assert isinstance(error, AllocationRefused)
    assert what in error.what
    assert error.where == f"[pool.lab] {option} = 'mine'"
    assert error.do


def test_unknown_error_quotes_slurm():
    error = error_of("sbatch: error: The site's plug-in says: name your project\n")
    assert isinstance(error, AllocationRefused)
    assert error.why == "The site's plug-in says: name your project"


def test_failure_of_a_query_is_transient():
    assert isinstance(error_of("squeue: error: something odd", ("squeue",)), EngineUnreachable)


def test_machine_without_cluster_is_permanent():
    output = "squeue: fatal: Could not establish a configuration source"
    assert isinstance(error_of(output, ("squeue",)), AllocationRefused)


def test_prefixes_and_repetitions_are_dropped():
    assert in_short('sbatch: error: a\nsbatch: error: a\nTry "sbatch --help" for more\nfatal: b\n') == "a; b"
