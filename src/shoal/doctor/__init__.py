"""`shoal doctor`: checks of this machine and of the machines of pools, before a run depends on them.

`cleanup` removes the directories of ended coordinators, for `shoal rm`, `shoal prune` and `retain_days`.

May import: `launch` and everything that `launch` may import.

There are two kinds of check, and both end in a list of `CheckVerdict`s, each with a remedy:

- `local_check` looks at this machine without starting anything: Python, torch, sockets, ports, disk, clock, host name,
  shared memory. `leftovers` finds processes whose coordinator is dead; lifelines should have ended them.
- `pool_check` allocates a few machines of each pool for a moment, through a coordinator of its own. Each machine
  describes itself, and each tries to reach every other one at all its addresses, as members would. `diagnosis` is the
  pure part: from what the machines report to what is wrong and how to fix it.

A pool check releases every machine when it returns, fails or is interrupted: it cancels what it requested, then asks
each engine for anything else that carries its tag. What could not be released is named, because it may cost money.
"""
