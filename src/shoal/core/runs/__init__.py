"""A coordinator as a function of its journal: its runs, their events, the queue and the story.

The coordinator does not keep a database. It keeps a journal of events, and everything it knows is computed from them:

    event ──► apply(state, run, event, now) ──► instructions ──► the shell carries them out
                        │        ▲
                        ▼        │ follow-up events
              membership · parameter_server · fleet · provisioning · evaluation

**Events** come from outside: a member connected, a process exited, a pool was listed, a user asked to stop. Only these
are journaled. The shell writes an event to the journal first and applies it afterwards.

**Machines.** Each event belongs to one pure state machine, or to a few in a fixed order; the tables in `decide` say
which. `membership` (or `parameter_server`, for runs with servers) decides who trains together, `fleet` which processes
should exist, `provisioning` which machines to request, and `evaluation` what the scores of checkpoints mean.

**Follow-ups.** What one machine decides often concerns another. If a process exits, its member is lost; if a member is
lost, the fleet has to replace it; if the fleet marks a run as ended, the demand for machines changes. Such follow-up
events are put at the front of a queue and worked off before anything else, so that causes are settled before effects
that came later. They are never journaled: the same event leads to the same follow-ups again.

**Instructions** are the result, in order, each with the run it concerns ("" for the coordinator as a whole): messages
to members, processes to start, machines to request, lines of the story. Core never carries them out.

Invariants:

- Replay equals live. `apply` reads no clock, no random numbers and nothing outside the state; `now` is the time in the
  journal. Applying the journal of a crashed coordinator gives the state it had, and `tests/property` checks that.
- The state is a tree of plain values, so it can be stored: a stored state and the events since equal all events.
- After every event the demand for machines is computed again, and provisioning is told if it changed.
- A run that has ended takes no events but a resume and a new budget.

A failure inside `apply` (a bug) loses one event and not the coordinator: the shell logs it and goes on, and a replay
skips the same event in the same way.

May import: all of core, errors.
"""
