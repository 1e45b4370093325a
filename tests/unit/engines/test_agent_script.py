"""Script that builds an environment and becomes an agent in it, word for word."""

from __future__ import annotations

import inspect
import sys

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

ENVIRONMENT = PublishedEnvironment("5ea1", "4ec1")
REQUEST = AllocationRequest(
    "lab-2",
    "c0ffee",
    "https://10.0.0.1:4242",
    Credentials("s3cret", "PEM"),
    4,
    ("--grace", "20"),
    environment=ENVIRONMENT,
)
BEFORE = """\
set -e
umask 077
home="$HOME"/scratch/allocations/c0ffee/lab-2
mkdir -p "$home"
module load python
exec >>"$home/agent.log" 2>&1
python3 -c 'import sys; sys.version_info < (3, 7) and sys.exit('"'"'error[S442] Python on this machine is too old: \
need 3.7 or newer, found '"'"' + sys.version.split()[0])'
cat >"$home/first.py" <<'SHOAL'
"""
AFTER = """\
SHOAL
exec python3 "$home/first.py" "${home%/*/*/*}/environments" https://10.0.0.1:4242 "$home/token" 5ea1 4ec1 lab-2 \
--url https://10.0.0.1:4242 --token-file "$home/token" --name lab-2 --dir "$home" --slots 4 --grace 20
"""


def test_script_fetches_shoal_with_any_python_and_becomes_the_agent() -> None:
    options = EngineOptions(directory="~/scratch", setup=("module load python",), environment="requirements.txt")
    assert agent_script.script(REQUEST, options, python="python3") == BEFORE + inspect.getsource(bootstrap) + AFTER


def test_bootstrap_does_not_contain_the_end_marker_of_its_here_document() -> None:
    assert "SHOAL" not in inspect.getsource(bootstrap).splitlines()


@pytest.mark.parametrize("engine", ["local", "ssh", "slurm", "ray"])
def test_every_engine_accepts_an_environment_and_renders_no_secret(engine: str) -> None:
    table = {"engine": engine, "environment": "/home/me/requirements.txt", "directory": "/scratch"}
    _, built = pool_config.parse("lab", table | ({"hosts": ["gpu1"]} if engine == "ssh" else {}))
    rendered = built.render(REQUEST)
    words = " ".join((*rendered.argv, rendered.text))
    assert "first.py" in words
    assert " 5ea1 4ec1 lab-2 " in words
    assert "s3cret" not in words


def test_local_agent_without_environment_runs_this_interpreter() -> None:
    request = AllocationRequest("lab-2", "c0ffee", "https://10.0.0.1:4242", Credentials("s3cret"))
    assert Local("lab", EngineOptions()).render(request).argv[:4] == (sys.executable, "-P", "-m", "shoal.agent")


def test_ssh_check_requires_no_shoal_if_there_is_an_environment() -> None:
    bare, built = SshOptions(hosts=("h",)), SshOptions(hosts=("h",), environment="requirements.txt")
    assert 'find_spec("shoal")' in command.check(bare)
    assert command.check(built) == (
        "set -e\nexec python3 -c 'import sys; print(sys.version.split()[0]); "
        "sys.version_info >= (3, 7) or sys.exit(0); "
        'print("fit")\'\n'
    )


def test_slurm_container_mounts_the_directory_of_the_token() -> None:
    options = SlurmOptions(image="nvcr.io#nvidia/pytorch:26.01-py3", directory="/shared/me")
    rendered = Slurm("spot", options).render(
        AllocationRequest("spot-1", "c0ffee", "https://head:1", Credentials("s3cret"))
    )
    assert rendered.argv[-2:] == (
        "--container-image=nvcr.io#nvidia/pytorch:26.01-py3",
        "--container-mounts=/shared/me:/shared/me",
    )
    assert "\nexec python3 -P -m shoal.agent " in rendered.text, "not the interpreter of this machine"


def test_ray_actor_runs_in_the_image() -> None:
    assert actor_options(RayOptions(image="lab/ray:2.60"))["runtime_env"] == {"image_uri": "lab/ray:2.60"}
    assert "runtime_env" not in actor_options(RayOptions())


def test_container_does_not_share_the_disk_unless_configured() -> None:
    assert Slurm("spot", SlurmOptions()).shared
    assert not Slurm("spot", SlurmOptions(image="lab/torch")).shared
    assert Slurm("spot", SlurmOptions(image="lab/torch", shared=True)).shared
    assert not Ray("spot", RayOptions(image="lab/torch")).shared


@pytest.mark.parametrize("engine", ["local", "ssh"])
def test_image_for_an_engine_without_containers_names_those_that_have_them(engine: str) -> None:
    with pytest.raises(BadPool) as error:
        pool_config.parse(
            "lab", {"engine": engine, "image": "lab/torch"} | ({"hosts": ["a"]} if engine == "ssh" else {})
        )
    assert "images are for slurm and ray" in error.value.why
    assert "environment" in error.value.do
