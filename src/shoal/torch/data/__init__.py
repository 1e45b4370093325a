"""PyTorch data: reads datasets and streams for the loop, in this process or in worker processes.

May import: core, errors, worker.
"""
