"""From a fork of the warm process to the user's script, as if `python script.py` had been typed."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from typing import Any, NoReturn

from shoal.agent.processes import process_tree, zygote_messages

_MACHINERY = (__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
_MAX_TRACEBACK = 20_000


def live(order: zygote_messages.ForkRequest, zygote: int, search_path: list[str]) -> None:
    """Become the member; returns or raises as its script does."""
    os.setsid()
    process_tree.die_with_parent(zygote, signal.SIGKILL)
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(birth_mark(os.getpid()))
    _retitle(f"shoal {order.env.get('SHOAL_MEMBER', 'member')}: {' '.join(order.argv)}")
    _redirect(order.log_path)
    if order.env.get("SHOAL_ROLE") == "evaluator":
        _give_way()
    try:
        os.chdir(order.cwd)
    except OSError as error:
        sys.exit(f"shoal: cannot enter the directory of the run: {error}")
    if order.cold:
        _become_python(order)
    warm_pythonpath = _pythonpath(dict(os.environ))
    os.environ.clear()
    os.environ.update(order.env)
    sys.path[:] = [*_pythonpath(order.env), *(place for place in search_path if place not in warm_pythonpath)]
    sys.argv[:] = list(order.argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _freshen(order.threads)
    try:
        _run_module(order.argv[0]) if order.module else _run_script(order.argv[0])
    except SystemExit as error:
        if error.code not in (None, 0):
            _record(order.why_path, error)
        raise
    except BaseException as error:
        _record(order.why_path, error)
        _show_only_the_users_frames()
        raise


def _give_way() -> None:
    """Use only what the trainers of this machine leave: they wait for each other, but nobody waits for an evaluator."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        # Where sessions share the processor among themselves, a priority counts within one only.
        file.write("19")


def birth_mark(pid: int) -> str:
    """The name of a member's process, which its forks inherit: so an orphan can still be told whose it is."""
    return f"shoal-{pid}"


def _retitle(title: str) -> None:
    """Show the script in `ps` instead of the warm process's own arguments, which lie between two known addresses."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        text = title.encode("utf-8", "replace")[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _redirect(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=True)


def _become_python(order: zygote_messages.ForkRequest) -> NoReturn:
    command = [sys.executable, "-u", *(["-m"] if order.module else []), *order.argv]
    os.execve(sys.executable, command, order.env)


def _pythonpath(env: dict[str, str]) -> list[str]:
    return [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]


def _freshen(threads: int) -> None:
    """Undo what the members would otherwise share by being forks of one process."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    time.tzset()


def _run_script(path: str) -> None:
    if os.path.isdir(path) or _is_archive(path):
        runpy.run_path(path, run_name="__main__")
        return
    # Not runpy.run_path: it takes the module away when the script's last line is done, while threads still run.
    main = types.ModuleType("__main__")
    full = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    names: dict[str, Any] = {"__file__": full, "__loader__": loader, "__cached__": None, "__builtins__": builtins}
    main.__dict__.update(names)
    sys.modules["__main__"] = main
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {full!r}: {error}", file=sys.stderr)  # noqa: T201 - as Python does
        sys.exit(2)
    exec(compile(source, full, "exec"), main.__dict__)


def _is_archive(path: str) -> bool:
    return os.path.isfile(path) and zipfile.is_zipfile(path)


def _run_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _show_only_the_users_frames() -> None:
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        users = _users_part(trace)
        shown(kind, error.with_traceback(users), users)

    sys.excepthook = hook


def _users_part(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first frame on that comes after the machinery's."""
    part = trace
    seen_us = False
    while part is not None:
        ours = part.tb_frame.f_code.co_filename in _MACHINERY
        if seen_us and not ours:
            return part
        seen_us = seen_us or part.tb_frame.f_code.co_filename == __file__
        part = part.tb_next
    return None


def _record(why_path: str, error: BaseException) -> None:
    """Leave the cause beside the log, for the agent; a disk that is full costs the detail only."""
    users = _users_part(error.__traceback__)
    lines = traceback.format_exception(type(error), error, users)
    why = {
        "kind": type(error).__name__,
        "text": _speakable(_text_of(error)[:2000]),
        "traceback": _speakable("".join(lines)[-_MAX_TRACEBACK:]),
        "code": _code_of(error),
        "at": time.time(),
    }
    with contextlib.suppress(OSError):
        with open(f"{why_path}.part", "w", encoding="utf-8", errors="replace") as file:
            json.dump(why, file)
        os.replace(f"{why_path}.part", why_path)


def _speakable(text: str) -> str:
    """File names in unknown encodings turn up in messages, and would not travel."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return str(error.code)
    what = getattr(error, "what", None)
    return what if isinstance(what, str) and _code_of(error) else str(error)


def _code_of(error: BaseException) -> str:
    from shoal.errors import ShoalError

    return error.code if isinstance(error, ShoalError) else ""
