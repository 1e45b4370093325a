"""Runs whose state is held by parameter servers: which server holds which part, and which trainer gets which ticket.

Theory of operation
===================

With ``sync`` set to ``async`` or ``stale:K``, trainers do not exchange gradients with each other. Parameter servers
hold the state. A trainer takes a *ticket*, a span of samples of one global batch, pulls the parameters, computes the
gradient of the span and pushes it to the servers, which apply it at once. So no trainer waits for all others, and a
trainer that dies costs the others nothing. There are no worlds; the coordinator decides only who holds what.

**Parts.** The state is cut into parts. Part 0 is the ticket ledger; the others are shards of the parameters, about
equal in bytes. Each part is assigned to servers (`core.placement`):

- the *primary* answers all requests for the part,
- the *backup* has applied every update that the primary ever acknowledged, so the loss of one server loses nothing,
- a *learner* is receiving a copy, and becomes the backup when the copy is complete.

The assignment of all parts is a numbered, immutable *placement*, which every member is sent. `decide` publishes a new
one when a server joins, leaves, is lost, has received its copy (`PartCopied`) or has stopped accepting updates
(`PartReleased`). A primary moves only in that last way, unless it is lost: it finishes what it has acknowledged, then
it and its backup swap. So parts can be balanced, and a server that has notice can leave, without losing an update.

**Generations.** If a part is lost with all servers that held it, the other parts are worthless, since they have
trained on. The placement is void; the next one begins a new *generation* from the newest checkpoint. Requests name
their generation, so late gradients of an earlier one are refused. With a single server there is no backup, and every
loss means this.

**Tickets.** The ledger (`ticket_ledger`) issues each span once, and again only if the trainer that held it is lost,
with the same span. Servers apply each ticket once. So each sample counts exactly once, whatever dies. A trainer's
*clock* is the number of tickets that it has finished. With the bound K (*bounded staleness*, SSP) a trainer begins a
ticket only if its clock is at most K ahead of the slowest; without a bound it never waits. A trainer that joins starts
at the slowest clock, so that the others need not wait for it to catch up.

**The end.** To stop, trainers stop first, so that nothing changes any more; then the primary of the ledger writes the
checkpoint of all parts; then the other servers stop. If servers are lost meanwhile, backups take over, but parts are
no longer copied or moved.

Failure cases: a server that cannot reach its backup reports that (`ServerUnreachable`), and the backup is dropped from
the part, because it would miss what is acknowledged from then on. A server that is suspected and disconnected is lost
at once. A new primary of the ledger may have missed which trainers were lost lately, so it is told again.

May import: shoal.core (top level), shoal.core.membership.
"""
