"""Description of the machine that figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil


def describe() -> dict[str, object]:
    """Return the hardware and the versions, without names or paths."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "shoal": metadata.version("shoal-train"),
        "load_before": round(os.getloadavg()[0], 2),
    }
