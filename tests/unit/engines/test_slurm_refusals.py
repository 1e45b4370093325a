"""What Slurm's commands print when they fail, as errors."""

from __future__ import annotations

import pytest

from shoal.engines.slurm.errors import failure, in_short
from shoal.errors import AllocationRefused, EngineUnreachable

SBATCH = ("sbatch", "--parsable")


def told(said: str, argv=SBATCH, **given: object):
    return failure(argv, said, given, "lab")


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        'sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"\n'
        "sbatch: error: Batch job submission failed: Protocol authentication error",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "sbatch: error: Batch job submission failed: Slurm backup controller in standby mode",
    ],
)
def test_a_controller_that_is_away_is_asked_again(said):
    error = told(said)
    assert isinstance(error, EngineUnreachable)
    assert error.what == "Slurm does not answer"


def test_a_full_queue_is_asked_again_because_it_empties():
    error = told(
        "sbatch: error: AssocMaxSubmitJobLimit\n"
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
        "(job submit limit, user's size and/or time limits)"
    )
    assert isinstance(error, EngineUnreachable)
    assert "no more jobs of this user" in error.what
    assert "AssocMaxSubmitJobLimit" in error.why


@pytest.mark.parametrize(
    ("said", "what", "option"),
    [
        ("sbatch: error: invalid partition specified: x", "no such partition", "partition"),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "account",
            "account",
        ),
        ("Batch job submission failed: Invalid qos specification", "the qos", "qos"),
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
def test_what_never_works_is_refused_with_the_option_and_a_remedy(said, what, option):
    error = told(said, **{option: "mine"})
    assert isinstance(error, AllocationRefused)
    assert what in error.what
    assert error.where == f"[pool.lab] {option} = 'mine'"
    assert error.do


def test_an_unknown_refusal_is_told_in_slurms_words():
    error = told("sbatch: error: The site's plug-in says: name your project\n")
    assert isinstance(error, AllocationRefused)
    assert error.why == "The site's plug-in says: name your project"


def test_a_command_that_only_looks_is_asked_again_whatever_it_says():
    assert isinstance(told("squeue: error: something odd", ("squeue",)), EngineUnreachable)


def test_a_machine_without_cluster_is_not_asked_again():
    said = "squeue: fatal: Could not establish a configuration source"
    assert isinstance(told(said, ("squeue",)), AllocationRefused)


def test_noise_around_slurms_words_is_left_out():
    assert in_short('sbatch: error: a\nsbatch: error: a\nTry "sbatch --help" for more\nfatal: b\n') == "a; b"
