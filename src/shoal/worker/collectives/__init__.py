"""Collective operations of one world: all-reduce of gradients and all-gather of step reports.

`exchange` is the interface, `ring` the implementation over plain sockets; `ring` opens with the theory. `catch_up` lets
a joiner take part before it has the state.

May import: core, worker/transport, errors.
"""
