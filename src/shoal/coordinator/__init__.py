"""The coordinator: the process that decides membership and keeps the runs, agents and history of one directory.

All decisions are made by `shoal.core.runs`; this package is the shell around them. It is one process with one event
loop. Every event takes the same way, to its end, before the next is looked at:

    message, timer or request
      → handler       turns it into an event             member_handler, agent_handler, http, pools, timers
      → journal       the event is written down          store.journal
      → apply         state and instructions             core.runs
      → views         rows and story lines are queued    view_writer
      → carry out     messages, orders to agents, pools  service, dispatch

**Journal before action.** An event is handed to the operating system before its instructions are carried out, so a
crash can lose an action but never the knowledge that it was due. While the journal cannot be written (a full disk),
nothing is decided: events wait in order, requests that would change something are refused, training goes on without
the coordinator. The first write that succeeds releases the queue.

**Dispatch.** Instructions name members and agents. If the addressee is not connected, the message is dropped: a member
that reconnects says in its hello where it stands, and the state machines then decide what it needs. So no message has
to be stored or acknowledged, and a slow connection holds up no other.

**Live state.** Heartbeats come many times a second and are not journaled; `live_state` keeps the latest of each member
with the open connections. Losing it costs nothing, because every lease restarts with the coordinator.

**Timers** run every 50 ms: expired leases, restarts that are due, sweeps. Silence counts against a member only while
the coordinator itself could hear: if this process did not run for a while, or received nothing at all, leases are
extended.

**Views** (SQLite rows, TensorBoard files) show the journal and the measurements; no decision depends on them. They are
written by another thread, a fifth of a second later, so no member waits for them.

**Compaction.** Once the journal is long, the state is stored as a snapshot and the events before it are dropped. Their
story stays in the views.

**Restart.** The new process takes the port of its predecessor, takes over the snapshot, replays the journal since,
records `CoordinatorStarted` and,
for each active run, `CoordinatorRestarted`: all connections are gone, and all leases restart. Members trained on
meanwhile; they reconnect and report, and the worlds they are in are kept.

Agents and members hold the coordinator's own token. What they send is decoded into strict types before it gets here; a
bad message closes its connection and disturbs no other.

May import: coordinator.server, coordinator.storage, core, report, store, wire, errors (`__main__`, which composes the
process, imports everything below it).
"""
