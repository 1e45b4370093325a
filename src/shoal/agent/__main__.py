"""`python -m shoal.agent`: the agent of this machine."""

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
    parser = argparse.ArgumentParser(prog="shoal.agent", description="Starts, watches and ends members here.")
    parser.add_argument("--url", required=True, help="the coordinator; of several, with commas, the first that answers")
    parser.add_argument("--token-file", required=True, help="its token, and its certificate if it has one")
    parser.add_argument("--name", default=socket.gethostname().split(".")[0], help="this machine's name in runs")
    parser.add_argument("--slots", type=int, default=None, help="how many members it offers (default: any number)")
    parser.add_argument("--dir", type=Path, required=True, help="where logs are kept")
    parser.add_argument("--interface", default="", help="interface to announce (default: towards the coordinator)")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds for members to hand over before SIGKILL")
    parser.add_argument(
        "--idle", type=float, default=600.0, help="seconds without members or coordinator before it gives up"
    )
    parser.add_argument(
        "--orphan", type=float, default=None, help="seconds without coordinator before members are ended, too"
    )
    parser.add_argument("--apart", action="store_true", help="this machine does not see the disk of who starts runs")
    parser.add_argument("--lifeline", type=int, default=None, help="descriptor of a pipe; its end ends everything")
    parser.add_argument("--notice-source", default="", help="aws, gcp, azure, file:PATH, slurm, or a plug-in")
    parser.add_argument("--notice-url", default="", help="base URL of the source, if it is not the usual one")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="modules that the warm process imports")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("websockets").setLevel(logging.WARNING)
    settings = AgentSettings(
        url=given.url,
        token_file=given.token_file,
        name=given.name,
        directory=given.dir.absolute(),
        slots=given.slots,
        interface=given.interface,
        grace_s=given.grace,
        idle_s=given.idle,
        orphan_timeout_s=given.orphan,
        apart=given.apart,
        lifeline=given.lifeline,
        notice_source=given.notice_source,
        notice_url=given.notice_url,
        preload=tuple(name for name in given.preload.split(",") if name),
    )
    return run(settings, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
