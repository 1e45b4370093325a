"""What is handed to Ray, and what is said of its nodes."""

from __future__ import annotations

import json
import sys

import msgspec
import pytest

from shoal.engines.engine import AllocationRequest
from shoal.engines.ray import engine as ray_engine
from shoal.engines.ray import nodes as ray_nodes
from shoal.engines.ray.engine import Ray, RayOptions
from shoal.wire.credentials import Credentials

ASK = AllocationRequest("spot-3", "c0ffee", "https://lab:7000", Credentials("very-secret", "PEM"), 2, ("--grace", "9"))
BIG = {
    "total": {"CPU": 8.0, "GPU": 4.0, "memory": 64e9},
    "free": {"CPU": 5.0, "GPU": 1.0, "memory": 64e9},
    "labels": {},
}
SPOT = {"total": {"CPU": 4.0}, "free": {"CPU": 4.0}, "labels": {"market": "spot", ray_nodes.NODE_GROUP: "cheap"}}
HEAD = {"total": {}, "free": {}, "labels": {}}

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


def test_a_hire_is_a_detached_actor_that_runs_the_agent():
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
    rendered = Ray("spot", options).render(ASK)
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


def test_the_token_is_not_shown():
    rendered = Ray("spot", RayOptions()).render(ASK)
    assert "very-secret" not in rendered.text + " ".join(rendered.argv)


def test_a_group_decides_where_its_hires_go():
    assert "scheduling_strategy" not in ray_engine.actor_options(RayOptions(placement="spread", group="ours"))


def test_unknown_settings_are_errors():
    with pytest.raises(msgspec.ValidationError, match="cpu"):
        msgspec.convert({"cpu": 3}, RayOptions)
    assert msgspec.convert({"cpus": 3, "resources": {"spot": 1}}, RayOptions).resources == {"spot": 1.0}


def test_no_name_of_one_tag_begins_like_those_of_another():
    other = ray_engine.actor_name("a-b", "c")
    assert other.removeprefix(ray_engine.actor_name("a", "")).startswith("-")
    assert ray_engine.actor_name("a-b", "c") != ray_engine.actor_name("a", "b-c")


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [("spot", True), ("!spot", False), ("in(od, spot)", True), ("!in(od,spot)", False), ("od", False), ("!od", True)],
)
def test_labels_are_read_as_ray_reads_them(wanted: str, fits: bool):
    assert ray_nodes.suits({"market": wanted}, {"market": "spot"}) is fits


def test_a_waiting_hire_says_what_it_waits_for():
    def why(**options: object) -> str:
        return ray_nodes.why_waiting(RayOptions(**options), [BIG, SPOT, HEAD]).partition(";")[0]

    assert why(labels={"market": "od"}) == "none of 3 nodes has the labels market=od"
    assert why(gpus=8.0) == "no node has CPU 1, GPU 8 at all"
    assert why(gpus=2.0) == "CPU 1, GPU 2 is in use on all of 1 nodes that have it"
    assert why(cpus=4.0) == "Ray is placing it"
    assert why(cpus=0.0) == "Ray is placing it"


def test_offers_count_the_hires_that_would_fit_by_kind_of_node():
    found = ray_nodes.offers(RayOptions(cpus=2.0), [BIG, BIG, SPOT, HEAD])
    assert [(one.kind, one.count, one.cpus) for one in found] == [
        ("cheap", 2, 2),
        ("node with 8 CPUs, 4 GPUs", 4, 2),
        ("node with no CPUs", 0, 2),
    ]
    assert [bool(one.why) for one in found] == [False, False, True]


def test_offers_of_full_and_unfit_nodes_say_why():
    (big, head) = ray_nodes.offers(RayOptions(gpus=2.0, cpus=0.0), [BIG, HEAD])
    assert (big.count, big.why.partition(";")[0]) == (0, "GPU 2 is in use on all of 1 nodes that have it")
    assert (head.count, head.why.partition(";")[0]) == (0, "no node has GPU 2 at all")


def test_what_takes_nothing_fits_any_number_of_times():
    assert [one.count for one in ray_nodes.offers(RayOptions(cpus=0.0), [BIG])] == [None]


@pytest.mark.parametrize(
    ("address", "place"),
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
def test_addresses(address: str, place: tuple[str, int] | None):
    assert ray_engine.split_address(address) == place


def test_a_death_is_told_in_short():
    died = (
        "The actor is dead because its worker process has died. Worker exit detail: Worker exits by an user request. "
    )
    assert ray_engine.brief(died + "the agent ended with exit code 4: error[S207] no") == (
        "the agent ended with exit code 4: error[S207] no"
    )
    assert ray_engine.brief("It died. Some common causes include: many") == "It died."
    lost = "The actor died because its node has died. Node Id: bbe6 the node was terminated unexpectedly: no answer"
    assert ray_engine.brief(lost) == "its node is lost: no answer"
