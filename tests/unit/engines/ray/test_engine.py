"""Requests to the Ray driver, word for word."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest

from shoal.engines.engine import AllocationRequest
from shoal.engines.ray import engine as ray_engine
from shoal.engines.ray.engine import Ray, RayOptions
from shoal.wire.credentials import Credentials

REQUEST = AllocationRequest(
    "spot-3", "c0ffee", "https://lab:7000", Credentials("very-secret", "PEM"), 2, ("--grace", "9")
)

SCRIPT = """\
set -e
umask 077
home="${SHOAL_HOME:-$HOME/.shoal}"/allocations/c0ffee/spot-3
mkdir -p "$home"
printf "home=%s\\n" "$home"
rm -f "$home/token"
while IFS= read -r line && [ "$line" != . ]; do printf "%s\\n" "$line"; done >"$home/token"
exec 3<&0 </dev/null
module load cuda
exec python3 -P -m shoal.agent --url https://lab:7000 --token-file "$home/token" --name spot-3 --dir "$home" \
--slots 2 --grace 9 --lifeline 3 >>"$home/agent.log" 2>&1
"""


def test_allocation_is_a_detached_actor_that_runs_the_agent():
    options = RayOptions(
        address="ray://head:10001",
        setup=("module load cuda",),
        cpus=2.0,
        gpus=0.5,
        memory_bytes=4_000_000_000,
        resources={"spot": 1.0},
        labels={"ray.io/market-type": "spot"},
        placement="spread",
    )
    rendered = Ray("spot", options).render(REQUEST)
    assert rendered.argv == (sys.executable, "-P", str(ray_engine.DRIVER), "--address", "ray://head:10001")
    assert json.loads(rendered.text) == {
        "do": "submit",
        "name": "shoal-c0ffee-spot-3",
        "options": {
            "num_cpus": 2.0,
            "num_gpus": 0.5,
            "memory": 4_000_000_000,
            "resources": {"spot": 1.0},
            "label_selector": {"ray.io/market-type": "spot"},
            "scheduling_strategy": "SPREAD",
        },
        "group": "",
        "script": SCRIPT,
    }


def test_rendered_request_has_no_token():
    rendered = Ray("spot", RayOptions()).render(REQUEST)
    assert "very-secret" not in rendered.text + " ".join(rendered.argv)


def test_placement_group_overrides_the_scheduling_strategy():
    assert "scheduling_strategy" not in ray_engine.actor_options(RayOptions(placement="spread", group="ours"))


def test_unknown_option_is_an_error():
    with pytest.raises(msgspec.ValidationError, match="cpu"):
        msgspec.convert({"cpu": 3}, RayOptions)
    assert msgspec.convert({"cpus": 3, "resources": {"spot": 1}}, RayOptions).resources == {"spot": 1.0}


def test_actor_names_of_different_tags_share_no_prefix():
    other = ray_engine.actor_name("a-b", "c")
    assert other.removeprefix(ray_engine.actor_name("a", "")).startswith("-")
    assert ray_engine.actor_name("a-b", "c") != ray_engine.actor_name("a", "b-c")


@pytest.mark.parametrize(
    ("address", "host_and_port"),
    [
        ("head:6379", ("head", 6379)),
        ("ray://head:10001", ("head", 10001)),
        ("[::1]:6379", ("::1", 6379)),
        ("http://head:8265", None),
        ("head", None),
        ("head:0", None),
        (":6379", None),
        ("", None),
    ],
)
def test_address_is_split_into_host_and_port(address: str, host_and_port: tuple[str, int] | None):
    assert ray_engine.split_address(address) == host_and_port


def test_cause_of_death_is_shortened():
    died = (
        "The actor is dead because its worker process has died. Worker exit detail: Worker exits by an user request. "
    )
    assert ray_engine.brief(died + "the agent ended with exit code 4: error[S207] no") == (
        "the agent ended with exit code 4: error[S207] no"
    )
    assert ray_engine.brief("It died. Some common causes include: many") == "It died."
    lost = "The actor died because its node has died. Node Id: bbe6 the node was terminated unexpectedly: no answer"
    assert ray_engine.brief(lost) == "its node is lost: no answer"
