"""Agent: the process on each machine that starts, watches and ends the members there.

`agent` is the process, `member_processes` the members below it, `uplink` and `outbox` the way to the coordinator.
May import: shoal.agent.*, shoal.worker.transport, shoal.engines.slurm, shoal.pack,
shoal.wire, shoal.core, shoal.settings, shoal.errors.
"""
