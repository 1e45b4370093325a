"""Builders of environments, one method for each kind of recipe.

A builder fills a folder of the cache and returns the path of the interpreter in it. The folder is final: virtual
environments contain absolute paths, so they are built where they will be used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
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
from shoal.pack.remote.env_cache import hostname
from shoal.pack.remote.env_commands import BuildCommands, agent_env, build_env, log_tail

try:
    from lzma import LZMAError
except ImportError:  # this Python cannot read .xz archives at all
    LZMAError = EOFError  # type: ignore[assignment, misc]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from shoal.pack.remote.bootstrap import BootstrapClient
    from shoal.pack.remote.env_cache import EnvironmentCache

MIN_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
NO_INDEX = re.compile(r"NewConnectionError|NameResolutionError|Max retries exceeded|Network is unreachable|timed out")
INDEX_OPTION = re.compile(r"(-i|-f|--(index-url|extra-index-url|find-links|no-index|trusted-host|pre|prefer-binary))\b")
HASHED = re.compile(r"--hash[= ]|--require-hashes")
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
PRINT_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
PRINT_BUILD = "import sys, sysconfig; print(sys.version, sysconfig.get_config_var('SOABI'))"
PRINT_SYS_PATH = "import json, sys; print(json.dumps(sys.path))"


class EnvironmentBuilder:
    """Builds the environment of one recipe, or finds it in the cache."""

    def __init__(self, coordinator: BootstrapClient, cache: EnvironmentCache, recipe: dict[str, Any]) -> None:
        self._coordinator, self._cache, self._recipe = coordinator, cache, recipe
        self._label: str = recipe["label"]
        self._activity = f"builds its environment from {self._label}"
        self._commands = BuildCommands(lambda: cache.report(self._activity), self._label)

    def prepare(self) -> tuple[str, dict[str, str]]:
        """Return the interpreter of the environment and the agent's environment variables; build it if necessary."""
        kind = self._recipe["kind"]
        builders: dict[str, Callable[[str], str]] = {
            "requirements": self._install,
            "archive": self._unpack,
            "pex": self._open_pex,
        }
        # Packed environments may lack Shoal, or contain another version; requirements install it from the wheel.
        shoal_dir = "" if kind == "requirements" else self._shoal_dir()
        key = hashlib.sha256("\0".join([self._recipe["made_of"], *self._machine_key()]).encode()).hexdigest()
        folder = self._cache.get(
            f"{kind}-{key[:20]}", self._activity, lambda folder: self._check(folder, builders[kind](folder), shoal_dir)
        )
        with open(os.path.join(folder, "python")) as file:
            python = os.path.join(folder, file.read())
        return python, agent_env(dict(os.environ), python, shoal_dir)

    def _machine_key(self) -> list[str]:
        """Return what an environment depends on besides the recipe: machines that differ may share a home."""
        system = [platform.machine(), *platform.libc_ver()]
        if self._recipe["kind"] == "archive":
            return system
        python = self._python()
        return [*system, os.path.realpath(python), _build_of(python)]

    # --- builders: each fills a folder and returns the interpreter in it

    def _install(self, folder: str) -> str:
        """Create a virtual environment and install the requirements and Shoal into it."""
        sources, pip = self._fetch(folder), self._recipe["pip"]
        python = self._venv(folder, *(["--without-pip"] if pip else []))
        if pip:
            with zipfile.ZipFile(os.path.join(sources, pip)) as archive:
                archive.extractall(self._commands.output(folder, [python, "-c", PRINT_SITE]))
        shoal = f"./{self._recipe['shoal']}"
        hashed = any(HASHED.search(line) for line in _requirement_lines(sources))
        self._pip(folder, python, "-r", "requirements.txt", *(() if hashed else (shoal,)))
        if hashed:
            # Keep every locked version; add only the packages that Shoal needs besides, from the same indexes.
            with open(os.path.join(sources, "locked.txt"), "w") as file:
                file.write(self._commands.output(folder, [python, "-m", "pip", "list", "--format=freeze"]))
            options = [line for line in _requirement_lines(sources) if INDEX_OPTION.match(line)]
            with open(os.path.join(sources, "more.txt"), "w") as file:
                file.write("\n".join([*options, "-c locked.txt", shoal]) + "\n")
            self._pip(folder, python, "-r", "more.txt")
        shutil.rmtree(sources)
        return python

    def _pip(self, folder: str, python: str, *arguments: str) -> None:
        quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--no-warn-script-location")
        argv = [python, "-m", "pip", "install", *quiet, *arguments]
        code = self._commands.run(folder, argv, cwd=os.path.join(folder, "sources"))
        if code != 0:
            raise self._install_error(log_tail(folder) or [f"pip exited with code {code}"])

    def _install_error(self, output: list[str]) -> ShoalError:
        """Return the error that pip's output means; raise OSError if the disk is full."""
        if any(DISK_FULL.search(line) for line in output):
            raise OSError(errno.ENOSPC, "No space left on device", f"the environment from {self._label}")
        errors = [line for line in output if line.startswith("ERROR:")]
        do = f"correct {self._label}"
        if any(NO_INDEX.search(line) for line in output):
            do = "no index is reachable: add --index-url or --find-links to the file, or set PIP_INDEX_URL in setup"
        why = "; ".join((errors or output)[-3:])[:600]
        return EnvironmentNotBuilt(f"{self._label} cannot be installed on {hostname()}", why=why, do=do)

    def _unpack(self, folder: str) -> str:
        """Unpack an archive, and run its conda-unpack if it has one."""
        sources, target = self._fetch(folder), os.path.join(folder, "env")
        os.mkdir(target)
        try:
            with tarfile.open(os.path.join(sources, self._label)) as archive:
                for member in archive:
                    self._cache.report(self._activity)
                    _extract(archive, member, target)
        except (tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
            raise self._damaged(str(error)) from error
        except OSError as error:
            if error.errno is None:
                raise self._damaged(str(error)) from error
            raise
        shutil.rmtree(sources)
        # The environment is the root of the archive, or a folder in it.
        candidates = [target, *(os.path.join(target, name) for name in os.listdir(target))]
        root = next((path for path in candidates if os.path.lexists(os.path.join(path, "bin", "python"))), None)
        if root is None:
            raise self._damaged("it contains no bin/python")
        python, conda_unpack = os.path.join(root, "bin", "python"), os.path.join(root, "bin", "conda-unpack")
        if os.path.exists(conda_unpack):
            self._commands.output(folder, [python, conda_unpack])
        return python

    def _damaged(self, why: str) -> ArchiveDamaged:
        do = "create the archive again with conda-pack, venv-pack, or tar of a virtual environment"
        return ArchiveDamaged(f"{self._label} cannot be unpacked on {hostname()}", why=why, do=do)

    def _open_pex(self, folder: str) -> str:
        """Create a virtual environment that imports what the .pex contains.

        The .pex itself would not do: members start interpreters of their own.
        """
        sources, python = self._fetch(folder), self._venv(folder, "--without-pip")
        variables = {"PEX_INTERPRETER": "1", "PEX_ROOT": os.path.join(folder, "pex")}
        argv = [python, os.path.join(sources, self._label), "-c", PRINT_SYS_PATH]
        search_path = json.loads(self._commands.output(folder, argv, variables).splitlines()[-1])
        site = self._commands.output(folder, [python, "-c", PRINT_SITE])
        with open(os.path.join(site, "pex.pth"), "w") as file:
            file.write("\n".join(path for path in search_path if path.startswith(folder) and path != site) + "\n")
        return python

    # --- shared by the builders

    def _shoal_dir(self) -> str:
        """Return the folder with Shoal's own files, which goes onto PYTHONPATH of packed environments."""
        digest = self._recipe["files"][self._recipe["shoal"]]
        return self._cache.get(
            f"shoal-{digest[:20]}", "downloads Shoal", lambda folder: self._unpack_shoal(digest, folder)
        )

    def _unpack_shoal(self, digest: str, folder: str) -> None:
        wheel = os.path.join(folder, "shoal.whl")
        self._coordinator.get(digest, wheel)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        os.unlink(wheel)

    def _fetch(self, folder: str) -> str:
        """Download the files of the recipe that this kind needs; return their folder."""
        sources = os.path.join(folder, "sources")
        os.mkdir(sources)
        for name, digest in self._recipe["files"].items():
            if self._recipe["kind"] == "requirements" or name == self._label:
                self._cache.report(self._activity)
                self._coordinator.get(digest, os.path.join(sources, os.path.basename(name)))
        return sources

    def _python(self) -> str:
        """Return this interpreter, or a newer one of this machine if it is too old for Shoal."""
        if sys.version_info >= MIN_PYTHON:
            return sys.executable
        newer = next(filter(None, map(shutil.which, NEWER_PYTHONS)), None)
        if newer is None:
            raise _too_old(sys.executable, platform.python_version())
        return newer

    def _venv(self, folder: str, *options: str) -> str:
        venv = os.path.join(folder, "venv")
        code = self._commands.run(folder, [self._python(), "-m", "venv", *options, venv])
        if code != 0:
            why = "; ".join(log_tail(folder)[-3:])[:400] or f"exit code {code}"
            do = "install venv there (Debian, Ubuntu: python3-venv), or name another Python as python of the pool"
            raise VenvUnavailable(
                f"{self._python()} on {hostname()} cannot create virtual environments", why=why, do=do
            )
        return os.path.join(venv, "bin", "python")

    def _check(self, folder: str, python: str, shoal_dir: str) -> None:
        """Raise if no agent can start in the environment; otherwise write the path of its interpreter to `python`."""
        version = self._commands.output(folder, [python, "-c", "import sys; print(*sys.version_info[:2])"]).split()
        if tuple(map(int, version)) < MIN_PYTHON:
            raise _too_old(f"the interpreter of {self._label}", ".".join(version))
        env = agent_env(build_env(folder), python, shoal_dir)
        if self._commands.run(folder, [python, "-c", "import shoal.agent.__main__"], env=env) != 0:
            do = "pack it on a machine like this one, with Shoal's dependencies: pip install shoal-train before packing"
            why = (log_tail(folder) or ["it printed nothing"])[-1]
            raise EnvironmentUnusable(f"no agent can start in {self._label} on {hostname()}", why=why, do=do)
        with open(os.path.join(folder, "python"), "w") as file:
            file.write(os.path.relpath(python, folder))
        shutil.rmtree(os.path.join(folder, "tmp"), ignore_errors=True)


def _build_of(python: str) -> str:
    """Return version and ABI of an interpreter; it is asked itself unless it is the one that runs this."""
    if python == sys.executable:
        return f"{sys.version} {sysconfig.get_config_var('SOABI')}"
    done = subprocess.run([python, "-c", PRINT_BUILD], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    return done.stdout.decode(errors="replace").strip()


def _requirement_lines(sources: str) -> list[str]:
    """Return the lines of all requirements files in a folder."""
    lines = []
    for name in sorted(name for name in os.listdir(sources) if name.endswith(".txt")):
        with open(os.path.join(sources, name)) as file:
            lines += [line.strip() for line in file]
    return lines


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: str) -> None:
    """Extract one member as the current user; raise TarError if it would leave `target`."""
    name = os.path.normpath(member.name)
    if os.path.isabs(name) or name.split(os.sep)[0] == "..":
        raise tarfile.TarError(f"{member.name!r} is outside the archive's folder")
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    if hasattr(tarfile, "tar_filter"):
        archive.extract(member, target, filter="tar")
    else:
        archive.extract(member, target)


def _too_old(python: str, version: str) -> PythonTooOld:
    oldest = ".".join(map(str, MIN_PYTHON))
    do = "name a newer Python as python of the pool, or use a packed environment that contains one"
    return PythonTooOld(
        f"Python on {hostname()} is too old", why=f"{python} is Python {version}; need {oldest} or newer", do=do
    )
