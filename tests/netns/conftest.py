import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.netns.network import Network, sweep


def why_not() -> str:
    """What is missing for network namespaces, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool} (iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "ip", "link"], capture_output=True, check=False)
    return f"no network namespace can be made here: {probe.stderr.decode().strip()}" if probe.returncode else ""


@pytest.fixture
def network() -> Iterator[Network]:
    """A bridge, to which hosts are added; nothing of it is left afterwards."""
    if why := why_not():
        pytest.skip(why)
    sweep()
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()
