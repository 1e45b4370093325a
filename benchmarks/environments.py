"""Virtual environments of the peers, created once under benchmarks/.envs."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).parent / ".envs"
REQUIREMENTS = {
    "torchrun": ("torch==2.13.0", "numpy"),
    "torchft": ("torch==2.13.0", "torchft==0.2.0", "numpy"),
}


def ready(name: str) -> Path:
    """Return the `bin` directory of a peer's environment; create the environment if it does not exist."""
    home = ENVIRONMENTS / name
    done = home / "requirements.txt"
    wanted = "\n".join(REQUIREMENTS[name])
    if not done.exists() or done.read_text() != wanted:
        print(f"making the environment of {name}: {', '.join(REQUIREMENTS[name])}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True)
        done.write_text(wanted)
    return home / "bin"


def main() -> None:
    for name in REQUIREMENTS:
        ready(name)


if __name__ == "__main__":
    main()
