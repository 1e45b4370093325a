"""Parameter servers, and training with bounded staleness on them (`--sync stale:K`, `--sync async`).

**Roles.** With servers, the parameters live in `ParameterServer` processes and the optimizer runs there. A trainer
loops over *tickets*: it asks the ledger for a ticket (a slice of a global batch), pulls the parameters, computes, and
pushes the gradient. Trainers never talk to each other, so none waits for another beyond the staleness bound K.

**Parts.** The state is cut into numbered parts. Part 0 is the ticket ledger (`core.parameter_server.ticket_ledger`):
who works on what, and how far ahead each trainer's clock is. Parts 1… are shards of the parameters with their optimizer
state. The coordinator publishes a numbered `Placement`: for each part a primary, a backup, and perhaps a learner that
is being given a copy. Placement numbers only grow. A generation ends when a part is lost with all its copies: the state
then goes back to a checkpoint, and everything that belongs to an older generation is void.

**Replication** (`parts`, `replication`, `replicated_parts`). A part changes by updates, one after another. The primary
decides their order, applies each update, sends it to its replicas, and acknowledges it to the trainer only when the
backup has applied it too, or when a newer placement says that there is no backup. A server that was replaced without
knowing it therefore cannot acknowledge anything. A primary whose update failed on the backup has diverged from it and
discards its copy. Handing off: the primary *releases* the part, which means that it finishes the update in progress and
takes no further ones, so that the backup can become primary with nothing lost.

**Exactly once** (`client`). Any call may be repeated, to whichever server is primary by then. A shard remembers the
tickets that it has applied, and answers a repeated push without applying it again. A push whose clock lies below what
the bound counted on is refused as stale: the ledger has given its ticket to another trainer.

**Liveness** (`liveness`). The coordinator reports lost trainers. As it may itself be down, the ledger's server also
drops a trainer that has had no connection to it for a lease. `LivenessConnection` exists for that alone: a trainer that
computes for a long time makes no calls, but stays connected.

**Processes.** `ticket_loop` is the trainer's loop, `server_main` the main thread of a server. Both run the user's
script up to its training loop, so that every process holds the same model. `served_session` is the session of both.
`sharded_checkpoint` stores all parts as one checkpoint.

**Locks**, outermost first; a thread that holds one may only take later ones:

1. `ReplicatedPart.lock`: the order of a part's updates. It is held while the primary waits for the backup.
2. The session's lock: held while a message of the coordinator is handled, so `ReplicatedParts.adopt` runs under it.
3. `ReplicatedParts._changed`: the placement and which parts and replicas exist. Never send a message under it: that
   needs the session's lock.
4. `ReplicaSender._guard` and `ReplicatedPart.memory`: a sender's queue, and a part's bytes. Nothing is waited for under
   them, so pulls and checkpoints can read a part while its primary waits for the backup.

`adopt` and `close` need lock 1 to wake threads that wait for the ledger, which is against this order; they try for 10
ms and otherwise leave it to the waiters, which look again every 100 ms. For the same reason trainers that are reported
lost and parts that are released get a thread of their own.

May import: core, wire, store, settings, and the other folders of worker.
"""
