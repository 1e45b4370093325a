"""Command line of the agent: `python -m shoal.agent`."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from shoal.agent.agent import AgentSettings, run
from shoal.agent.processes.zygote import PRELOAD


def main() -> int:
    """Run an agent with the given arguments; return its exit code."""
    parser = argparse.ArgumentParser(prog="shoal.agent", description="Start, watch and end members on this machine.")
    parser.add_argument(
        "--url", required=True, help="coordinator; of several, separated by commas, the first that answers is used"
    )
    parser.add_argument("--token-file", required=True, help="file with the coordinator's token and certificate")
    parser.add_argument("--name", default=socket.gethostname().split(".")[0], help="this machine's name in runs")
    parser.add_argument("--slots", type=int, default=None, help="most members on this machine (default: unlimited)")
    parser.add_argument("--dir", type=Path, required=True, help="directory for logs")
    parser.add_argument(
        "--interface",
        default="",
        help="network interface that peers connect to (default: the one towards the coordinator)",
    )
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for members to hand over before SIGKILL")
    parser.add_argument(
        "--idle", type=float, default=600.0, help="seconds without members and coordinator before the agent exits"
    )
    parser.add_argument(
        "--orphan",
        type=float,
        default=None,
        help="seconds without coordinator before members are ended (default: never)",
    )
    parser.add_argument(
        "--apart", action="store_true", help="this machine does not share the disk of the machine that starts runs"
    )
    parser.add_argument(
        "--lifeline", type=int, default=None, help="descriptor of a pipe; when it closes, the agent ends everything"
    )
    parser.add_argument("--notice-source", default="", help="aws, gcp, azure, slurm, file:PATH, or a plug-in")
    parser.add_argument("--notice-url", default="", help="base URL of the notice source (default: the platform's)")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="modules that the warm process imports")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("websockets").setLevel(logging.WARNING)
    settings = AgentSettings(
        url=arguments.url,
        token_file=arguments.token_file,
        name=arguments.name,
        directory=arguments.dir.absolute(),
        slots=arguments.slots,
        interface=arguments.interface,
        grace_s=arguments.grace,
        idle_s=arguments.idle,
        orphan_timeout_s=arguments.orphan,
        apart=arguments.apart,
        lifeline=arguments.lifeline,
        notice_source=arguments.notice_source,
        notice_url=arguments.notice_url,
        preload=tuple(name for name in arguments.preload.split(",") if name),
    )
    return run(settings, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
