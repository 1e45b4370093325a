"""A member's session: its connection to the coordinator, and the worlds it enters, crosses between and leaves.

Theory of operation
-------------------
The coordinator decides which members form a *world*; members train only inside one. A session carries out what it
decides, reports what happened, and keeps training when the coordinator is away. The life of a member:

    started        hello: name, incarnation, address, and the world and step it holds, if any
    ready          the model is built: ReadyMsg with a fingerprint; the coordinator answers EnterWorldMsg or RestoreMsg
    connecting     the ring of the world is connected in a thread of its own (`pending_worlds`)
    entering       a member without the state receives it from a source; meanwhile it may take part in the steps with
                   zeros (`collectives.catch_up`)
    in a world     trains; answers PrepareWorldMsg by connecting the next world beside the current one
    crossing       all step reports of a step named the same prepared world: every member switches after that step, or
                   leaves the run if the new world has no seat for it
    broken         a connection failed, or the coordinator dissolved the world: WorldBrokenMsg with the step held, then
                   back to waiting for the next EnterWorldMsg
    done           the last step is committed everywhere (`finish`), or the script left its loop (`leave_loop`)

Two invariants hold the protocol together.

*A step counts once.* What is reported and what is applied to the model are decided under one lock. From
`begin_exchange`, when this member's part of the step is sent, nothing is reported about the step until the exchange
fails or `commit`: a member that has the sum applies it, even if a peer that has applied it ends first. A member that
has reported step k as the last one it holds never applies step k + 1 of that broken world afterwards; one whose script
does not apply the sum for `hang_timeout_s` reports, and does not apply it any more. An eviction that arrives in between
takes effect after the commit.

*Worlds only go forward.* A world number never comes back: everything up to `_ended_up_to` is ignored, whether it is a
late message, a connection thread that finishes late, or a state that arrives late.

Threads and the lock:

    main thread        trains; calls next_step, prepared_world, on_step_reports, begin_exchange, begin_commit, commit,
                       finish. Only this thread enters a world or changes `step`.
    uplink (two)       one receives messages and runs their handlers, one sends heartbeats
    world threads      each connects one world and reports the result
    ring threads       report a lost neighbour between operations

`_changed` is a condition with a reentrant lock. It guards every field of the session and every message sent, so that no
message slips between a hello and the state it described. It is never held during a blocking operation on the network
other than sending to the coordinator. What must not be lost while the coordinator is away (claims, notices,
adjustments) is kept and sent again after the next hello.

Leaving: a notice (`leave`) or a StopMsg takes effect at a step boundary that all members agree on. If the coordinator
cannot be reached, or the time of the notice is over, the member leaves by itself. A world of one additionally stops
before its lease expires, because no peer would notice that it was cut off (`_wait_for_lease`).

`CoordinatorClient` (messages) is extended by `MemberWorlds` (reactions of other threads) and that by `Session` (what
the main thread calls). `StandaloneSession` stands in for a script that was started without `shoal run`.

May import: wire, store, settings, core, errors, worker/collectives, worker/transport.
"""
