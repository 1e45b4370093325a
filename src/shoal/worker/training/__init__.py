"""One step on one member, independent of the framework: batches, step reports, commits, checkpoints.

Start with `loop`, whose docstring tells the life of a step.

May import: core, wire, store, worker.transport, worker.collectives, worker.session, worker.data.
"""
