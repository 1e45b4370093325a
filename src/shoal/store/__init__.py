"""Durable storage: the coordinator's journal with its SQLite views, and checkpoints in a directory, bucket or
coordinator.

`journal`, `journal_repair` and `sqlite_views` belong to the coordinator. `blob_store` and `coordinator_store` are
places that hold named blobs; `checkpoint`, `checkpoint_writer` and `checkpoint_schedule` put checkpoints there from the
members' side.

May import: shoal.wire, shoal.core, shoal.errors, msgspec, NumPy, fsspec (on use).
"""
