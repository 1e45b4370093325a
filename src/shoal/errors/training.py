"""S3xx: a script, a model or its data cannot be trained."""

from shoal import exit_codes
from shoal.errors.base import ShoalError


class TrainingError(ShoalError):
    """A script, its model or its data cannot be trained as they are.

    ``shoal logs RUN`` shows the traceback of the member that failed.
    """

    code = "S300"
    exit_code = exit_codes.FAILED


class BadSize(TrainingError):
    """A size is not a positive integer, or an option of the data is invalid.

    The error names the argument and the values that it accepts.
    """

    code = "S301"


class EmptyDataset(TrainingError):
    """The dataset or stream has no samples.

    Check the path, pattern or filter that it is read with.
    """

    code = "S302"


class DatasetTooSmall(TrainingError):
    """The dataset has fewer samples than one global batch.

    Every step would be smaller than requested, and with ``last="drop"`` there would be no step at all. Pass a global
    batch size that is at most the length of the dataset.
    """

    code = "S303"


class SampleFailed(TrainingError):
    """The dataset raised an error, or its samples cannot be collated into one batch or sent by a data worker.

    The error names the sample; ``dataset[index]`` in a Python prompt reproduces it.
    """

    code = "S304"


class LoaderDied(TrainingError):
    """A process that reads data for a member ended unexpectedly.

    Usually the machine ran out of memory or of shared memory (``/dev/shm``), or native code crashed. Use fewer workers,
    or ``workers=0`` to read in the member itself and see the cause.
    """

    code = "S305"


class ShardChanged(TrainingError):
    """A shard of a stream yielded a different number of samples than when it was read before.

    Every sample can be used exactly once only if a shard yields the same samples in the same order each time it is
    opened. Remove randomness from the shard's reader, and do not change its files during a run.
    """

    code = "S306"


class UnusableShard(TrainingError):
    """A shard of a stream cannot be opened repeatedly.

    Members open shards again after a restart and in every epoch. Pass functions without arguments that open a shard,
    objects whose ``__iter__`` starts over, or paths together with ``open=``.
    """

    code = "S307"


class StateUnsupported(TrainingError):
    """The training state contains an object that Shoal cannot send to another member.

    State is sent without pickle: numbers, text, bytes, None, tensors, NumPy arrays, and dicts, lists, tuples, sets and
    deques of these. For anything else, register functions that convert it to such values and back:
    ``run.state("name", save=lambda: ..., load=lambda value: ...)``.
    """

    code = "S310"


class UnusableBackward(TrainingError):
    """The loop does not make exactly one step of each batch.

    For each batch from ``run.batches``, call ``run.backward(loss)`` once and then ``optimizer.step()`` once. A plain
    ``loss.backward()`` beside it adds gradients that are not summed over members: add the losses instead. Optimizers
    that take a closure (LBFGS) evaluate the model several times per step and are not supported. An attached average of
    the weights that is updated without ``if run.committed:`` would count repeated steps twice.
    """

    code = "S311"


class NotAttached(TrainingError):
    """Something that is trained was not given to the run: a model, optimizer, scheduler, average or parameter.

    In PyTorch, call ``run.attach(model, optimizer)`` before the loop, with every optimizer and scheduler, and with one
    ``torch.nn.Module`` that holds all trained parameters, also those of the loss (centre loss, ArcFace, a temperature).
    What is not attached would be trained by each member on its own. In Keras, pass ``shoal.Elastic()`` as a callback
    to ``model.fit``, or call ``shoal.elastic(optimizer, model)`` before ``shoal.batches``.
    """

    code = "S312"


class SecondTrainingLoop(TrainingError):
    """The script started a second training loop: ``run.batches``, ``run.stream`` or ``model.fit``.

    A run has one loop, so that a member that joins later knows where the run is. Write one loop over all epochs;
    ``run.epoch`` and ``run.epoch_ended`` tell its position.
    """

    code = "S313"


class MembersDiverged(TrainingError):
    """The members of a world are at different steps, or disagree on shares, learning rates or what they exchange.

    Nothing of the step was applied. Members must make the same decisions: a scheduler that follows a value, such as
    ``ReduceLROnPlateau``, must receive the same value on every member, and parameters are frozen, unfrozen and added
    on all members in the same step.
    """

    code = "S314"


class UnsupportedInExactMode(TrainingError):
    """The script uses a feature that exact mode does not support.

    In exact mode no bit of the result depends on the members. Every global batch is cut into shards
    (``run.batches(..., exact=16)``) that are computed separately, on CPUs. That excludes ``micro``, ``batch=auto``,
    ``run.sync_batchnorm`` and ``run.stream``. Remove the feature, or train without ``exact``.
    """

    code = "S315"


class UnsupportedWithServers(TrainingError):
    """The script uses a feature that is not available when servers hold the parameters (``stale:K`` and ``async``).

    Servers apply gradients tensor by tensor as they arrive, so no process ever has the whole gradient of a step. That
    excludes GradScaler, schedulers that need a metric, BatchNorm over the global batch and ``run.stream``; in Keras
    also loss scaling, ``global_clipnorm`` and tf.data pipelines. Keras optimizers are rebuilt for every part of the
    model from ``get_config``, so they must support that. All of these work with ``--sync step``.
    """

    code = "S316"


class UnsupportedWithLocalSgd(TrainingError):
    """The script uses a feature that is not available when members train on their own (``local:H``).

    Between two exchanges, members make different numbers of steps, on batches of their own. So a batch must not need an
    exchange (``run.sync_batchnorm``), and the data must be indexable (no ``run.stream``, ``exact=`` or tf.data
    pipeline). Step a scheduler after every batch, or once per round or epoch. Keras optimizers must not use ``use_ema``
    or ``gradient_accumulation_steps``. All of these work with ``--sync step``.
    """

    code = "S317"


class UnusableModel(TrainingError):
    """A model cannot be trained by a run as it is.

    In PyTorch, a model on the meta device has shapes but no values: call ``model.to_empty(device="cpu")`` and load
    weights first, then create the optimizer. A model that torch.distributed divides or sums by itself
    (DistributedDataParallel, FSDP, DTensor) is attached without the wrapper. In Keras, Shoal takes the gradients
    that ``train_step`` passes to ``self.optimizer`` and sums them over all members. So the model needs one
    optimizer that is applied once per step, the TensorFlow or PyTorch backend, and no ``tf.distribute`` strategy.
    The error names the argument of ``compile`` or ``fit`` to change.
    """

    code = "S318"


class UnusableData(TrainingError):
    """The data cannot be divided among members: it has no length, no index, no end, or its parts do not match.

    In PyTorch, pass the dataset itself to ``run.batches``, not a DataLoader; ``run.stream`` reads data without an
    index. In Keras, pass all data through ``shoal.batches``, and its options there instead of to ``model.fit``.
    """

    code = "S319"


class EvaluatorDiffers(TrainingError):
    """The evaluator built a different model from the one in the checkpoint; training is not affected.

    The evaluator runs the same script as the trainers and loads their checkpoints into what the script attaches. Make
    the script build the same model, optimizer and schedulers in every role.
    """

    code = "S320"


class BadEvaluation(TrainingError):
    """The arguments of ``run.evaluate`` are invalid, or its function returned something else than a dict of numbers.

    The function returns numbers by name, such as ``{"accuracy": 0.9}``. ``best`` names one of them, as ``max:accuracy``
    or ``min:loss``; ``patience`` and ``export`` require ``best``.
    """

    code = "S321"


class NothingToEvaluate(TrainingError):
    """The run has an evaluator, but its script does not say how to evaluate the model; training is not affected.

    Call ``run.evaluate(fn)`` before the loop (Keras: ``shoal.Elastic(evaluate=…)``), or run without ``--evaluator``.
    """

    code = "S322"


class BadMetric(TrainingError):
    """A value passed to ``run.log`` is not a number.

    Python numbers, NumPy, PyTorch and TensorFlow scalars, and arrays with one element are accepted. For a larger array,
    log its mean or one element.
    """

    code = "S323"


class FrameworkMissing(TrainingError, ImportError):
    """The framework that the script uses is not installed in the Python that runs it.

    Install it with ``pip install 'shoal-train[torch]'`` (PyTorch) or ``pip install 'shoal-train[keras]'`` (Keras and
    TensorFlow). On other machines, install it for the Python of the agent, or list it in the ``environment`` of the
    pool.
    """

    code = "S324"


class LossNotFinite(TrainingError):
    """A warning: the loss is NaN or infinite, and training continues.

    Parameters that are NaN never recover. Usually the learning rate is too high, float16 overflowed without a
    GradScaler, or the model divides by zero or takes the logarithm of zero. Stop the run and resume from a checkpoint
    before the step that the warning names, with a lower learning rate or clipped gradients;
    ``torch.autograd.set_detect_anomaly(True)`` names the operation.
    """

    code = "S325"


class SamplesCoupled(TrainingError):
    """A warning: the loss seems to compare the samples of a batch with each other, and training continues.

    Contrastive losses and in-batch negatives (InfoNCE, SimCLR, CLIP) see the samples of a member's share only, so their
    result depends on the number of members and on the shares. Give each member the same number of samples
    (``shares="equal"``) and a fixed number of members, or use a loss that needs no other samples, such as a queue of
    negatives that is attached.
    """

    code = "S326"


class HiddenStateCarried(TrainingError):
    """A warning: a recurrent layer was given a hidden state from an earlier batch, and training continues.

    Consecutive batches of a member do not follow each other in the data, and shares change size, so a carried state
    belongs to other samples and may not fit the next batch. Start each batch from no state: ``rnn(x)``.
    """

    code = "S327"


class OutOfMemory(TrainingError):
    """Memory ran out in the loop body, outside the model's forward pass and ``run.backward``, for example in the loss.

    In those two, Shoal repeats the step in smaller micro-batches. Elsewhere the error ends the script, so the member
    starts again, with micro-batches of a quarter of the size. If the restarts do not suffice, compute the loss in the
    model's ``forward``, pass ``micro=`` to ``run.batches``, or declare what fits with ``shares.machines``.
    """

    code = "S328"


class LossIsSum(TrainingError):
    """A warning: the loss seems to be a sum over samples instead of a mean, and training continues.

    Each member's loss is weighted by its share of the batch, as a mean is. A sum over a share is smaller than one over
    the whole batch, so the gradient would shrink with the number of members. Divide the loss by the number of samples,
    ``loss / len(x)``, and multiply the learning rate by the batch size if it was chosen for the sum.
    """

    code = "S329"


class BadExperiment(TrainingError):
    """The function given to ``shoal.run`` returned something that cannot be trained.

    It must return a ``shoal.Experiment`` with data and either a compiled Keras model, or a PyTorch module with its
    optimizer and loss; or train by itself, as a script does, and return nothing.
    """

    code = "S330"


class ExperimentFailed(TrainingError):
    """The function given to ``shoal.run`` raised an error when a member called it.

    The traceback is in the member's log: ``run.logs()`` or ``shoal logs RUN``.
    """

    code = "S331"


class RunFailed(TrainingError):
    """A run that the script waited for failed.

    ``run.story()`` and ``shoal why RUN`` show what happened; ``run.logs()`` and ``shoal logs RUN`` show what the
    members printed.
    """

    code = "S332"


class NothingTrained(TrainingError):
    """A script started by ``shoal run`` ended with exit code 0 without having trained in the run.

    Most often it never calls Shoal: then every member trains a copy of its own, on all the data, and nothing is shared.
    Add the lines of the quick start (``import shoal.torch as shoal``, ``run = shoal.join()``, ``run.attach``,
    ``run.batches``, ``run.backward``), or start an unmodified distributed script with ``--compat torchrun`` or
    ``--compat tf``. A script that is no training needs no ``shoal run``.
    """

    code = "S340"


class StateDiverged(TrainingError):
    """Members no longer hold the same parameters or the same optimizer state.

    The step in which it was noticed was not applied. All members apply the same summed gradients to the same values, so
    they differ only if the script changes something on one member alone: an optimizer that is not attached, gradients
    changed after ``run.backward`` (noise of a member's own generator, a plain ``.backward()``), weights edited with
    values that differ between members. The error names the first tensor that differs. The setting ``on_divergence``
    decides what happens: ``stop`` (the default), ``repair`` (members that differ from the majority copy its state and
    training continues, a few times), ``off`` (states are not compared).
    """

    code = "S350"


class StateDrifts(TrainingError):
    """A warning: the states of members differ in a way that may be harmless, and training continues.

    Either machines of different kinds round differently in the last bits, or a buffer of the model depends on the
    samples of each member's share: only BatchNorm's running statistics are averaged over the members. If the model's
    result depends on that buffer, compute it from values that are the same on all members, or keep it out of the model.
    """

    code = "S351"


class UnseededData(TrainingError):
    """A warning: a sample differs each time it is read, so members cannot tell whether they were given the same data.

    Shoal seeds the global generators of Python, NumPy and the framework before it reads a sample, so that augmentation
    draws the same numbers on whichever member reads it. This dataset draws from a generator of its own. Training
    continues, but a repeated step sees other numbers, and the result depends on the members. A stream that shuffles
    itself must do so with a fixed seed: a member that opens a shard again would lose samples and repeat others.
    """

    code = "S352"
