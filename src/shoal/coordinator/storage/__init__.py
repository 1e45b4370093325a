"""The coordinator's disk: blobs, files of runs, logs and rows of the views.

May import: store, pack, core.runs, wire, errors.
"""
