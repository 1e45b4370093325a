"""Every error that Shoal raises, with a stable code, a cause and a remedy.

::

    ShoalError
    ├── UsageError       S1xx  the command line, shoal.toml, arguments of the API        exit 2 or 3
    ├── MembershipError  S2xx  tokens, versions, names, worlds, reaching each other      exit 4
    ├── TrainingError    S3xx  the script, the model, the data                           exit 1
    ├── LaunchError      S4xx  agents, processes, ports, machines                        exit 4
    └── StorageError     S5xx  journal, checkpoints, files                               exit 4

A code is a class: its docstring is what ``shoal explain CODE`` prints.
"""

from __future__ import annotations

from typing import ClassVar


class ShoalError(Exception):
    """Something went wrong that Shoal can name."""

    code: ClassVar[str] = "S000"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.do = do

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.what}"]
        for label, text in (("where", self.where), ("why", self.why), ("do", self.do)):
            if text:
                lines.append(f"  {label:<6} {text}")
        lines.append(f"  {'more':<6} shoal explain {self.code}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.why, self.do))


def _rebuild(kind: type[ShoalError], what: str, where: str, why: str, do: str) -> ShoalError:
    return kind(what, where=where, why=why, do=do)


class UsageError(ShoalError):
    """A command or a call was given something that it cannot use."""

    code = "S100"
    exit_code = 2


class MembershipError(ShoalError):
    """A process could not take part in a run."""

    code = "S200"
    exit_code = 4


class TrainingError(ShoalError):
    """The script, the model or the data cannot be trained as asked."""

    code = "S300"
    exit_code = 1


class LaunchError(ShoalError):
    """A process, an agent or a service could not be started."""

    code = "S400"
    exit_code = 4


class StorageError(ShoalError):
    """Something could not be read from or written to storage."""

    code = "S500"
    exit_code = 4


class WrongToken(MembershipError):
    """The token that was sent is not the coordinator's.

    Every coordinator has a random token in a file that only its owner can read. Pass that file with
    ``--token-file``; ``shoal coordinator`` prints where it is.
    """

    code = "S201"


class VersionMismatch(MembershipError):
    """Two processes of one run speak different versions of Shoal's protocol.

    Install the same version of Shoal on both machines.
    """

    code = "S202"


class UnknownRunForMember(MembershipError):
    """A member asked for a run that this coordinator does not have, or that has ended."""

    code = "S203"


class PeerUnreachable(MembershipError):
    """A member cannot open a connection to another member.

    Every member listens on one port of its machine, and announces all addresses of that machine; the others try them
    one after another. ``shoal doctor POOL`` tells which of them lead nowhere, and what to do about it.
    """

    code = "S204"


class NameTaken(MembershipError):
    """Two live members of one run have the same name."""

    code = "S205"


class ModelMismatch(MembershipError):
    """A member's model, optimizer or data is not the one that the run trains.

    All members must build the same parameters (names, shapes, types), the same kind of optimizer, and pass the
    same data length, batch size, epochs and seed to ``run.batches``.
    """

    code = "S206"


class CoordinatorUnreachable(MembershipError):
    """The coordinator did not answer within the time allowed."""

    code = "S207"


class BadMessage(MembershipError):
    """A message from the network was malformed, too large, or of an unknown kind. It was dropped."""

    code = "S208"


class LeaseLost(MembershipError):
    """A member was silent for longer than its lease, so the others went on without it."""

    code = "S209"


class BadSettings(UsageError):
    """A setting of the run is unknown or has a value that it cannot take.

    ``shoal config`` prints every setting with its value and where that came from.
    """

    code = "S101"
    exit_code = 3


class BadPlan(UsageError):
    """The plan that shares a global batch out over the members is not understood, or cannot be kept.

    ``model`` gives everyone what its measured speed deserves; ``ratio`` does so by the law b' = b * mean(t) / t;
    ``equal`` gives everyone the same; ``fixed:3,1`` gives rank 0 three times as much as the others. Floors must not be
    above caps, and the members' caps together must hold the global batch.
    """

    code = "S102"


class BadSync(UsageError):
    """The way in which members keep together is not understood.

    ``step``: all commit every step together. ``stale:K``: servers hold the parameters, and nobody is ever more than K
    batches of its own ahead of the slowest; K is 0 or more. ``async``: the same without a bound. ``local:H``: members
    train for themselves for H global batches, then average what they have learned; H is 1 or more.
    """

    code = "S103"
    exit_code = 3


class UnsupportedWithServers(TrainingError):
    """The script uses something that cannot be done when servers hold the parameters (``stale:K`` and ``async``).

    Servers apply gradients tensor by tensor, as they arrive: there is no moment at which one process has the whole
    gradient of a step. So there is no GradScaler, no schedule that needs a metric, no BatchNorm over the whole batch,
    and no ``run.stream``; in Keras no loss scaling, no ``global_clipnorm`` and no tf.data pipeline. All of that works
    with ``--sync step``. Keras' optimizers are made anew for every part of a model, from what ``get_config`` returns.
    """

    code = "S316"


class BadSize(TrainingError):
    """A size that must be a positive whole number is not, or an option of the data has an unknown value."""

    code = "S301"


class EmptyDataset(TrainingError):
    """There is not one sample to train on."""

    code = "S302"


class DatasetTooSmall(TrainingError):
    """The dataset has fewer samples than one global batch.

    Every step would be smaller than asked, and with ``last="drop"`` there would be no step at all. Ask for a global
    batch that is at most as large as the dataset.
    """

    code = "S303"


class SampleFailed(TrainingError):
    """The dataset raised an error while it read a sample, or its samples could not be put into one batch.

    The error names the sample; ``dataset[that index]`` in a Python prompt shows it alone.
    """

    code = "S304"


class LoaderDied(TrainingError):
    """A process that reads data for a member ended unexpectedly.

    Most often the machine ran out of memory or of shared memory (/dev/shm), or native code crashed. Ask for
    fewer workers, or ``workers=0`` to see the cause.
    """

    code = "S305"


class IncompleteEnvironment(LaunchError):
    """A process has some of the variables that an agent sets, but not all."""

    code = "S401"


class StateUnsupported(TrainingError):
    """A part of the training state holds something that Shoal cannot hand over to another member.

    State travels without pickle: numbers, text, bytes, None, tensors, NumPy arrays, and dicts, lists, tuples, sets and
    deques of these. Give anything else its own pair of functions that turn it into such values and back:
    ``run.state("name", save=lambda: ..., load=lambda value: ...)``.
    """

    code = "S310"


class StateMalformed(StorageError):
    """The bytes of a state, from a member or a checkpoint, do not describe a state that fits together.

    Nothing was loaded. If it came from a checkpoint, an older one is tried; if it came from a member, it is asked for
    again. If it happens always, the two sides run different versions of Shoal.
    """

    code = "S501"


class StoreUnusable(StorageError):
    """The place for checkpoints cannot be used: it does not exist, cannot be written to, or needs a missing package.

    Name another with ``--set checkpoint.to=PATH_OR_URL``, mend its permissions, or install the package that is named.
    """

    code = "S502"


class CheckpointFailed(StorageError):
    """A checkpoint could not be written; the training goes on and the previous checkpoints are unharmed.

    Usually the disk is full or the connection to the store was lost. The next checkpoint is tried when it is due.
    """

    code = "S503"


class CheckpointDamaged(StorageError):
    """A checkpoint exists, but its bytes are not those that were written: truncated, torn or changed.

    Older checkpoints are tried in turn; this error is raised only if none is good.
    """

    code = "S504"


class NoCheckpoint(StorageError):
    """There is no complete checkpoint where one was looked for.

    Check ``checkpoint.to`` and the name of the run. A run that ended before its first checkpoint starts anew.
    """

    code = "S505"


class BadConfigFile(UsageError):
    """shoal.toml, or ``[tool.shoal]`` of pyproject.toml, cannot be read or has a table that Shoal does not know.

    Shoal looks for the file in the working directory and then upwards. ``shoal config`` says which one it found.
    """

    code = "S110"
    exit_code = 3


class BadScript(UsageError):
    """The script or module that is to be trained does not exist or cannot be read."""

    code = "S111"


class BadCount(UsageError):
    """The number of members is not understood.

    ``-n 4`` asks for exactly four, ``-n 2:8`` for at least two and at most eight. With a range the run goes on
    without those that are lost, as long as the least number is there.
    """

    code = "S112"


class UnknownRun(UsageError):
    """No coordinator on this machine, or at the address given, has a run of that name or id."""

    code = "S113"


class AmbiguousRun(UsageError):
    """More than one run has that name or begins with those characters. Use more of the id; ``shoal ps`` lists them."""

    code = "S114"


class UnknownCode(UsageError):
    """There is no error with that code."""

    code = "S115"


class RunStillActive(UsageError):
    """The run is still going on, so it cannot be resumed."""

    code = "S116"


class ServiceFailed(LaunchError):
    """The coordinator or the agent that ``shoal run`` starts ended before it was ready, or kept ending.

    Its own words are in ``coordinator.log`` or ``agent.log`` in the directory that the error names.
    """

    code = "S410"


class HomeUnusable(StorageError):
    """Shoal's directory cannot be made or written.

    Shoal keeps runs, logs and checkpoints in ``~/.shoal``, or where ``SHOAL_HOME`` says.
    """

    code = "S510"


class BadCredentials(MembershipError):
    """The file with the coordinator's token is missing, unreadable, or not such a file.

    Its first line is the token; a certificate in PEM may follow, which is the only one that is then trusted.
    ``shoal coordinator`` writes it; copy it to the other machines as it is.
    """

    code = "S211"


class WarmProcessFailed(LaunchError):
    """The warm process, from which an agent starts members, does not come up or keeps dying.

    The agent's log has its last words. Most often a module that it imports beforehand crashes the interpreter, or the
    machine has no memory left.
    """

    code = "S402"


class ForeignProcess(LaunchError):
    """An agent was asked to end a process that it did not start. It was left alone."""

    code = "S403"


class BadNoticeSource(UsageError):
    """The source of notices is not known.

    ``notice.source`` is one of aws, gcp, azure, slurm, ``file:PATH``, or the name of an installed plug-in.
    """

    code = "S117"
    exit_code = 3


class JournalUnwritable(StorageError):
    """The coordinator's journal cannot be written, so it makes no more changes.

    Members train on in their world. When there is room again, what happened meanwhile is written down and acted on.
    """

    code = "S520"


class JournalDamaged(StorageError):
    """The coordinator's journal cannot be read in the middle. A torn last line is no damage: it is cut off."""

    code = "S521"


class JournalLocked(StorageError):
    """Two coordinators were started on one directory; the second one ends at once."""

    code = "S522"


class PortInUse(LaunchError):
    """The coordinator's address cannot be listened on: another process has the port, or the host is not this machine.

    A coordinator that is started again keeps its port, because its members look for it there.
    """

    code = "S420"


class RunAlreadyEnded(UsageError):
    """The run has ended, so it cannot be stopped or scaled. ``shoal resume`` continues one that can be continued."""

    code = "S120"


class BadEmulation(UsageError):
    """The text of ``--emulate`` cannot be read.

    It lists the relative speed of each member's machine, in (0, 1], with a comma between them: ``1,0.5,0.25``. A speed
    that changes is followed by a colon, the next speed, ``@`` and the step from which on it holds: ``1,0.5:0.125@300``.
    With ``sample_s=0.002``, and perhaps ``fixed_s=0.01``, a step takes fixed_s + sample_s * samples / speed seconds,
    whatever the real work is.
    """

    code = "S122"
    exit_code = 3


class BadRequest(UsageError):
    """A request to the coordinator is not what its API takes."""

    code = "S121"


class PortsTaken(LaunchError):
    """No port is free for a member to listen on.

    Every member listens on one port for its peers. With ``ports = "29400-29499"`` it takes the first free one of that
    range, so the range must be larger than the number of members on one machine; without it the system picks one.
    """

    code = "S404"


class ShardChanged(TrainingError):
    """A shard of a stream gave another number of samples than when it was read before.

    Samples can be counted exactly once only if a shard gives the same samples in the same order whenever it is opened.
    """

    code = "S306"


class UnusableShard(TrainingError):
    """A shard of a stream cannot be opened again and again.

    Pass functions without arguments that open the shard, objects that can be iterated over anew, or paths together
    with ``open=``.
    """

    code = "S307"


def catalog() -> dict[str, type[ShoalError]]:
    """Every error class by its code."""
    found: dict[str, type[ShoalError]] = {}
    waiting: list[type[ShoalError]] = [ShoalError]
    while waiting:
        kind = waiting.pop()
        found[kind.code] = kind
        waiting.extend(kind.__subclasses__())
    return dict(sorted(found.items()))


def from_code(code: str, what: str, *, where: str = "", why: str = "", do: str = "") -> ShoalError:
    """The error of a code that came over the network."""
    return catalog().get(code, ShoalError)(what, where=where, why=why, do=do)


class UnusableBackward(TrainingError):
    """The loop's use of backward, optimizer or zero_grad does not make one step of one batch.

    For each batch that ``run.batches`` gives, call ``run.backward(loss)`` once and then ``optimizer.step()`` once. A
    closure passed to ``optimizer.step`` (LBFGS) evaluates the model several times a step and cannot be used.
    """

    code = "S311"


class NotAttached(TrainingError):
    """The run was asked to train before it was given a model and an optimizer. Call ``run.attach`` first."""

    code = "S312"


class SecondTrainingLoop(TrainingError):
    """One run has one training loop: ``run.batches``, ``run.stream`` or ``model.fit`` was called a second time.

    A member that joins later must know which loop the run is in. Make one loop over all epochs; ``run.epoch`` and
    ``run.epoch_ended`` tell where it is.
    """

    code = "S313"


class MembersDiverged(TrainingError):
    """The members of a world are not at the same step, or do not agree on their shares or learning rates.

    Nothing of the step was applied. A schedule that follows a number, such as ``ReduceLROnPlateau``, must be given the
    same one on every member.
    """

    code = "S314"


class UnsupportedInExactMode(TrainingError):
    """What was asked for cannot be had in exact mode, in which no bit of the result depends on the members.

    Exact mode cuts every global batch into shards (``run.batches(..., exact=16)``) that are computed one by one on
    CPUs. It excludes ``micro``, ``run.sync_batchnorm`` and ``run.stream``.
    """

    code = "S315"


class UnsupportedWithLocalSgd(TrainingError):
    """The script uses something that cannot be done when members train for themselves (``local:H``).

    Between two exchanges members do different numbers of steps, on batches of their own: nothing may have to be
    exchanged within a batch (``run.sync_batchnorm``), the data must be one that can be indexed (no ``run.stream``, no
    ``exact=``, no tf.data pipeline), and a scheduler is stepped after every batch, or once a round or an epoch. An
    optimizer of Keras neither keeps averages of the model (``use_ema``) nor counts batches
    (``gradient_accumulation_steps``).
    """

    code = "S317"


class UnusableModel(TrainingError):
    """A Keras model cannot be trained by a run as it is compiled.

    Shoal takes the gradients that ``train_step`` hands to ``self.optimizer``, once a step, and sums them over all
    members. So there is one optimizer, which is applied once a step, no ``tf.distribute`` strategy beside it, and the
    TensorFlow or PyTorch backend.
    """

    code = "S318"


class UnusableData(TrainingError):
    """Data cannot be shared out: it has no length, no index, no end, or its parts do not fit together.

    For PyTorch, pass ``run.batches`` the data set itself, not a DataLoader; ``run.stream`` reads what has no index.
    """

    code = "S319"


class EvaluatorDiffers(TrainingError):
    """The evaluator has built another model than the one whose checkpoint it should evaluate.

    The evaluator runs the same script as the trainers, and loads their checkpoints into what the script attaches. So
    the script must build the same model, optimizer and schedulers whatever its role is. The training is not harmed.
    """

    code = "S320"


class BadEvaluation(TrainingError):
    """An evaluation cannot be used: what it returns, or what ``run.evaluate`` was asked for.

    The function returns a dict of numbers by name, such as ``{"accuracy": 0.9}``; ``best`` names one of them, as
    ``max:accuracy`` or ``min:loss``; ``patience`` and ``export`` need a ``best``.
    """

    code = "S321"


class NothingToEvaluate(TrainingError):
    """A run has an evaluator, but its script does not say how to evaluate the model.

    Call ``run.evaluate(fn)`` before the loop (Keras: ``shoal.Elastic(evaluate=…)``), or leave ``--evaluator`` out. The
    training is not harmed.
    """

    code = "S322"


class BadMetric(TrainingError):
    """Something that is no number was given to ``run.log``.

    Numbers of Python, and scalars of NumPy, PyTorch and TensorFlow are shown with the run, as are arrays with one
    element. Text is not, nor are arrays: log their mean, or one of their elements.
    """

    code = "S323"


class FrameworkMissing(TrainingError, ImportError):
    """The framework that a script trains with is not installed in the Python that runs it.

    ``pip install 'shoal-train[torch]'`` brings PyTorch along, ``pip install 'shoal-train[keras]'`` Keras and
    TensorFlow. On other machines it is the Python of their agents that must have it, or the ``environment`` of
    their pool.
    """

    code = "S324"


class UnknownEngine(UsageError):
    """``shoal.run(on=…)`` names nothing that can start machines.

    An engine is what starts agents; ``local`` uses this machine.
    """

    code = "S130"


class BadRole(UsageError):
    """A run cannot have the roles that it was asked for.

    The roles are ``trainer``, ``server`` and ``evaluator``, each a ``shoal.Role`` with ``count`` (a number, or MIN:MAX
    for trainers), ``memory`` (such as ``"2GiB"``) and ``cpus``. A run has at most one evaluator, and none beside an
    unmodified script (``--compat``), whose checkpoints are its own.
    """

    code = "S123"
    exit_code = 3


class NotShippable(UsageError):
    """The function that was given to ``shoal.run`` cannot get to the members.

    A function of a module that members can import travels by its name. Any other, such as one from a notebook, travels
    by value, which needs ``pip install 'shoal-train[notebook]'`` and nothing in it that is bound to its process: open
    files, locks, sessions. It also needs the same Python there, such as 3.11: what one has compiled, another misreads.
    """

    code = "S131"


class BadFiles(UsageError):
    """``files=`` of ``shoal.run`` names something that cannot be taken along."""

    code = "S132"


class InsideMember(UsageError):
    """``shoal.run`` was called by a member of a run.

    Members import the module that holds the function, so that a call of ``shoal.run`` at its top level would be made
    again by each of them. Put the call under ``if __name__ == "__main__":``.
    """

    code = "S133"


class BadExperiment(TrainingError):
    """What the function given to ``shoal.run`` returned cannot be trained.

    It returns a ``shoal.Experiment``: with a compiled Keras model, or with a PyTorch module, its optimizer and a loss.
    """

    code = "S330"


class ExperimentFailed(TrainingError):
    """The function given to ``shoal.run`` raised an error when a member called it.

    The cause is above it in the member's log: ``run.logs()`` or ``shoal logs RUN``.
    """

    code = "S331"


class RunFailed(TrainingError):
    """A run that was waited for did not come to a good end.

    ``run.story()`` and ``shoal why RUN`` tell what happened, ``run.logs()`` and ``shoal logs RUN`` what members
    printed.
    """

    code = "S332"


class PackDamaged(StorageError):
    """What a run took along (its function and files) is not what ``shoal.run`` wrote.

    A pack is signed with the run's token. It is not used if the signature does not fit: then somebody else has
    changed it, or it is damaged.
    """

    code = "S530"


class MemoryLimitExceeded(LaunchError):
    """A member used more memory than its role has, and was ended by its agent.

    The limit is the ``memory`` of its ``shoal.Role``. It counts what the process and all that it started hold; what
    they share with other processes counts in part. Give the role more, or train with ``batching={"micro": …}``.
    """

    code = "S405"


class BadPool(UsageError):
    """A pool of machines in shoal.toml cannot be used as it is written.

    Every ``[pool.NAME]`` names its engine; ``docs/pools.md`` lists what each engine can be told.
    """

    code = "S140"
    exit_code = 3


class EngineUnreachable(LaunchError):
    """What starts machines for a pool does not answer now: a host, a controller, a cluster.

    It is asked again by itself, with longer and longer pauses; meanwhile other pools are asked for what is missing.
    """

    code = "S430"


class AllocationRefused(LaunchError):
    """An engine will not start an agent as it was asked to: an unknown partition, a wrong key, a quota of zero.

    Nothing was started. Correct the ``[pool.NAME]`` that the error names.
    """

    code = "S431"


class NoMachines(LaunchError):
    """A run has not begun, and cannot: none of its pools gives it a machine.

    Each pool is named with what it said and what to do about it. A pool that refuses (an unknown partition, a wrong
    key, no space, a limit of zero) is not waited for; one that cannot be reached, or that takes nothing more just now,
    is asked again for as long as ``start_timeout_s`` says. Machines that wait in a queue are waited for without end.
    Whatever had been started is given back. A run that has begun never ends like this: it waits for machines.
    """

    code = "S470"


class PoolFull(LaunchError):
    """All machines of a pool are in use by others; it is asked again by itself."""

    code = "S471"


class BadEnvironment(AllocationRefused):
    """What a pool names as its environment cannot be sent to machines: it is not there, or of no kind that Shoal knows.

    It is a requirements file, a ``pylock.toml``, a packed environment (conda-pack, venv-pack, tar), a ``.pex``, or
    ``"shoal"`` for Shoal alone. Nothing was started.
    """

    code = "S440"


class EnvironmentNotBuilt(LaunchError):
    """What the environment of a pool lists could not be installed on a machine.

    The error ends with what pip said last; the whole log is on the machine, where the error says. Where machines reach
    no index, name one in the file (``--index-url``, ``--find-links``) or set ``PIP_INDEX_URL`` in the pool's ``setup``.
    """

    code = "S441"


class PythonTooOld(LaunchError):
    """The Python of a machine is older than Shoal needs.

    Name a newer one as ``python`` of the pool, or pack one into an archive (``conda-pack``) as its ``environment``.
    """

    code = "S442"


class VenvUnavailable(LaunchError):
    """The Python of a machine cannot make virtual environments: its modules ``venv`` or ``ensurepip`` are missing.

    Install them there (``python3-venv`` on Debian and Ubuntu), name another ``python``, or send a packed environment.
    """

    code = "S443"


class EnvironmentNotFetched(LaunchError):
    """A machine could not fetch from the coordinator what its environment is made of.

    It uses the port that agents talk to the coordinator on, and no proxy.
    """

    code = "S444"


class EnvironmentUnusable(LaunchError):
    """An agent cannot start in the environment of a pool: its Python does not run there, or something is missing in it.

    What is packed must fit the machine (system, processor) and hold what Shoal needs: install that before packing.
    """

    code = "S445"


class ArchiveDamaged(StorageError):
    """The packed environment of a pool could not be unpacked on a machine."""

    code = "S540"


class RemoteDiskFull(StorageError):
    """The disk of a machine is full, or its quota used up, so that no environment can be kept there.

    Give the pool another ``directory``. Environments that nobody has used for 30 days are removed by themselves.
    """

    code = "S541"


class RemoteCacheUnwritable(StorageError):
    """Environments cannot be kept on a machine: Shoal's ``directory`` there cannot be written."""

    code = "S542"


class ProjectDeliveryFailed(LaunchError):
    """What a run sends along (its project) did not arrive on a machine, or could not be written there.

    Agents fetch it from the coordinator, over the one port that they talk to it on. See that its disk is not full.
    """

    code = "S432"


class UnknownBlob(MembershipError):
    """The coordinator was asked for something to send along that it does not have."""

    code = "S212"


class PermissionDenied(MembershipError):
    """A named user asked for something that only the owner of the coordinator, or of the run, may do.

    ``shoal token NAME`` makes a token for a user, who may submit runs, see all and change its own.
    """

    code = "S213"


class BadBudget(UsageError):
    """What a run may spend cannot be counted, or is less than it takes to stop in order.

    ``--budget 12.5`` is in the currency of the prices of the pools. Machines of pools without a price cost nothing. As
    the budget gets near its end the dearest machines are given back, and when what is left is needed to stop in order
    the run writes a checkpoint and ends with exit code 6: ``shoal resume RUN --budget MORE`` goes on with it.
    """

    code = "S150"
    exit_code = 3


class BadLabels(UsageError):
    """A constraint on machines is not understood, or no pool of the run has such machines.

    ``--where gpu=a100,zone=b`` asks for machines of pools with ``labels = {gpu = "a100", zone = "b"}``; all must match.
    """

    code = "S151"
    exit_code = 3


class SlotTooSmall(UsageError):
    """A role needs more processors or memory than a place of one of its pools is asked for with.

    A pool that says how large its machines are (``cpus_per_task`` and ``memory`` of Slurm, ``cpus`` and
    ``memory_bytes`` of Ray) divides them by its ``slots``. One that does not is asked for what the role needs.
    """

    code = "S152"
    exit_code = 3


class NoCoordinatorAddress(CoordinatorUnreachable):
    """None of the addresses of the coordinator answers from this machine.

    Agents dial out to one port and need no other; they try every address that the coordinator may have, and take the
    first that proves to be it. Open that port between the machines (``port = 29300`` keeps it the same), or name an
    address that leads to the coordinator with ``address = "gateway.lab:29300"``.
    """

    code = "S230"


class PoolCheckFailed(LaunchError):
    """``shoal doctor POOL`` could not examine any machine: none of those that it asked for came.

    What the pool's engine said is in the error. Everything that was asked for has been given back.
    """

    code = "S455"


class MachineCheckFailed(MembershipError):
    """A machine that ``shoal doctor POOL`` examines stopped answering while it was examined."""

    code = "S231"


class UnknownFile(StorageError):
    """A run has no file of this name at its coordinator: nothing was saved under it, or it was pruned since.

    ``shoal fetch RUN`` brings all that there is.
    """

    code = "S545"


class UploadCorrupt(StorageError):
    """The pieces of a file that a member sends to the coordinator do not make up the file that it has.

    Nothing of it is kept. A checkpoint is tried again when the next one is due; something that was saved is still on
    the machine that the error names.
    """

    code = "S546"


class CoordinatorFull(StorageError):
    """The coordinator has no room left for what members send it: checkpoints, and what they save.

    The training goes on. Make room on the disk that the coordinator's directory is on, or name another place for
    checkpoints with ``--set checkpoint.to=URL``. The last of the disk is kept for the coordinator's own journal.
    """

    code = "S547"


class OutputUploadFailed(StorageError):
    """What a member saved could not be brought to the coordinator, from a machine that does not share a disk with it.

    It is still on that machine, under the path that the error names, for as long as the machine is there.
    """

    code = "S548"


class FetchFailed(LaunchError):
    """What a run has saved could not be written to where it was to be brought.

    Nothing is left half written; ``shoal fetch RUN`` brings what is missing.
    """

    code = "S450"
