"""Pools: carries out what provisioning decides, and reports what the engines say.

`core.provisioning` decides which machines to request and to release. Its instructions come here:

    SubmitAllocation, CancelAllocation ──► Provisioner ──► PoolWorker (one thread per pool) ──► Engine (ssh, Slurm, …)
    AllocationSubmitted, …Rejected, …Ended, PoolListed, PoolUnreachable  ◄── events, back on the event loop

An engine may take seconds, or hang, so each pool has a thread of its own. A worker does one kind of thing at a time:
it submits, or cancels, or lists. So a listing never contradicts an instruction that was carried out before it. Equal
instructions that are queued together are carried out together, sixteen at a time: with many hosts each would otherwise
wait for all before it.

The worker lists its pool every second while it has allocations. The listing is the truth: an allocation that is missing
has ended, and one that no journal knows (submitted just before a crash) is adopted by its tag. The provisioner passes
only listings with news to the journal.

When a coordinator is replaced (a restart), allocations stay. When it ends for good, the workers cancel everything with
its tag, as long as any of them makes progress; a file in the directory tells waiting commands how many are left.

May import: coordinator, coordinator.storage, engines, pack, core, wire, errors.
"""
