"""A member of a run of `shoal.run`: finds the function in the run's pack, calls it and trains what it returns."""

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
from shoal.worker.session import environment


def main(pack: str) -> None:
    """Train as the member that the environment says."""
    told = environment.read(os.environ)
    if told is None:
        raise IncompleteEnvironment("shoal.experiment is a member of a run", do="start it with shoal.run")
    # For those who read it; it names no others, because who is there changes, and they meet through Shoal.
    os.environ.setdefault("TF_CONFIG", standalone_tf_config(told.role, told.member))
    where = Path(manifest.THERE if told.apart else pack)
    contents = manifest.read(where, credentials.read(told.token_file).token)
    files.check(contents.files, Path.cwd())
    if told.apart:
        files.check(contents.modules, where / manifest.MODULES)
    experiment = _called(contents, where, apart=bool(told.apart))
    framework = framework_of(experiment, contents.function.name)
    assert isinstance(experiment, Experiment)
    import_module(f"shoal.{framework}.experiment").train(experiment, evaluates=not told.values.evaluator)


def _called(contents: manifest.PackManifest, pack: Path, *, apart: bool) -> object:
    experiment_fn = function.get(pack, contents, apart=apart)
    try:
        return experiment_fn()
    except ShoalError:
        raise
    # Whatever the user's code raises is named after it, and the traceback stays below.
    except Exception as error:
        kind = type(error).__name__
        raise ExperimentFailed(f"{contents.function.name} raised {kind}: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1])
