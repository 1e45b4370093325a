"""Commands of the ssh engine, word for word."""

from __future__ import annotations

import sys

import msgspec
import pytest

from shoal.engines import pool_config
from shoal.engines.engine import AllocationRequest
from shoal.engines.ssh import command
from shoal.engines.ssh.command import SshHost, SshOptions, order
from shoal.engines.ssh.engine import Ssh
from shoal.errors import BadPool
from shoal.wire.credentials import Credentials

REQUEST = AllocationRequest(
    "lab-2", "c0ffee", "https://10.0.0.1:4242", Credentials("s3cret", "PEM"), 4, ("--grace", "20")
)

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


def test_host_is_called_with_the_users_own_configuration() -> None:
    rendered = engine().render(REQUEST)
    assert " ".join(rendered.argv) == f"{SSH} -- me@gpu2 python3 {HELPER}"
    assert rendered.text == SCRIPT
    assert rendered.env == {"SSH_ASKPASS_REQUIRE": "never"}


def test_options_of_the_pool_are_passed_to_ssh() -> None:
    rendered = engine(
        hosts=["ssh://me@gpu1:2222*4"],
        port=22022,
        identity="~/.ssh/lab",
        config="/etc/lab/ssh config",
        accept_new=True,
        connect_timeout_s=3,
        python="~/venv/bin/python",
        directory="/scratch/me",
    ).render(REQUEST)
    defaults = SSH.replace("ConnectTimeout=10", "ConnectTimeout=3").removeprefix("ssh ")
    assert " ".join(rendered.argv) == (
        f"ssh -F /etc/lab/ssh config -i ~/.ssh/lab -o IdentitiesOnly=yes -p 22022 {defaults}"
        f' -o StrictHostKeyChecking=accept-new -- ssh://me@gpu1:2222 "$HOME"/venv/bin/python {HELPER}'
    )
    assert "home=/scratch/me/allocations/c0ffee/lab-2\n" in rendered.text
    assert '\nexec "$HOME"/venv/bin/python -P -m shoal.agent ' in rendered.text


def test_jump_host_shares_its_connection_and_never_prompts() -> None:
    argv = engine(jump="gate", config="/50%/config").render(REQUEST).argv
    jump = SSH.removeprefix("ssh ").replace("%C", "%%C")
    assert f"ProxyCommand=ssh -W [%h]:%p -F /50%%/config {jump} -- gate" in argv


def test_setup_lines_run_before_the_agent_only() -> None:
    rendered = engine(setup=["module load python/3.12"], python="python").render(REQUEST)
    assert rendered.argv[-1] == f"python3 {HELPER}"
    assert "\nmodule load python/3.12\nexec python -P -m shoal.agent" in rendered.text


def test_helper_command_means_the_same_to_every_login_shell() -> None:
    assert not set("$`!\\\n") & set(command.helper(SshOptions(hosts=("h",))))


def test_rendered_request_has_no_secret() -> None:
    rendered = engine().render(REQUEST)
    assert "s3cret" not in " ".join((*rendered.argv, rendered.text, *rendered.env.values()))


def test_consecutive_allocations_begin_with_different_hosts() -> None:
    hosts = (SshHost("a", 1), SshHost("b", 1), SshHost("c", 1))
    assert [order(hosts, f"lab-{number}")[0].host for number in (1, 2, 3, 4)] == ["a", "b", "c", "a"]
    assert order(hosts, "lab-2") == (hosts[1], hosts[2], hosts[0])
    assert order(hosts, "evaluator") == order(hosts, "evaluator")
    assert set(order(hosts, "evaluator")) == set(hosts)


def test_hosts_with_a_shared_disk_use_this_interpreter() -> None:
    assert f"\nexec {sys.executable} -P -m shoal.agent" in engine(shared=True).render(REQUEST).text


def test_limit_of_the_pool_is_what_its_hosts_take() -> None:
    assert engine(hosts=["a", "b*3"], per_host=2).max_allocations == 5
    assert pool_config.parse("lab", {"engine": "ssh", "hosts": ["a", "b"], "limit": 16})[0].limit == 2
    assert pool_config.parse("lab", {"engine": "ssh", "hosts": ["a", "b"], "limit": 1})[0].limit == 1


def test_host_may_state_how_many_allocations_it_takes() -> None:
    assert command.hosts("lab", SshOptions(hosts=("a", "me@b*3"), per_host=2)) == (SshHost("a", 2), SshHost("me@b", 3))


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": []},
        {"hosts": ["-oProxyCommand=true"]},
        {"hosts": ["a b"]},
        {"hosts": ["a*0"]},
        {"hosts": ["a", "a*2"]},
        {"hosts": [""]},
        {"hosts": ["$(x)"]},
        {"hosts": ["me@`x`"]},
        {"hosts": ["a;x"]},
        {"hosts": ["a|x"]},
        {"hosts": ["ssh://me@a\x1b:22"]},
        {"jump": "$(x)"},
        {"per_host": 0},
        {"parallel": 0},
        {"connect_timeout_s": 0},
        {"jump": "-W"},
    ],
)
def test_text_that_ssh_would_not_take_as_a_host_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadPool) as error:
        engine(**options)
    assert error.value.do


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        engine(host="a")


def test_handle_names_host_and_allocation() -> None:
    for host in ("a", "me@a", "ssh://me@[::1]:22"):
        assert command.of_handle(command.handle(host, "tag", "lab-1")) == (host, "tag", "lab-1")
