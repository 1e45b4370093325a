"""`shoal.run`: a run from Python or a notebook, of a function that says what to train and how to evaluate it.

May import: `launch` and everything that `launch` may import.

`shoal.run(experiment_fn)` takes the same way as `shoal run SCRIPT`: it makes a launch plan and carries it out. What
differs is the program of the members. There is no script, so `run` pickles the function into the directory `pack` of
the new coordinator, beside the files that the caller names, and signs it with the coordinator's token; members execute
`python -m shoal.experiment PACK`, which verifies and loads the function, calls it, and trains the `Experiment` that it
returns. Machines that do not see this disk get the pack as part of the uploaded project, together with the modules that
the function needs and cannot import over there.

Attached runs are supervised by a thread of the calling process and end with it, after a checkpoint. Detached ones
have a supervisor process of their own. `RunHandle` works the same for both, and also after the run has ended.
"""
