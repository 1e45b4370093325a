"""S5xx: something cannot be read from or written to durable storage."""

from shoal import exit_codes
from shoal.errors.base import ShoalError


class StorageError(ShoalError):
    """Something could not be read from or written to storage.

    The error has the path and the reason that the operating system gave.
    """

    code = "S500"
    exit_code = exit_codes.UNAVAILABLE


class StateMalformed(StorageError):
    """The bytes of a training state, from a member or a checkpoint, are inconsistent; nothing was loaded.

    Shoal retries with an older checkpoint, or requests the state again from a member. If it happens every time, the two
    sides run different versions of Shoal or of the script.
    """

    code = "S501"


class StoreUnusable(StorageError):
    """The checkpoint location does not exist, cannot be read or written, or needs a package that is not installed.

    Set another location with ``--set checkpoint.to=PATH_OR_URL``, correct its permissions, or install the package that
    the error names.
    """

    code = "S502"


class CheckpointFailed(StorageError):
    """A checkpoint could not be written; training continues and earlier checkpoints are intact.

    Usually the disk is full or the connection to the store failed. Shoal tries again when the next checkpoint is due.
    """

    code = "S503"


class CheckpointDamaged(StorageError):
    """A checkpoint exists, but its bytes are not those that were written: truncated, torn or changed.

    Shoal tries older checkpoints in turn and raises this error only if all of them are damaged. Restore the directory
    from a backup, or start a new run.
    """

    code = "S504"


class NoCheckpoint(StorageError):
    """The checkpoint location holds no complete checkpoint.

    Check ``checkpoint.to`` and the name of the run. A run that ended before its first checkpoint starts over.
    """

    code = "S505"


class HomeUnusable(StorageError):
    """Shoal's home directory cannot be created or written.

    Shoal keeps runs, logs and checkpoints in ``~/.shoal``, or in ``SHOAL_HOME`` if that is set. Correct its
    permissions, or set ``SHOAL_HOME`` to a writable directory.
    """

    code = "S510"


class JournalUnwritable(StorageError):
    """The coordinator cannot write its journal or another file in its directory, so it accepts no changes.

    Usually the disk is full. Members continue to train in their present world. Free some space: the coordinator then
    writes down what happened meanwhile and acts on it.
    """

    code = "S520"


class JournalDamaged(StorageError):
    """A line of the coordinator's journal, or its snapshot, cannot be read, so the coordinator does not start.

    The disk or another program changed the file. (An incomplete last line is normal after a crash and is removed.)
    Restore the file from a backup. Or step past what is unreadable: ``shoal doctor --repair DIRECTORY`` lists what it
    skips, keeps the damaged file beside the repaired one, and the coordinator starts again.
    """

    code = "S521"


class JournalLocked(StorageError):
    """Another coordinator uses this directory, so the second one exits.

    Stop the running coordinator first, or start this one in another directory.
    """

    code = "S522"


class DirectoryVersionMismatch(StorageError):
    """A coordinator's directory was written by a version of Shoal with another protocol.

    Journals are not converted between versions. Start the coordinator in a new directory, or use the version that the
    error names to read the old one.
    """

    code = "S523"


class EventUnstorable(StorageError):
    """A request or message has a value that the journal cannot hold, so it was refused and nothing has changed.

    Such as NaN, an infinity, an integer beyond 64 bits, or a text that is not valid Unicode. The error names it. Send
    an ordinary value.
    """

    code = "S524"


class BadDirectory(StorageError):
    """The directory given for a coordinator is open to other users and used for something else.

    A coordinator closes its directory to others, because tokens and the output of users are in it. It does that to an
    empty directory and to one that a coordinator has used before, but not to one with other files.
    """

    code = "S525"


class PackDamaged(StorageError):
    """The function or the files of a run are not what ``shoal.run`` wrote, so the member does not load them.

    They are signed with the run's token. A wrong signature means that the files are damaged, or that someone else has
    changed them. Start the run again.
    """

    code = "S530"


class ArchiveDamaged(StorageError):
    """The packed environment of a pool could not be unpacked on a machine.

    The archive is incomplete or of another format than its name says. Pack the environment again.
    """

    code = "S540"


class RemoteDiskFull(StorageError):
    """The disk of a machine is full, or its quota is used up, so the environment cannot be stored there.

    Set another ``directory`` for the pool. Environments that have not been used for 30 days are removed automatically.
    """

    code = "S541"


class RemoteCacheUnwritable(StorageError):
    """The environment cannot be stored on a machine, because the pool's ``directory`` there is not writable.

    Set another ``directory`` for the pool, or correct its permissions on the machine.
    """

    code = "S542"


class UnknownFile(StorageError):
    """The run has no file with this name at its coordinator.

    It was never saved, or has been pruned. ``shoal fetch RUN`` fetches all files that exist.
    """

    code = "S545"


class UploadCorrupt(StorageError):
    """A file that a member uploaded to the coordinator arrived incomplete or changed; it was discarded.

    A checkpoint is retried when the next one is due. A saved file is still on the machine that the error names.
    """

    code = "S546"


class CoordinatorFull(StorageError):
    """The coordinator's disk has no space for the checkpoints and files that members upload; training continues.

    The coordinator reserves the last part of the disk for its own journal. Free space on the disk that holds its
    directory, or send checkpoints elsewhere with ``--set checkpoint.to=URL``.
    """

    code = "S547"


class OutputUploadFailed(StorageError):
    """A file that a member saved could not be uploaded to the coordinator, which does not share the member's disk.

    The file is still on that machine, at the path that the error names, until the machine is released. Copy it from
    there, or fix the connection and save again.
    """

    code = "S548"
