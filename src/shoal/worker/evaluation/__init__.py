"""Evaluator: a process beside the trainers that scores the run's checkpoints as they appear.

May import: core, wire, store, worker.transport, worker.collectives, worker.session, worker.data, worker.training.
"""
