"""Error for a script whose framework is not installed."""

from __future__ import annotations

from shoal.errors import FrameworkMissing

# Top-level module of each framework, and the extra of this package that installs it.
EXTRAS = {"torch": "torch", "keras": "keras", "tensorflow": "keras"}


def missing_framework_error(error: ModuleNotFoundError) -> ImportError:
    """Return the error to raise for a failed import: FrameworkMissing for a framework, `error` itself otherwise."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        return error
    return FrameworkMissing(
        f"{name} is not installed in this Python", why=str(error), do=f"pip install 'shoal-train[{EXTRAS[name]}]'"
    )
