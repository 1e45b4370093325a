"""What the ssh engine would run, word for word."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import replace

import msgspec
import pytest

from shoal.engines import grace_period, pool_config
from shoal.engines.engine import AllocationRequest
from shoal.engines.ssh import command, remote_helper
from shoal.engines.ssh.command import SshHost, SshOptions, order, places
from shoal.engines.ssh.engine import Ssh
from shoal.errors import BadPool
from shoal.wire.credentials import Credentials

ASK = AllocationRequest("lab-2", "c0ffee", "https://10.0.0.1:4242", Credentials("s3cret", "PEM"), 4, ("--grace", "20"))

SSH = (
    "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ConnectionAttempts=1 -o ServerAliveInterval=5"
    " -o ServerAliveCountMax=2 -o ControlMaster=auto -o ControlPath=/tmp/c/%C -o ControlPersist=60 -o RequestTTY=no"
    " -o RemoteCommand=none -o ClearAllForwardings=yes -o ForwardAgent=no -o ForwardX11=no -o LogLevel=ERROR"
)
HELPER = (
    '-c "import json, sys; sys.version_info < (3, 7) and'
    " sys.exit('shoal needs a newer Python here than ' + sys.version.split()[0]);"
    ' exec(json.loads(sys.stdin.readline()))"'
)
SCRIPT = """\
set -e
umask 077
home="${SHOAL_HOME:-$HOME/.shoal}"/allocations/c0ffee/lab-2
mkdir -p "$home"
exec python3 -P -m shoal.agent --url https://10.0.0.1:4242 --token-file "$home/token" --name lab-2 --dir "$home" \
--slots 4 --grace 20 >>"$home/agent.log" 2>&1
"""


def engine(**options: object) -> Ssh:
    return Ssh("lab", msgspec.convert({"hosts": ["gpu1", "me@gpu2"], **options}, SshOptions), control="/tmp/c")


def test_a_host_is_called_with_the_users_own_configuration() -> None:
    rendered = engine().render(ASK)
    assert " ".join(rendered.argv) == f"{SSH} -- me@gpu2 python3 {HELPER}"
    assert rendered.text == SCRIPT
    assert rendered.env == {"SSH_ASKPASS_REQUIRE": "never"}


def test_all_that_a_pool_can_be_told_is_in_it() -> None:
    rendered = engine(
        hosts=["ssh://me@gpu1:2222*4"],
        port=22022,
        identity="~/.ssh/lab",
        config="/etc/lab/ssh config",
        accept_new=True,
        connect_timeout_s=3,
        python="~/venv/bin/python",
        directory="/scratch/me",
    ).render(ASK)
    ours = SSH.replace("ConnectTimeout=10", "ConnectTimeout=3").removeprefix("ssh ")
    assert " ".join(rendered.argv) == (
        f"ssh -F /etc/lab/ssh config -i ~/.ssh/lab -o IdentitiesOnly=yes -p 22022 {ours}"
        f' -o StrictHostKeyChecking=accept-new -- ssh://me@gpu1:2222 "$HOME"/venv/bin/python {HELPER}'
    )
    assert "home=/scratch/me/allocations/c0ffee/lab-2\n" in rendered.text
    assert '\nexec "$HOME"/venv/bin/python -P -m shoal.agent ' in rendered.text


def test_a_jump_shares_its_connection_and_asks_no_questions_either() -> None:
    argv = engine(jump="gate", config="/50%/config").render(ASK).argv
    jump = SSH.removeprefix("ssh ").replace("%C", "%%C")
    assert f"ProxyCommand=ssh -W [%h]:%p -F /50%%/config {jump} -- gate" in argv


def test_lines_before_the_agent_are_not_run_for_each_look() -> None:
    rendered = engine(setup=["module load python/3.12"], python="python").render(ASK)
    assert rendered.argv[-1] == f"python3 {HELPER}"
    assert "\nmodule load python/3.12\nexec python -P -m shoal.agent" in rendered.text


def test_what_a_login_shell_is_given_means_the_same_to_all_of_them() -> None:
    assert not set("$`!\\\n") & set(command.helper(SshOptions(hosts=("h",))))


def test_what_is_sent_to_hosts_is_read_by_the_oldest_python_that_is_taken() -> None:
    source = inspect.getsource(remote_helper)
    ast.parse(source, feature_version=command.OLDEST_HELPER)
    imported = {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
    assert not {name for name in imported if name.startswith("shoal")}


def test_no_secret_is_in_it() -> None:
    rendered = engine().render(ASK)
    assert "s3cret" not in " ".join((*rendered.argv, rendered.text, *rendered.env.values()))


def test_hires_that_follow_each_other_begin_with_different_hosts() -> None:
    among = (SshHost("a", 1), SshHost("b", 1), SshHost("c", 1))
    assert [order(among, f"lab-{number}")[0].host for number in (1, 2, 3, 4)] == ["a", "b", "c", "a"]
    assert order(among, "lab-2") == (among[1], among[2], among[0])
    assert order(among, "evaluator") == order(among, "evaluator")
    assert set(order(among, "evaluator")) == set(among)


def test_hosts_that_see_this_disk_use_the_interpreter_that_runs_here() -> None:
    assert f"\nexec {sys.executable} -P -m shoal.agent" in engine(shared=True).render(ASK).text


def test_a_pool_has_no_more_than_its_hosts_take() -> None:
    assert engine(hosts=["a", "b*3"], per_host=2).max_allocations == 5
    assert pool_config.parse("lab", {"engine": "ssh", "hosts": ["a", "b"], "limit": 16})[0].limit == 2
    assert pool_config.parse("lab", {"engine": "ssh", "hosts": ["a", "b"], "limit": 1})[0].limit == 1


def test_a_host_says_itself_how_many_it_takes() -> None:
    assert places("lab", SshOptions(hosts=("a", "me@b*3"), per_host=2)) == (SshHost("a", 2), SshHost("me@b", 3))


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": []},
        {"hosts": ["-oProxyCommand=true"]},
        {"hosts": ["a b"]},
        {"hosts": ["a*0"]},
        {"hosts": ["a", "a*2"]},
        {"hosts": [""]},
        {"per_host": 0},
        {"parallel": 0},
        {"connect_timeout_s": 0},
        {"jump": "-W"},
    ],
)
def test_what_ssh_would_take_for_something_else_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadPool) as refused:
        engine(**options)
    assert refused.value.do


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        engine(host="a")


def test_a_handle_names_the_host_and_the_hire() -> None:
    for host in ("a", "me@a", "ssh://me@[::1]:22"):
        assert command.of_handle(command.handle(host, "tag", "lab-1")) == (host, "tag", "lab-1")


def test_the_grace_is_the_agents_own() -> None:
    assert grace_period.of(ASK) == 20.0
    assert grace_period.of(replace(ASK, options=())) == 30.0
