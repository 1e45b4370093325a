"""The coordinator's disk: blobs, files of runs, logs, rows of the views and snapshots of its state.

May import: store, pack, core.runs, wire, errors.
"""
