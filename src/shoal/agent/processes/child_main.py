"""Main of a forked member: from a copy of the zygote to the user's script, as if started by `python script.py`.

What the fork resets, and why, is in `zygote`.
"""

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

_OWN_FILES = (__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
_MAX_TRACEBACK = 20_000


def run_member(request: zygote_messages.ForkRequest, zygote: int, search_path: list[str]) -> None:
    """Turn this process into the member and run its script; return or raise as the script does."""
    os.setsid()
    process_tree.die_with_parent(zygote, signal.SIGKILL)
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(process_name(os.getpid()))
    _retitle(f"shoal {request.env.get('SHOAL_MEMBER', 'member')}: {' '.join(request.argv)}")
    _redirect(request.log_path)
    if request.env.get("SHOAL_ROLE") == "evaluator":
        _lower_priority()
    try:
        os.chdir(request.cwd)
    except OSError as error:
        sys.exit(f"shoal: cannot enter the directory of the run: {error}")
    if request.cold:
        _exec_python(request)
    warm_pythonpath = _pythonpath(dict(os.environ))
    os.environ.clear()
    os.environ.update(request.env)
    sys.path[:] = [*_pythonpath(request.env), *(place for place in search_path if place not in warm_pythonpath)]
    sys.argv[:] = list(request.argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _reset_shared_state(request.threads)
    try:
        _run_module(request.argv[0]) if request.module else _run_script(request.argv[0])
    except SystemExit as error:
        if error.code not in (None, 0):
            _record(request.why_path, error)
        raise
    except BaseException as error:
        _record(request.why_path, error)
        _show_only_user_frames()
        raise


def _lower_priority() -> None:
    """Give trainers precedence on this machine: they wait for each other, but none waits for an evaluator."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        # With autogroups, a process priority counts only within its session; this one is between sessions.
        file.write("19")


def process_name(pid: int) -> str:
    """Return the name of a member's process. Its forks inherit it, so an orphan can be assigned to its member."""
    return f"shoal-{pid}"


def _retitle(title: str) -> None:
    """Show this title in `ps` instead of the zygote's arguments, by overwriting these in memory."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        text = title.encode("utf-8", "replace")[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _redirect(log_path: str) -> None:
    """Send standard output and errors to the log; standard input is empty."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=True)


def _exec_python(request: zygote_messages.ForkRequest) -> NoReturn:
    command = [sys.executable, "-u", *(["-m"] if request.module else []), *request.argv]
    os.execve(sys.executable, command, request.env)


def _pythonpath(env: dict[str, str]) -> list[str]:
    return [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]


def _reset_shared_state(threads: int) -> None:
    """Reset what members would share as forks of one process: random numbers, number of threads, time zone."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    time.tzset()


def _run_script(path: str) -> None:
    if os.path.isdir(path) or _is_archive(path):
        runpy.run_path(path, run_name="__main__")
        return
    # Not runpy.run_path: it clears the module after the script's last line, while its threads still run.
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


def _show_only_user_frames() -> None:
    """Print uncaught exceptions without the frames that led to the user's script."""
    original = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        frames = _user_frames(trace)
        original(kind, error.with_traceback(frames), frames)

    sys.excepthook = hook


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the first frame of the user's code on."""
    frame = trace
    passed_own = False
    while frame is not None:
        own = frame.tb_frame.f_code.co_filename in _OWN_FILES
        if passed_own and not own:
            return frame
        passed_own = passed_own or frame.tb_frame.f_code.co_filename == __file__
        frame = frame.tb_next
    return None


def _record(why_path: str, error: BaseException) -> None:
    """Write the exception to a file that the agent reads; on a full disk only this detail is lost."""
    frames = _user_frames(error.__traceback__)
    lines = traceback.format_exception(type(error), error, frames)
    record = {
        "kind": type(error).__name__,
        "text": _encodable(_text_of(error)[:2000]),
        "traceback": _encodable("".join(lines)[-_MAX_TRACEBACK:]),
        "code": _code_of(error),
        "at": time.time(),
    }
    with contextlib.suppress(OSError):
        with open(f"{why_path}.part", "w", encoding="utf-8", errors="replace") as file:
            json.dump(record, file)
        os.replace(f"{why_path}.part", why_path)


def _encodable(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: file names in unknown encodings turn up in messages."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return str(error.code)
    what = getattr(error, "what", None)
    return what if isinstance(what, str) and _code_of(error) else str(error)


def _code_of(error: BaseException) -> str:
    from shoal.errors import ShoalError

    return error.code if isinstance(error, ShoalError) else ""
