"""The coordinator's disk: blobs, files of runs, logs and view rows."""
