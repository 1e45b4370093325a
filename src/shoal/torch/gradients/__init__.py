"""Gradients of a PyTorch model: computed per share, all-reduced in buckets, applied only if the step commits.

Start with `buckets`, then `guards`.

May import: core, errors, worker.
"""
