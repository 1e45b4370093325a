"""Member main of a `shoal.run` run: loads the function from the pack, calls it, and trains what it returns."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

from shoal.core.fleet.launcher_env import standalone_tf_config
from shoal.errors import ExperimentFailed, IncompleteEnvironment, ShoalError
from shoal.pack import files, function, manifest
from shoal.wire import credentials
from shoal.worker.experiment import Experiment, framework_of
from shoal.worker.join import has_trained
from shoal.worker.session import environment


def main(pack: str) -> None:
    """Train as the member that the environment describes."""
    member = environment.read(os.environ)
    if member is None:
        raise IncompleteEnvironment("shoal.experiment was started outside a run", do="start it with shoal.run")
    # For code that reads it. It lists no other members: they change, and they connect through Shoal.
    os.environ.setdefault("TF_CONFIG", standalone_tf_config(member.role, member.member))
    where = Path(manifest.REMOTE_FOLDER if member.upload_dir else pack)
    contents = manifest.read(where, credentials.read(member.token_file).token)
    files.verify(contents.files, Path.cwd())
    if member.upload_dir:
        files.verify(contents.modules, where / manifest.MODULES)
    experiment = _call_experiment_fn(contents, where, apart=bool(member.upload_dir))
    if experiment is None and has_trained():
        return  # the function had a training loop of its own
    framework = framework_of(experiment, contents.function.name)
    assert isinstance(experiment, Experiment)
    import_module(f"shoal.{framework}.experiment").train(experiment, evaluates=not member.values.evaluator)


def _call_experiment_fn(contents: manifest.PackManifest, pack: Path, *, apart: bool) -> object:
    experiment_fn = function.load(pack, contents, remote=apart)
    try:
        return experiment_fn()
    except ShoalError:
        raise
    # The user's code may raise anything; its traceback stays attached as the cause.
    except Exception as error:
        kind = type(error).__name__
        raise ExperimentFailed(f"{contents.function.name} raised {kind}: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1])
