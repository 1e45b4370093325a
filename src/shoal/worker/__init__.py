"""Code inside a training process, independent of the framework: joining, exchanging, committing, handing off state.

`join` is the entry point. The folders below go from bytes to training: transport, collectives, session, data,
training, evaluation, parameter_server.

May import: core, wire, store, settings, and every folder below.
"""
