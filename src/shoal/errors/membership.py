"""S2xx: a process cannot take part in a run, or cannot talk to the processes that do."""

from shoal import exit_codes
from shoal.errors.base import ShoalError


class MembershipError(ShoalError):
    """A process cannot take part in a run, or the coordinator rejected what it sent.

    The error has the coordinator's own words. ``shoal why RUN`` shows what the coordinator decided before.
    """

    code = "S200"
    exit_code = exit_codes.UNAVAILABLE


class WrongToken(MembershipError):
    """The coordinator does not accept the token of this request.

    Every coordinator has a random token, in a file that only its owner can read; ``shoal coordinator`` prints the path.
    Pass that file with ``--token-file``. After many wrong tokens the coordinator refuses the client for ten seconds. A
    request that a web page of another site could have sent is refused with the same code.
    """

    code = "S201"


class VersionMismatch(MembershipError):
    """Two processes of one run speak different versions of Shoal's protocol.

    The protocol has no compatibility between versions. Install the same version of Shoal on both machines.
    """

    code = "S202"


class UnknownRunForMember(MembershipError):
    """A member tried to join a run that has ended, or that this coordinator does not have.

    ``shoal ps`` lists the runs of this machine. A member that is left over from an ended run can be stopped.
    """

    code = "S203"


class PeerUnreachable(MembershipError):
    """A member cannot open a connection to another member.

    Every member listens on one port and announces all addresses of its machine; its peers try them in turn. A firewall,
    a host name that resolves to a loopback address, or a wrong ``interface`` setting can make all of them fail. ``shoal
    doctor POOL`` shows which addresses fail and what to do about it.
    """

    code = "S204"


class NameTaken(MembershipError):
    """Another live process already uses this name: a member of the same run, or an agent of the same coordinator.

    Members and agents are known by their names. Stop the other process, or pass another name with ``--name``.
    """

    code = "S205"


class ModelMismatch(MembershipError):
    """A member's model, optimizer or data differs from what the run trains.

    All members must build the same parameters (names, shapes, types) and the same kind of optimizer, and must pass the
    same data, batch size, epochs and seed to ``run.batches``. A few samples are compared: data that differs was most
    often split or generated without a seed. Run the same script, with the same arguments and library versions, on every
    machine.
    """

    code = "S206"


class CoordinatorUnreachable(MembershipError):
    """The coordinator does not answer.

    It has ended, is being restarted, or its address cannot be reached from here. ``shoal ps`` shows whether it is
    running; check ``--url`` if it is on another machine.
    """

    code = "S207"


class BadMessage(MembershipError):
    """A message is malformed, too large or of an unknown type; it was dropped.

    Processes of one version of Shoal do not send such messages to each other. Another program uses the port, or the
    versions differ: install the same version on both machines.
    """

    code = "S208"


class BadCredentials(MembershipError):
    """The coordinator's token file is missing, unreadable or malformed, or the URL would send the token in clear.

    Its first line is the token. A PEM certificate may follow, and is then the only one that is trusted; the URL must
    begin with ``https://`` then.
    ``shoal coordinator`` writes the file; copy it unchanged to the other machines.
    """

    code = "S211"


class UnknownBlob(MembershipError):
    """An agent requested a file of a project or an environment that the coordinator does not have.

    Such files are uploaded when a run is submitted. Start the run again to upload it.
    """

    code = "S212"


class PermissionDenied(MembershipError):
    """A named user requested something that only the owner of the coordinator, or of the run, may do.

    A user with a token from ``shoal token NAME`` may submit runs, see all runs and change their own. Ask the owner for
    everything else.
    """

    code = "S213"


class PeerPortFailed(MembershipError):
    """The port on which a member accepts connections of its peers stopped working, so the member ends.

    Without it the member would go on until the next change of the world and then keep all others waiting. It is started
    again as after a crash. Its log has the cause; if it is not the machine (too little memory, too many open files),
    please report it.
    """

    code = "S214"


class AlreadyJoined(MembershipError):
    """A process tried to join a run in which it, or another process of the same member, takes part already.

    An agent starts one process for each member, and that process joins once. Call ``join()`` once, and pass the run to
    where it is needed. A script that starts processes of its own (``os.fork``, ``multiprocessing``) joins in only one
    of them; ask for more members with ``-n`` instead.
    """

    code = "S215"


class NoCoordinatorAddress(CoordinatorUnreachable):
    """None of the coordinator's addresses can be reached from this machine.

    Agents open connections to one port of the coordinator and need no other. They try every address that it may have,
    and use the first that proves to be the coordinator. Open that port between the machines (``port = 29300`` fixes its
    number), or set a reachable address with ``address = "gateway.lab:29300"``.
    """

    code = "S230"


class MachineCheckFailed(MembershipError):
    """A machine that ``shoal doctor POOL`` was checking is not connected, or stopped answering.

    Look at the log of its agent, ``agent.log`` in the directory of the allocation, and run the check again.
    """

    code = "S231"
