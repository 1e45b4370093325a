"""S1xx: a command line, a configuration file or an API call cannot be used as it is."""

from shoal import exit_codes
from shoal.errors.base import ShoalError


class UsageError(ShoalError):
    """A command or an API call was given something that it cannot use.

    The error names the argument and what is valid; ``shoal COMMAND --help`` lists the options of a command.
    """

    code = "S100"
    exit_code = exit_codes.BAD_USAGE


class BadSettings(UsageError):
    """A setting is unknown or has an invalid value.

    Settings come from ``--set NAME=VALUE``, ``SHOAL_…`` variables, ``shoal.toml`` and ``[tool.shoal]``; the error says
    which of them set this one. ``shoal config`` prints every setting with its value and its source.
    """

    code = "S101"
    exit_code = exit_codes.BAD_SETTING


class BadPlan(UsageError):
    """The rule that divides a global batch into shares is invalid, or no division satisfies it.

    Valid rules are ``model`` (shares by measured speed), ``ratio`` (the rule b' = b * mean(t) / t), ``equal``, and
    ``fixed:3,1`` (fixed weights by the member's number, here three to one). No member's minimum may exceed its maximum.
    """

    code = "S102"


class BadSync(UsageError):
    """The synchronisation mode is invalid, or cannot be combined with the other options.

    ``step``: all members commit every step together. ``stale:K`` (K ≥ 0): servers hold the parameters, and no trainer
    gets more than K of its own batches ahead of the slowest. ``async``: the same without a bound. ``local:H`` (H ≥ 1):
    members train on their own for H global batches, then average the result.
    """

    code = "S103"
    exit_code = exit_codes.BAD_SETTING


class UnusableExchange(UsageError):
    """The setting ``exchange`` names a backend that this member cannot use.

    ``nccl`` needs a GPU, a build of PyTorch with NCCL and a model on the GPU; ``gloo`` needs PyTorch's own Gloo. Keras
    members have the ring only. Leave ``exchange`` at ``auto``: it takes the ring on CPUs and NCCL on GPUs.
    """

    code = "S104"
    exit_code = exit_codes.BAD_SETTING


class SharesOutOfBounds(UsageError):
    """A warning: ``shares.min`` or ``shares.max`` cannot be kept with the members that are present.

    Training continues. If the largest shares of all members sum to less than the global batch, shares exceed them and
    are computed in micro-batches that do not. If the smallest ones sum to more than the batch, shares are smaller. Add
    members, or change ``shares.max``, ``shares.min``, ``shares.machines`` or the batch.
    """

    code = "S105"


class BadConfigFile(UsageError):
    """``shoal.toml``, or ``[tool.shoal]`` in ``pyproject.toml``, cannot be read or has an unknown table.

    Shoal looks for the file in the working directory and then in its parents. Correct the line that the error names;
    ``shoal config`` prints which file is in use.
    """

    code = "S110"
    exit_code = exit_codes.BAD_SETTING


class BadScript(UsageError):
    """The script or module to run does not exist, cannot be read, is not valid Python, or is outside the project.

    Check its path relative to the working directory. A script is compiled before anything is started, so a syntax error
    is shown at once, with its line. A run on other machines can only use a script inside the
    directory that it sends to them.
    """

    code = "S111"


class BadCount(UsageError):
    """The number of members is invalid.

    Write ``-n 4`` for exactly four members or ``-n 2:8`` for two to eight. With a range, the run continues after losses
    as long as the minimum is present. A run has at most 10,000 members.
    """

    code = "S112"


class UnknownRun(UsageError):
    """No run has this name or id, on this machine or at the given coordinator.

    ``shoal ps`` lists the runs of this machine. For a run of another coordinator, pass ``--url`` and ``--token-file``.
    """

    code = "S113"


class AmbiguousRun(UsageError):
    """No run was named and several are active, or the given name or beginning of an id matches more than one run.

    ``shoal ps`` lists the runs; pass the name of one, or more characters of its id.
    """

    code = "S114"


class UnknownCode(UsageError):
    """No error has this code.

    ``shoal explain`` without a code lists them all.
    """

    code = "S115"


class RunStillActive(UsageError):
    """The run or its coordinator is still active, so the run cannot be resumed or removed.

    ``shoal status RUN`` shows what it does. To continue it with other options, or to remove it, stop it with
    ``shoal stop RUN`` first.
    """

    code = "S116"


class BadNoticeSource(UsageError):
    """The source of shutdown notices is unknown or cannot be used on this machine.

    ``notice.source`` is ``aws``, ``aws:rebalance``, ``gcp``, ``azure``, ``slurm``, ``slurm:SECONDS``, ``file:PATH`` or
    the name of an installed plug-in.
    ``slurm`` works only for agents that Slurm has started.
    """

    code = "S117"
    exit_code = exit_codes.BAD_SETTING


class BadName(UsageError):
    """The name of a run cannot be shown in one line.

    A name has at most 100 characters, without line breaks, escape codes or other control characters, because ``shoal
    ps`` and the logs print it. Choose another with ``--name``.
    """

    code = "S118"


class RunAlreadyEnded(UsageError):
    """The run has ended, so it cannot be stopped, scaled or resumed.

    ``shoal resume RUN`` continues a run that was stopped or that failed. A run that has trained to its end has nothing
    left to do.
    """

    code = "S120"


class BadRequest(UsageError):
    """A request does not match the coordinator's API.

    The command line and ``shoal.run`` send valid requests if they have the same version as the coordinator. Other
    clients should compare their requests with ``docs/reference/http.md``.
    """

    code = "S121"


class BadEmulation(UsageError):
    """The value of ``--emulate`` is invalid, or emulation cannot be combined with the other options.

    It lists the relative speed of each member's machine, in (0, 1], separated by commas: ``1,0.5,0.25``. A speed that
    changes is followed by a colon, the next speed, ``@`` and the first step at that speed: ``1,0.5:0.125@300``. With
    ``sample_s=0.002``, and optionally ``fixed_s=0.01``, a step takes fixed_s + sample_s * samples / speed seconds,
    independent of the real computation.
    """

    code = "S122"
    exit_code = exit_codes.BAD_SETTING


class BadRole(UsageError):
    """The roles of a run are invalid.

    The roles are ``trainer``, ``server`` and ``evaluator``, each a ``shoal.Role`` with ``count`` (a number, or MIN:MAX
    for trainers), ``memory`` (such as ``"2GiB"``) and ``cpus``. Only runs with ``stale:K`` or ``async`` have servers. A
    run has at most one evaluator, and none with ``--compat``, because Shoal cannot read such a script's checkpoints.
    """

    code = "S123"
    exit_code = exit_codes.BAD_SETTING


class UnknownEngine(UsageError):
    """A pool, or ``shoal.run(on=…)``, names an engine that does not exist.

    An engine starts agents on machines; ``local`` uses this machine. The error lists the installed engines.
    """

    code = "S130"


class NotShippable(UsageError):
    """The function given to ``shoal.run`` cannot be sent to the members.

    A function in a module that members can import is sent by name. Any other function, such as one from a notebook, is
    sent by value. That needs ``pip install 'shoal-train[notebook]'`` and the same minor version of Python on both
    sides, because byte code differs between versions, and the function must not refer to open files, locks or
    connections.
    """

    code = "S131"


class BadFiles(UsageError):
    """A file that should travel with the run cannot be used.

    It comes from ``files=`` or from the project directory, and cannot be read, has a name that is taken or outside the
    directory, or makes the project larger than the limit. Correct the list, or exclude large files from the project.
    """

    code = "S132"


class InsideMember(UsageError):
    """``shoal.run`` was called by a member of a run.

    Members import the module that holds the function, so a call of ``shoal.run`` at its top level would start another
    run in each of them. Put the call under ``if __name__ == "__main__":``.
    """

    code = "S133"


class BadPool(UsageError):
    """A pool of machines in ``shoal.toml`` is invalid.

    Every ``[pool.NAME]`` names its engine and that engine's options; ``docs/howto/pools.md`` lists them.
    """

    code = "S140"
    exit_code = exit_codes.BAD_SETTING


class BadBudget(UsageError):
    """The budget of a run is invalid, or too small to stop the run cleanly.

    ``--budget 12.5`` is in the currency of the pools' prices; machines of pools without a price are free. As the budget
    runs out, Shoal releases the most expensive machines first. When only the cost of a clean stop remains, the run
    writes a checkpoint and ends with exit code 6. ``shoal resume RUN --budget MORE`` continues it.
    """

    code = "S150"
    exit_code = exit_codes.BAD_SETTING


class BadLabels(UsageError):
    """A constraint on machines is invalid, or no pool of the run satisfies it.

    ``--where gpu=a100,zone=b`` selects pools with ``labels = {gpu = "a100", zone = "b"}``; all labels must match.
    """

    code = "S151"
    exit_code = exit_codes.BAD_SETTING


class SlotTooSmall(UsageError):
    """A role needs more CPUs or memory than one slot of a pool offers.

    A pool that states the size of its machines (``cpus_per_task`` and ``memory`` for Slurm, ``cpus`` and
    ``memory_bytes`` for Ray) divides it by ``slots``. Reduce the role's needs, lower ``slots``, or request larger
    machines. A pool that states no size is asked for what the role needs.
    """

    code = "S152"
    exit_code = exit_codes.BAD_SETTING
