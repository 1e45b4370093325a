"""Exit codes of every process that Shoal starts: commands, runs, members, agents and coordinators.

A run's code is the code of the command that followed it. Job schedulers and shell scripts rely on these numbers, so
they never change meaning. 75 is EX_TEMPFAIL of sysexits.h: nothing is wrong, and the same command may be tried again.
"""

from __future__ import annotations

OK = 0
# The script raised, or the training cannot work as asked.
FAILED = 1
# The command line or a call is wrong.
BAD_USAGE = 2
# A setting, a role or a pool is wrong.
BAD_SETTING = 3
# A process, a machine, a service or storage is not available.
UNAVAILABLE = 4
# Too few members are left, and they cannot be replaced.
MEMBERS_LOST = 5
# The run stopped before it exceeded its spending limit.
BUDGET_REACHED = 6
# The run stopped, or the member left, before the training was finished; it can be resumed.
RESUMABLE = 75
# As a shell reports a command that SIGINT ended.
INTERRUPTED = 130
# As a shell reports a command that SIGPIPE ended.
BROKEN_PIPE = 141
