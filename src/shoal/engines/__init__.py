"""Engines: start agents on machines through ssh, Slurm, Ray or this machine, behind one interface (`engine`).

`pool_config` turns a `[pool.NAME]` of shoal.toml into an engine; `agent_script` is the shell script that they all send.
May import: shoal.pack, shoal.wire, shoal.core.provisioning, shoal.errors.
"""
