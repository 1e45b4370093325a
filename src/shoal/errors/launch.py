"""S4xx: a process, an agent, a service or a machine cannot be started."""

from shoal import exit_codes
from shoal.errors.base import ShoalError


class LaunchError(ShoalError):
    """A process, an agent or a service could not be started.

    The error names the log file or the machine that has the details.
    """

    code = "S400"
    exit_code = exit_codes.UNAVAILABLE


class IncompleteEnvironment(LaunchError):
    """A process has some of the environment variables that an agent sets, but not all.

    A process with ``SHOAL_URL`` is taken for a member that an agent started. Unset the ``SHOAL_…`` variables to train
    standalone, or start the script with ``shoal run``.
    """

    code = "S401"


class WarmProcessFailed(LaunchError):
    """The warm process from which an agent forks members did not start a member, or keeps crashing.

    Usually a module that it imports in advance crashes the interpreter, or the machine is out of memory. The agent's
    log has its last output.
    """

    code = "S402"


class ForeignProcess(LaunchError):
    """An agent was asked to stop a process that it did not start; the process was left alone.

    The system reuses process ids, so an agent checks before it stops anything. Stop the process yourself if it is
    yours.
    """

    code = "S403"


class PortsTaken(LaunchError):
    """No port is free for a member to listen on.

    Every member listens on one port for its peers. With ``ports = "29400-29499"`` it takes the first free port of that
    range, so make the range larger than the number of members on one machine. Without ``ports`` the system picks one.
    """

    code = "S404"


class MemoryLimitExceeded(LaunchError):
    """A member used more memory than its role allows, and its agent killed it.

    The limit is the ``memory`` of its ``shoal.Role``. It counts the process and all its descendants; memory shared with
    other processes counts in proportion. Raise the limit, or use smaller micro-batches (``batching={"micro": …}``).
    """

    code = "S405"


class ServiceFailed(LaunchError):
    """The coordinator or the agent that ``shoal run`` starts ended before it was ready, or keeps ending.

    Its output is in ``coordinator.log`` or ``agent.log`` in the directory that the error names.
    """

    code = "S410"


class PortInUse(LaunchError):
    """The coordinator cannot listen on its address: another process uses the port, or the host is not this machine.

    A restarted coordinator keeps its port, because its members look for it there. Stop the other process, or choose
    another address for a new coordinator.
    """

    code = "S420"


class EngineUnreachable(LaunchError):
    """A pool's host, controller or cluster does not answer.

    Shoal retries by itself, with growing pauses, and meanwhile requests machines from the run's other pools. If it does
    not recover, try the command that the error names by hand.
    """

    code = "S430"


class AllocationRefused(LaunchError):
    """A pool refused a request for a machine: an unknown partition, a wrong key, a quota of zero.

    Nothing was started. Correct the ``[pool.NAME]`` that the error names.
    """

    code = "S431"


class ProjectDeliveryFailed(LaunchError):
    """The project of a run could not be fetched by an agent, or could not be written on its machine.

    Agents fetch it from the coordinator, through the port that they are connected to. Check that port and the free
    space on the machine's disk.
    """

    code = "S432"


class BadEnvironment(AllocationRefused):
    """The ``environment`` of a pool does not exist, or is not of a kind that Shoal can send to machines.

    It must be a requirements file, a ``pylock.toml``, a packed environment (conda-pack, venv-pack, tar), a ``.pex``, or
    ``"shoal"`` for Shoal alone. Nothing was started.
    """

    code = "S440"


class EnvironmentNotBuilt(LaunchError):
    """The environment of a pool could not be installed on a machine.

    The error ends with pip's last lines; the whole log is on the machine, at the path that the error names. If machines
    reach no package index, name one in the file (``--index-url``, ``--find-links``) or set ``PIP_INDEX_URL`` in the
    pool's ``setup``.
    """

    code = "S441"


class PythonTooOld(LaunchError):
    """The Python of a machine is older than Shoal needs.

    Name a newer one as the pool's ``python``, or pack one into the pool's ``environment`` (``conda-pack``).
    """

    code = "S442"


class VenvUnavailable(LaunchError):
    """The Python of a machine cannot create virtual environments: its ``venv`` or ``ensurepip`` is missing.

    Install them there (``python3-venv`` on Debian and Ubuntu), name another ``python``, or use a packed environment.
    """

    code = "S443"


class EnvironmentNotFetched(LaunchError):
    """A machine could not download its environment from the coordinator.

    It uses the port through which agents talk to the coordinator, and no proxy. Open that port between the machines.
    """

    code = "S444"


class EnvironmentUnusable(LaunchError):
    """An agent cannot start in the environment of a pool.

    Its Python does not run on the machine, or a package that Shoal needs is missing. A packed environment must match
    the machine's system and processor, and must contain Shoal's dependencies: install them before packing.
    """

    code = "S445"


class FetchFailed(LaunchError):
    """The files that a run saved could not all be written to the requested directory.

    No file is left half-written. Free space or choose another directory; ``shoal fetch RUN`` fetches what is missing.
    """

    code = "S450"


class PoolCheckFailed(LaunchError):
    """``shoal doctor POOL`` could not check any machine, because none that it requested has started.

    The error has the engine's own message. All machines that were requested have been released.
    """

    code = "S455"


class NoMachines(LaunchError):
    """A run cannot start: none of its pools provides a machine.

    The error lists each pool's reason and remedy. Shoal does not wait for a pool that refuses (unknown partition, wrong
    key, no space, limit of zero). It retries a pool that is full or unreachable until ``start_timeout_s`` expires, and
    waits without limit for machines in a queue. Machines that did start have been released. A run that has started
    training never fails for this reason: it waits for machines.
    """

    code = "S470"


class PoolFull(LaunchError):
    """All machines of a pool are in use.

    Shoal retries by itself. Add machines or slots to the pool, or another pool to the run.
    """

    code = "S471"
