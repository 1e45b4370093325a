"""What to say when a framework that a script needs is not there."""

from __future__ import annotations

from shoal.errors import FrameworkMissing

# What each extra of the package brings along, as the interpreter knows it.
EXTRAS = {"torch": "torch", "keras": "keras", "tensorflow": "keras"}


def missing(error: ModuleNotFoundError) -> ImportError:
    """The error for a framework that could not be imported; any other module is named by its own."""
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS:
        return error
    return FrameworkMissing(
        f"{name} is not installed in this Python", why=str(error), do=f"pip install 'shoal-train[{EXTRAS[name]}]'"
    )
