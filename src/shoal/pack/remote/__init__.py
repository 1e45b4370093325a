"""Code that runs on other machines before Shoal is installed there: Python 3.7 and the standard library only.

Theory of operation
-------------------
A pool hands us a machine that may have no Shoal, no pip and no compiler, only some Python from 3.7 on. At the end an
agent must run there in the environment that the pool names. This takes three steps in one process.

1. `bootstrap` is part of the agent's script (`engines/agent_script`). It downloads Shoal's wheel from the coordinator
   by hash, with the token of the coordinator and, under TLS, trusting only its certificate. It puts the wheel on
   `sys.path` and calls `env_main`.
2. `env_main` downloads the recipe (`pack/environments`), and `env_builders` finds or builds the environment: a virtual
   environment with pip, an unpacked archive, or a virtual environment that imports from a `.pex`. Every external
   command runs through `env_commands`, which kills it with all its children if we are cancelled.
3. The process replaces itself (`execve`) with the agent, under the interpreter of the environment.

The cache (`env_cache`). Environments are kept on the machine under the hash of everything they depend on, so the next
agent starts at once. The home directory may be shared by many machines, and many agents may start together; so a
builder holds a lock, works in a folder of its own, and publishes it by creating one small file with `link`, which
either succeeds or fails. A crash at any moment leaves a folder that no file names: it is never used, and removed later.
On file systems without locks several may build at once, and the first to publish wins.

Progress and failure. The coordinator is told every 30 seconds what is going on, so a slow build is not taken for a dead
machine, and it is told why a build failed. Agents that waited for the failed build report the same error instead of
repeating it. Errors of the environment itself (S441, S445, S540) are final: another machine would fail alike. All
others concern this machine.

Cancelling. SIGTERM, or the end of the lifeline pipe, raises SetupCancelled wherever the build is; the half-built folder
is removed.

Because old Pythons must be able to import them, these modules contain no newer syntax, and names needed for types only
are imported under TYPE_CHECKING.

May import: shoal.errors.
"""
