"""Starting runs and finding them again, for the command line and `shoal.run` alike.

May import: everything but `doctor`, `experiment`, `cli` and `testing`.

Theory of operation
-------------------
A run needs a *coordinator*, which keeps the journal and decides who trains, and at least one *agent*, which starts the
member processes of its machine. There are three ways to get them, and one `LaunchPlan` describes all three:

- **In the foreground** (`shoal run`): this process starts both as child processes and supervises them.
- **Detached** (`shoal run --detach`, `shoal.run(detach=True)`): a supervisor process with a session of its own does the
  same, so the run survives the terminal. It reads the plan from standard input and replies with one line: the accepted
  run or the error.
- **Submitted** (`--url`): a standing coordinator already runs somewhere. Nothing is started here; the plan only carries
  the run and the project to upload.

The plan is made first (`run_request`, `pool_selection`, `launch_plan`) and carried out afterwards (`supervisor`), so
`--dry-run` prints exactly what would happen and the planning is tested without a process. Carrying it out takes these
steps, each of which must succeed before the next:

1. Create the coordinator's directory `SHOAL_HOME/coordinators/TIME-RANDOM`, readable by its owner only, and write
   `pools.json` there if the coordinator may allocate machines.
2. Start the coordinator and wait until it has written `url` and answers a health check with our protocol version.
3. Start the agent, unless the run takes its machines from pools: then the coordinator starts agents through engines.
4. Upload the project if some machine cannot see this disk, then submit the run, or resume it.

If a step fails, everything started so far is stopped, and a directory that never held a run is removed.

**Lifelines.** Each child inherits the read end of a pipe whose write end only the supervisor holds. When the supervisor
exits for any reason, `kill -9` included, the kernel closes the pipe and the children stop by themselves; no process is
left behind. While it lives, the supervisor restarts a child that died, with a growing delay, and gives up after
`child_service.RESTARTS` deaths in a row. A restarted coordinator listens on its old port, replays its journal, and the
members reconnect to it; training continues meanwhile.

**Shutdown** runs in the opposite order and waits for machines to be released: the coordinator writes into `leaving` how
many allocations are left and how long that may take, and the supervisor does not kill it before then.

**Finding runs.** There is no registry. `run_lookup` lists the directories below `SHOAL_HOME/coordinators`, or asks the
coordinator at `--url`. A directory whose `pid` exists and whose `url` answers with the directory's name is live; any
other is read offline from its journal and SQLite views, and its unfinished runs are `resumable`. A coordinator that
died under a living supervisor (file `supervisor`) is waited for, because it will be back in a moment.
"""
