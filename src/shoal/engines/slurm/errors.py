"""Why Slurm did not do what it was asked to, from what its commands print; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError

# Slurm is there later, or takes more jobs later.
AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Communication connection failure",
    "Communication shutdown failure",
    "Transport endpoint is not connected",
    "Connection refused",
    "Connection timed out",
    "in standby mode",
    "Protocol authentication error",
    "Munge encode failed",
    "temporarily unable to accept job",
    "Resource temporarily unavailable",
    "Slurm system is not ready",
    "Slurm database connection",
)
FULL = re.compile(r"(Assoc|QOS)\w*MaxSubmitJob\w*|QOSMaxSubmit\w*")

# (what Slurm prints, what that means, which option is to be looked at, what to do)
REFUSALS = (
    ("partition name|invalid partition", "Slurm has no such partition", "partition", "sinfo lists the partitions"),
    (
        "account/partition combination|Invalid account",
        "the account cannot be used here",
        "account",
        "set account to one of: sacctmgr show associations user=$USER",
    ),
    (
        "Invalid qos",
        "Slurm does not know the qos, or does not allow it here",
        "qos",
        "set qos to one of: sacctmgr show qos",
    ),
    (
        "time limit is invalid|--time specification",
        "the time limit is missing, malformed, or longer than allowed",
        "time_limit",
        "sinfo -o '%P %l' shows how long each partition allows",
    ),
    ("feature", "no node has what constraint asks for", "constraint", "sinfo -o '%N %f' shows what nodes have"),
    ("generic resource|--gres|--gpus", "Slurm has no such generic resource", "gres", "sinfo -o '%N %G' lists them"),
    ("node name", "there is no node of this name", "nodelist", "sinfo -N lists the nodes"),
    ("reservation", "the reservation is not valid", "extra", "scontrol show reservation lists them"),
    (
        "Memory specification|--mem specification",
        "no node has as much memory, or the amount is malformed",
        "memory",
        "sinfo -o '%P %m' shows how many megabytes nodes have",
    ),
    (
        "More processors requested|node configuration is not available|Node count|cpu count",
        "no node of the partition has as much as is asked for",
        "cpus_per_task",
        "ask for less, or of another partition: sinfo -o '%P %c %m %G'",
    ),
    (
        "accounting/QOS policy",
        "a limit of the account or qos does not allow it",
        "account",
        "ask for less, or have the limit raised: sacctmgr show associations user=$USER",
    ),
    (
        "permission denied|not permitted|Invalid user|Unspecified user",
        "this user may not submit there",
        "partition",
        "ask the site's administrators, or set another partition or account",
    ),
    (
        "unrecognized option|invalid option|requires an argument",
        "sbatch does not know an option",
        "extra",
        "correct it",
    ),
)


def failure(argv: Sequence[str], said: str, given: Mapping[str, object], pool: str) -> LaunchError:
    """What a command that failed is to be told as. `given` are the pool's options."""
    words = in_short(said) or f"{argv[0]} failed without a word"
    if any(phrase in said for phrase in AWAY):
        return EngineUnreachable("Slurm does not answer", where=argv[0], why=words)
    if FULL.search(said):
        do = "let some end, or have the limit raised: sacctmgr show associations user=$USER"
        return EngineUnreachable("Slurm takes no more jobs of this user now", where=argv[0], why=words, do=do)
    if "Could not establish a configuration source" in said:
        return not_configured(words)
    if argv[0] != "sbatch":
        return EngineUnreachable(f"{argv[0]} failed", where=" ".join(argv[:3]), why=words)
    for pattern, meaning, option, remedy in REFUSALS:
        if re.search(pattern, said, re.IGNORECASE):
            is_given = bool(option) and bool(given.get(option))
            where = f"[pool.{pool}] {option} = {given[option]!r}" if is_given else f"[pool.{pool}]"
            return AllocationRefused(meaning, where=where, why=words, do=remedy)
    return AllocationRefused(
        "Slurm refuses the job", where=f"[pool.{pool}]", why=words, do="correct the pool's options"
    )


def not_configured(why: str) -> AllocationRefused:
    return AllocationRefused(
        "Slurm's commands find no cluster from this machine",
        why=why,
        do="start the coordinator on a login node of the cluster, or set SLURM_CONF",
    )


def not_installed(command: str) -> AllocationRefused:
    return AllocationRefused(
        f"{command} is not on this machine",
        why="the slurm engine runs Slurm's own commands",
        do="start the coordinator on a login node of the cluster, or install slurm-client and set SLURM_CONF",
    )


def in_short(said: str) -> str:
    """What Slurm printed, without the noise around it."""
    lines = [re.sub(r"^(\w+: )?((error|fatal): )?", "", line.strip()) for line in said.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Try ", "If munged is up"))]
    return "; ".join(dict.fromkeys(kept))[:500]
