"""What becomes an agent in an environment that is made for it, word for word."""

from __future__ import annotations

import inspect
import sys

import msgspec
import pytest

from shoal.engines import agent_script, pool_config
from shoal.engines.engine import AllocationRequest, EngineOptions
from shoal.engines.local import Local
from shoal.engines.ray.engine import Ray, RayOptions, actor_options
from shoal.engines.slurm.engine import Slurm, SlurmOptions
from shoal.engines.ssh import command
from shoal.engines.ssh.command import SshOptions
from shoal.errors import BadPool
from shoal.pack.environments.recipe import PublishedEnvironment
from shoal.pack.remote import bootstrap
from shoal.wire.credentials import Credentials

MADE = PublishedEnvironment("5ea1", "4ec1")
ASK = AllocationRequest(
    "lab-2", "c0ffee", "https://10.0.0.1:4242", Credentials("s3cret", "PEM"), 4, ("--grace", "20"), environment=MADE
)
BEFORE = """\
set -e
umask 077
home="$HOME"/scratch/allocations/c0ffee/lab-2
mkdir -p "$home"
module load python
exec >>"$home/agent.log" 2>&1
python3 -c 'import sys; sys.version_info < (3, 7) and sys.exit('"'"'error[S442] the Python of this machine is too old: \
needed is 3.7, it is '"'"' + sys.version.split()[0])'
cat >"$home/first.py" <<'SHOAL'
"""
AFTER = """\
SHOAL
exec python3 "$home/first.py" "${home%/*/*/*}/environments" https://10.0.0.1:4242 "$home/token" 5ea1 4ec1 lab-2 \
--url https://10.0.0.1:4242 --token-file "$home/token" --name lab-2 --dir "$home" --slots 4 --grace 20
"""


def test_any_python_fetches_shoal_and_becomes_the_agent() -> None:
    options = EngineOptions(directory="~/scratch", setup=("module load python",), environment="requirements.txt")
    assert agent_script.script(ASK, options, python="python3") == BEFORE + inspect.getsource(bootstrap) + AFTER


def test_nothing_in_what_is_sent_ends_it_before_its_end() -> None:
    assert "SHOAL" not in inspect.getsource(bootstrap).splitlines()


@pytest.mark.parametrize("engine", ["local", "ssh", "slurm", "ray"])
def test_every_engine_takes_an_environment_and_shows_no_secret(engine: str) -> None:
    table = {"engine": engine, "environment": "/home/me/requirements.txt", "directory": "/scratch"}
    _, made = pool_config.parse("lab", table | ({"hosts": ["gpu1"]} if engine == "ssh" else {}))
    shown = made.render(ASK)
    words = " ".join((*shown.argv, shown.text))
    assert "first.py" in words
    assert " 5ea1 4ec1 lab-2 " in words
    assert "s3cret" not in words


def test_without_an_environment_nothing_is_made_here_or_there() -> None:
    plain = msgspec.structs.replace(EngineOptions())
    ask = AllocationRequest("lab-2", "c0ffee", "https://10.0.0.1:4242", Credentials("s3cret"))
    assert Local("lab", plain).render(ask).argv[:4] == (sys.executable, "-P", "-m", "shoal.agent")


def test_a_host_needs_no_shoal_if_there_is_an_environment() -> None:
    bare, made = SshOptions(hosts=("h",)), SshOptions(hosts=("h",), environment="requirements.txt")
    assert 'find_spec("shoal")' in command.check(bare)
    assert command.check(made) == (
        "set -e\nexec python3 -c 'import sys; print(sys.version.split()[0]); "
        "sys.version_info >= (3, 7) or sys.exit(0); "
        'print("fit")\'\n'
    )


def test_slurm_starts_an_image_that_sees_where_the_token_is() -> None:
    options = SlurmOptions(image="nvcr.io#nvidia/pytorch:26.01-py3", directory="/shared/me")
    shown = Slurm("spot", options).render(
        AllocationRequest("spot-1", "c0ffee", "https://head:1", Credentials("s3cret"))
    )
    assert shown.argv[-2:] == (
        "--container-image=nvcr.io#nvidia/pytorch:26.01-py3",
        "--container-mounts=/shared/me:/shared/me",
    )
    assert "\nexec python3 -P -m shoal.agent " in shown.text, "not the interpreter of this machine"


def test_ray_starts_its_actor_in_an_image() -> None:
    assert actor_options(RayOptions(image="lab/ray:2.60"))["runtime_env"] == {"image_uri": "lab/ray:2.60"}
    assert "runtime_env" not in actor_options(RayOptions())


def test_what_runs_in_an_image_does_not_see_this_disk_unless_one_says_so() -> None:
    assert Slurm("spot", SlurmOptions()).shared
    assert not Slurm("spot", SlurmOptions(image="lab/torch")).shared
    assert Slurm("spot", SlurmOptions(image="lab/torch", shared=True)).shared
    assert not Ray("spot", RayOptions(image="lab/torch")).shared


@pytest.mark.parametrize("engine", ["local", "ssh"])
def test_engines_without_containers_name_those_that_have_them(engine: str) -> None:
    with pytest.raises(BadPool) as refused:
        pool_config.parse(
            "lab", {"engine": engine, "image": "lab/torch"} | ({"hosts": ["a"]} if engine == "ssh" else {})
        )
    assert "images are for slurm and ray" in refused.value.why
    assert "environment" in refused.value.do
