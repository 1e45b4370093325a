"""Source of the remote helper as one program: its modules travel as text and are loaded under their own names."""

from __future__ import annotations

import functools
import inspect

from shoal.engines import process_tree
from shoal.engines.ssh import allocation_dir, remote_helper

# In the order of their imports; the last one has `main`.
MODULES = (process_tree, allocation_dir, remote_helper)

# Runs on Python 3.7. Parent packages are empty stand-ins, so nothing of a Shoal installed on the host is imported.
_LOADER = """
import sys, types

def load(modules):
    for name, source in modules:
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            sys.modules.setdefault(package, types.ModuleType(package))
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, name, "exec"), module.__dict__)
    return module
"""


@functools.cache
def program() -> str:
    """Return Python source that reads one request from standard input and prints the reply."""
    modules = [(module.__name__, inspect.getsource(module)) for module in MODULES]
    return f"{_LOADER}\nload({modules!r}).main()\n"
