"""How each kind of environment is made on a machine; needs Linux, Python 3.7 and nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
import zlib

from shoal.errors import (
    ArchiveDamaged,
    EnvironmentNotBuilt,
    EnvironmentUnusable,
    PythonTooOld,
    ShoalError,
    VenvUnavailable,
)
from shoal.pack.remote.env_cache import node
from shoal.pack.remote.env_commands import BuildCommands, environ, plain, tail

try:
    from lzma import LZMAError
except ImportError:  # a Python that cannot read such archives at all
    LZMAError = EOFError  # type: ignore[assignment, misc]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from shoal.pack.remote.bootstrap import BootstrapClient
    from shoal.pack.remote.env_cache import EnvironmentCache

OLDEST = (3, 11)
NEWER = ("python3.14", "python3.13", "python3.12", "python3.11")
OFFLINE = re.compile(r"NewConnectionError|NameResolutionError|Max retries exceeded|Network is unreachable|timed out")
SOURCE = re.compile(r"(-i|-f|--(index-url|extra-index-url|find-links|no-index|trusted-host|pre|prefer-binary))\b")
HASHED = re.compile(r"--hash[= ]|--require-hashes")
FULL = re.compile(r"No space left on device|Disk quota exceeded")
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
PATHS = "import json, sys; print(json.dumps(sys.path))"


class EnvironmentBuilder:
    """Makes what one recipe asks for."""

    def __init__(self, coordinator: BootstrapClient, cache: EnvironmentCache, recipe: dict[str, Any]) -> None:
        self._coordinator, self._cache, self._recipe = coordinator, cache, recipe
        self._label: str = recipe["label"]
        self._doing = f"builds its environment from {self._label}"
        self._steps = BuildCommands(lambda: cache.doing(self._doing), self._label)

    def ready(self) -> tuple[str, dict[str, str]]:
        """The interpreter of the environment, and the variables that belong to it."""
        kind = self._recipe["kind"]
        kinds: dict[str, Callable[[str], str]] = {
            "requirements": self._install,
            "archive": self._unpack,
            "pex": self._open_pex,
        }
        # What is packed may lack Shoal, or have another; what is installed has it from the wheel.
        beside = "" if kind == "requirements" else self._shoal()
        made_of = hashlib.sha256("\0".join([self._recipe["made_of"], *self._machine()]).encode()).hexdigest()
        folder = self._cache.get(
            f"{kind}-{made_of[:20]}", self._doing, lambda folder: self._check(folder, kinds[kind](folder), beside)
        )
        with open(os.path.join(folder, "python")) as file:
            python = os.path.join(folder, file.read())
        return python, environ(dict(os.environ), python, beside)

    def _machine(self) -> list[str]:
        """What of this machine an environment depends on: a home may be shared by machines that differ."""
        here = [platform.machine(), *platform.libc_ver()]
        if self._recipe["kind"] == "archive":
            return here
        return [*here, os.path.realpath(self._python()), sys.version, str(sysconfig.get_config_var("SOABI"))]

    # --- kinds: each fills a folder, and gives the interpreter in it

    def _install(self, folder: str) -> str:
        given, pip = self._fetch(folder), self._recipe["pip"]
        python = self._venv(folder, *(["--without-pip"] if pip else []))
        if pip:
            with zipfile.ZipFile(os.path.join(given, pip)) as archive:
                archive.extractall(self._steps.said(folder, [python, "-c", SITE]))
        shoal = f"./{self._recipe['shoal']}"
        hashed = any(HASHED.search(line) for line in _lines(given))
        self._pip(folder, python, "-r", "requirements.txt", *(() if hashed else (shoal,)))
        if hashed:
            # What is locked stays as it is; only what it lacks for Shoal is added, from where the rest came from.
            with open(os.path.join(given, "locked.txt"), "w") as file:
                file.write(self._steps.said(folder, [python, "-m", "pip", "list", "--format=freeze"]))
            sources = [line for line in _lines(given) if SOURCE.match(line)]
            with open(os.path.join(given, "more.txt"), "w") as file:
                file.write("\n".join([*sources, "-c locked.txt", shoal]) + "\n")
            self._pip(folder, python, "-r", "more.txt")
        shutil.rmtree(given)
        return python

    def _pip(self, folder: str, python: str, *what: str) -> None:
        quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--no-warn-script-location")
        argv = [python, "-m", "pip", "install", *quiet, *what]
        code = self._steps.run(folder, argv, where=os.path.join(folder, "given"))
        if code != 0:
            raise self._not_installed(tail(folder) or [f"pip ended with {code}"])

    def _not_installed(self, said: list[str]) -> ShoalError:
        if any(FULL.search(line) for line in said):
            raise OSError(errno.ENOSPC, "No space left on device", f"the environment from {self._label}")
        errors = [line for line in said if line.startswith("ERROR:")]
        do = f"correct {self._label}"
        if any(OFFLINE.search(line) for line in said):
            do = "it reaches no index: write --index-url or --find-links into the file, or set PIP_INDEX_URL by setup"
        why = "; ".join((errors or said)[-3:])[:600]
        return EnvironmentNotBuilt(f"{self._label} cannot be installed on {node()}", why=why, do=do)

    def _unpack(self, folder: str) -> str:
        given, inside = self._fetch(folder), os.path.join(folder, "env")
        os.mkdir(inside)
        try:
            with tarfile.open(os.path.join(given, self._label)) as archive:
                for member in archive:
                    self._cache.doing(self._doing)
                    _extract(archive, member, inside)
        except (tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            if error.errno is None:
                raise self._damaged(str(error)) from error
            raise
        shutil.rmtree(given)
        tops = [inside, *(os.path.join(inside, one) for one in os.listdir(inside))]
        top = next((one for one in tops if os.path.lexists(os.path.join(one, "bin", "python"))), None)
        if top is None:
            raise self._damaged("there is no bin/python in it")
        python, mend = os.path.join(top, "bin", "python"), os.path.join(top, "bin", "conda-unpack")
        if os.path.exists(mend):
            self._steps.said(folder, [python, mend])
        return python

    def _damaged(self, why: str) -> ArchiveDamaged:
        do = "pack it anew: conda-pack, venv-pack, or tar of a virtual environment"
        return ArchiveDamaged(f"{self._label} cannot be unpacked on {node()}", why=why, do=do)

    def _open_pex(self, folder: str) -> str:
        """What a .pex finds when it runs is what a plain environment finds: members start interpreters of their own."""
        given, python = self._fetch(folder), self._venv(folder, "--without-pip")
        own = {"PEX_INTERPRETER": "1", "PEX_ROOT": os.path.join(folder, "pex")}
        argv = [python, os.path.join(given, self._label), "-c", PATHS]
        places = json.loads(self._steps.said(folder, argv, own).splitlines()[-1])
        site = self._steps.said(folder, [python, "-c", SITE])
        with open(os.path.join(site, "pex.pth"), "w") as file:
            file.write("\n".join(one for one in places if one.startswith(folder) and one != site) + "\n")
        return python

    # --- what they have in common

    def _shoal(self) -> str:
        """Where Shoal is laid out, to be found beside what is packed."""
        digest = self._recipe["files"][self._recipe["shoal"]]
        return self._cache.get(f"shoal-{digest[:20]}", "fetches Shoal", lambda folder: self._lay_out(digest, folder))

    def _lay_out(self, digest: str, folder: str) -> None:
        wheel = os.path.join(folder, "shoal.whl")
        self._coordinator.get(digest, wheel)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        os.unlink(wheel)

    def _fetch(self, folder: str) -> str:
        given = os.path.join(folder, "given")
        os.mkdir(given)
        for name, digest in self._recipe["files"].items():
            if self._recipe["kind"] == "requirements" or name == self._label:
                self._cache.doing(self._doing)
                self._coordinator.get(digest, os.path.join(given, os.path.basename(name)))
        return given

    def _python(self) -> str:
        """The one that runs this, or a newer one of this machine."""
        if sys.version_info >= OLDEST:
            return sys.executable
        found = next(filter(None, map(shutil.which, NEWER)), None)
        if found is None:
            raise _too_old(sys.executable, platform.python_version())
        return found

    def _venv(self, folder: str, *how: str) -> str:
        where = os.path.join(folder, "venv")
        code = self._steps.run(folder, [self._python(), "-m", "venv", *how, where])
        if code != 0:
            why = "; ".join(tail(folder)[-3:])[:400] or f"exit code {code}"
            do = "install it there (Debian, Ubuntu: python3-venv), or name another as python of the pool"
            raise VenvUnavailable(f"{self._python()} on {node()} cannot make environments", why=why, do=do)
        return os.path.join(where, "bin", "python")

    def _check(self, folder: str, python: str, beside: str) -> None:
        """See that an agent can start in it, and note how."""
        version = self._steps.said(folder, [python, "-c", "import sys; print(*sys.version_info[:2])"]).split()
        if tuple(map(int, version)) < OLDEST:
            raise _too_old(f"that of {self._label}", ".".join(version))
        env = environ(plain(folder), python, beside)
        if self._steps.run(folder, [python, "-c", "import shoal.agent.__main__"], env=env) != 0:
            do = "pack it with what Shoal needs, for machines like this one: pip install shoal before packing"
            why = (tail(folder) or ["it said nothing"])[-1]
            raise EnvironmentUnusable(f"no agent can start in {self._label} on {node()}", why=why, do=do)
        with open(os.path.join(folder, "python"), "w") as file:
            file.write(os.path.relpath(python, folder))
        shutil.rmtree(os.path.join(folder, "tmp"), ignore_errors=True)


def _lines(given: str) -> list[str]:
    """What all requirements files say."""
    found = []
    for name in sorted(one for one in os.listdir(given) if one.endswith(".txt")):
        with open(os.path.join(given, name)) as file:
            found += [line.strip() for line in file]
    return found


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, inside: str) -> None:
    name = os.path.normpath(member.name)
    if os.path.isabs(name) or name.split(os.sep)[0] == "..":
        raise tarfile.TarError(f"{member.name!r} would be written elsewhere")
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    if hasattr(tarfile, "tar_filter"):
        archive.extract(member, inside, filter="tar")
    else:
        archive.extract(member, inside)


def _too_old(python: str, version: str) -> PythonTooOld:
    oldest = ".".join(map(str, OLDEST))
    do = "name a newer one as python of the pool, or pack one into an archive"
    return PythonTooOld(
        f"the Python of {node()} is too old", why=f"{python} is Python {version}, needed is {oldest}", do=do
    )
