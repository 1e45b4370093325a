"""Errors of Slurm's commands, from what they print: what failed, which option to look at, what to do; pure.

Slurm's exit codes say nothing, so the output is matched. Two mistakes are possible, and they are not equal: to retry
what can never work delays the error; to give up on what would work later loses a pool. So a message that is not
recognised is final only for sbatch, where it is most likely about the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shoal.errors import AllocationRefused, EngineUnreachable, LaunchError

# Transient: Slurm will answer later.
UNREACHABLE = (
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

# (pattern in the output, what it means, the option to look at, what to do)
REFUSALS = (
    ("partition name|invalid partition", "unknown partition", "partition", "sinfo lists the partitions"),
    (
        "account/partition combination|Invalid account",
        "invalid account for this partition",
        "account",
        "set account to one of: sacctmgr show associations user=$USER",
    ),
    (
        "Invalid qos",
        "unknown qos, or not allowed here",
        "qos",
        "set qos to one of: sacctmgr show qos",
    ),
    (
        "time limit is invalid|--time specification",
        "the time limit is missing, malformed, or longer than allowed",
        "time_limit",
        "sinfo -o '%P %l' shows how long each partition allows",
    ),
    ("feature", "no node satisfies constraint", "constraint", "sinfo -o '%N %f' shows the features of nodes"),
    ("generic resource|--gres|--gpus", "unknown generic resource", "gres", "sinfo -o '%N %G' lists them"),
    ("node name", "unknown node", "nodelist", "sinfo -N lists the nodes"),
    ("reservation", "invalid reservation", "extra", "scontrol show reservation lists them"),
    (
        "Memory specification|--mem specification",
        "no node has that much memory, or the amount is malformed",
        "memory",
        "sinfo -o '%P %m' shows the memory of nodes in megabytes",
    ),
    (
        "More processors requested|node configuration is not available|Node count|cpu count",
        "no node of the partition has that many resources",
        "cpus_per_task",
        "request less, or use another partition: sinfo -o '%P %c %m %G'",
    ),
    (
        "accounting/QOS policy",
        "a limit of the account or qos is exceeded",
        "account",
        "request less, or have the limit raised: sacctmgr show associations user=$USER",
    ),
    (
        "permission denied|not permitted|Invalid user|Unspecified user",
        "this user may not submit jobs here",
        "partition",
        "ask the site's administrators, or set another partition or account",
    ),
    (
        "unrecognized option|invalid option|requires an argument",
        "unknown option of sbatch",
        "extra",
        "correct extra",
    ),
)


def failure(argv: Sequence[str], output: str, options: Mapping[str, object], pool: str) -> LaunchError:
    """Return the error of a failed command from its standard error; `options` are the pool's."""
    why = in_short(output) or f"{argv[0]} failed without a message"
    if any(phrase in output for phrase in UNREACHABLE):
        return EngineUnreachable("Slurm does not answer", where=argv[0], why=why)
    if FULL.search(output):
        do = "wait for some to end, or have the limit raised: sacctmgr show associations user=$USER"
        return EngineUnreachable("this user has too many jobs in Slurm", where=argv[0], why=why, do=do)
    if "Could not establish a configuration source" in output:
        return not_configured(why)
    if argv[0] != "sbatch":
        return EngineUnreachable(f"{argv[0]} failed", where=" ".join(argv[:3]), why=why)
    for pattern, meaning, option, remedy in REFUSALS:
        if re.search(pattern, output, re.IGNORECASE):
            is_given = bool(option) and bool(options.get(option))
            where = f"[pool.{pool}] {option} = {options[option]!r}" if is_given else f"[pool.{pool}]"
            return AllocationRefused(meaning, where=where, why=why, do=remedy)
    return AllocationRefused("Slurm rejected the job", where=f"[pool.{pool}]", why=why, do="correct the pool's options")


def not_configured(why: str) -> AllocationRefused:
    return AllocationRefused(
        "Slurm's commands find no cluster on this machine",
        why=why,
        do="start the coordinator on a login node of the cluster, or set SLURM_CONF",
    )


def not_installed(command: str) -> AllocationRefused:
    return AllocationRefused(
        f"{command} is not installed on this machine",
        why="the slurm engine runs Slurm's own commands",
        do="start the coordinator on a login node of the cluster, or install slurm-client and set SLURM_CONF",
    )


def in_short(output: str) -> str:
    """Return what Slurm printed, without prefixes, hints and repetitions."""
    lines = [re.sub(r"^(\w+: )?((error|fatal): )?", "", line.strip()) for line in output.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Try ", "If munged is up"))]
    return "; ".join(dict.fromkeys(kept))[:500]
