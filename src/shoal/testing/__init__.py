"""Test suites and tools for Shoal itself, for scripts that use it, and for engines and frameworks that extend it.

Suites that an outsider runs over their own code:

- `engine_conformance`: what every engine must do. Describe a site where your engine really runs (`EngineSite`), then
  run each of `SCENARIOS` over it. They start a real coordinator and real agents.
- `conformance`: what a framework front must guarantee. Write a script that trains the task of `scripts.task` with your
  framework, wrap it in a `FrameworkScript`, and run each of `SCENARIOS` over it. The results are compared with the same
  training in plain NumPy, sample by sample (`assertions`).

Both are plain functions, so any test runner can call them; their docstrings show a pytest test of four lines.

Tools:

- `run_under_test`: a real `shoal run` in a home of its own, whose members can be watched, killed and waited for.
- `shoal_home`: a SHOAL_HOME and working directory for any commands, with no process left behind.
- `threaded_world`: several members in one process, one thread each, for tests of what a step computes.
- `emulated_speeds`: machines of different speeds, and the shares that are best for them.
- `wait`: `until`, the one way to wait for a condition.
- `asgi_client`, `wheelhouse`: an HTTP connection without a socket; a folder of wheels without a network.

Tests wait for conditions and never for times: deadlines guard against hangs only and are far above what a loaded
machine needs. A test script slows down at `scripts.hold` until its test lets it finish, so that there is always time to
hurt it.

May import: everything in shoal.
"""
