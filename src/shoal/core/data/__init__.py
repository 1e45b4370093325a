"""Data order: which samples make up a batch, a round or a lane, independent of the members.

`sample_order` is for datasets with an index, `lanes` for streams, `rounds` for local training.

May import: core modules, core/shares, errors.
"""
