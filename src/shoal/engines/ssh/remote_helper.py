"""What the ssh engine runs on a host: sent over with every call, it needs Linux, Python 3.7 and nothing else.

A request comes on stdin as JSON, with the token where there is one; the answer is the one line that begins with MARK,
whatever else a login shell prints. A hire is a directory that names its process: the number, and when that was born,
which together belong to no other process; and the node and its boot, since a home may be shared by many nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

    Json = dict[str, Any]

MARK = "shoal-answer "
CHECK_S = 60.0
LOOK_S = 0.02
TREE_S = 0.25
MARGIN_S = 3.0
TAIL_BYTES = 2000
TOLD_S = 3600.0
ALLOCATION_MARK = "SHOAL_ALLOCATION"
ADOPT_ORPHANS = 36


def main() -> None:
    # The connection may end before we do: what was begun is brought to its end.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request = json.loads(sys.stdin.read())
    asked: dict[str, Callable[[Json], Json]] = {
        "look": look,
        "check": check,
        "start": start,
        "cancel": cancel,
        "tidy": tidy,
    }
    try:
        if not os.path.exists("/proc/self/stat"):
            raise OSError(errno.ENOSYS, "there is no /proc", "/proc")
        answer = asked[request["do"]](request)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        answer = {"state": "failed", "errno": name, "path": str(error.filename or ""), "why": error.strerror or ""}
    answer["now"] = time.time()
    sys.stdout.write(MARK + json.dumps(answer) + "\n")


# --- what can be asked


def look(request: Json) -> Json:
    """All hires of a tag but those that ended long ago, how many others run here, and what this machine has."""
    mine, others = [], 0
    for tag, hire, home in _homes(_hires(request)):
        known = _record(home)
        if known is None or known["node"] != _node():
            continue
        alive = _alive(known)
        if tag == request["tag"] and (alive or _age_s(home) < TOLD_S):
            said = "" if alive else _said(home, known)
            mine.append({"hire": hire, "alive": alive, "born": [known["pid"], known["born"]], "said": said})
        elif tag != request["tag"]:
            others += alive
        if not alive:
            _drop_token(home)
    answer = {"state": "seen", "hires": mine, "others": others, "node": _node(), **_machine(_hires(request))}
    if request.get("gpus"):
        answer["gpus"] = _gpus()
    return answer


def check(request: Json) -> Json:
    """Whether an agent could run here."""
    return _unfit(request["check"]) or {"state": "fit"}


def start(request: Json) -> Json:
    """Start an agent unless it is there, there is no room, or the one who asked has given up since."""
    hires, home = _hires(request), _home(request)
    _make(hires)
    with _locked(hires):
        known = _record(home)
        if known is not None and _alive(known):
            return {"state": "started"}
        running = sum(_runs(one) for _, _, one in _homes(hires))
        if running >= request["room"]:
            return {"state": "full", "running": running}
        if time.time() > request["start_by"]:
            return {"state": "late"}
        _make(os.path.dirname(home), home)
        _drop(home, "ending")
        try:
            _write(os.path.join(home, "token"), request["credentials"])
            _spawn(home, request["script"], request["grace_s"])
        except OSError:
            _drop(home, "token")
            raise
    return {"state": "started"}


def cancel(request: Json) -> Json:
    """End an agent: it has its grace to hand over; then whatever is left of it and of all that it started is killed."""
    home = _home(request)
    if not os.path.isdir(home):
        return {"state": "ended"}
    with _locked(_hires(request)):
        known = _record(home)
    if known is not None and known["node"] != _node():
        return {"state": "ended"}
    if known is not None and known["boot"] == _boot():
        left = _end(home, known)
        if left:
            return {"state": "alive", "left": left}
    for name in ("process.json", "token", "ending"):
        _drop(home, name)
    return {"state": "ended"}


def tidy(request: Json) -> Json:
    """Remove what hires left that ended long ago; who lives has a token, whatever engine started it."""
    removed = 0
    for tag, hire, home in _homes(_hires(request)):
        known = _record(home)
        if known is not None and known.get("node") == _node() and not _alive(known):
            _drop_token(home)
        counted = tag == request["tag"] and hire in request["known"]
        if counted or os.path.exists(os.path.join(home, "token")) or _untouched_s(home) < request["keep_s"]:
            continue
        shutil.rmtree(home, ignore_errors=True)
        removed += 1
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(home))
    return {"state": "tidy", "removed": removed}


# --- a hire's directory


def _hires(request: Json) -> str:
    above = request["directory"] or os.environ.get("SHOAL_HOME") or "~/.shoal"
    if above == "~" or above.startswith("~/"):
        above = os.environ.get("HOME", "") + above[1:]
    return os.path.join(os.path.abspath(above), "allocations")


def _home(request: Json) -> str:
    return os.path.join(_hires(request), request["tag"], request["hire"])


def _homes(hires: str) -> Iterator[tuple[str, str, str]]:
    for tag in _names(hires):
        for hire in _names(os.path.join(hires, tag)):
            yield tag, hire, os.path.join(hires, tag, hire)


def _names(path: str) -> list[str]:
    try:
        return sorted(one.name for one in os.scandir(path) if one.is_dir())
    except FileNotFoundError:
        return []


def _make(*paths: str) -> None:
    os.makedirs(os.path.dirname(paths[0]), exist_ok=True)
    for path in paths:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        os.chmod(path, 0o700)


@contextlib.contextmanager
def _locked(hires: str) -> Iterator[None]:
    """Only one at a time starts something on this node."""
    path = os.path.join(hires, "lock-" + _node())
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # A disk that can no longer be written must not keep anybody from ending what runs.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise OSError(errno.ENOLCK, error.strerror, path) from error
        yield
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    """Write it so that only the owner can read it, and nobody ever sees half of it."""
    part = path + ".part"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(part, path)
    except OSError as error:
        os.unlink(part)
        raise OSError(error.errno, error.strerror, path) from error


def _drop(home: str, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(home, name))


def _drop_token(home: str) -> None:
    """The token of one that is gone is of no use, unless it is just being started anew."""
    if os.path.exists(os.path.join(home, "token")):
        with contextlib.suppress(OSError), _locked(os.path.dirname(os.path.dirname(home))):
            if not _runs(home):
                _drop(home, "token")


def _age_s(home: str) -> float:
    """How long ago something was last written about it."""
    paths = [os.path.join(home, name) for name in ("process.json", "agent.log")]
    return time.time() - max(os.stat(path).st_mtime for path in paths if os.path.exists(path))


def _untouched_s(home: str) -> float:
    """How long ago anything was last written there; what was removed since does not count."""
    times = []
    for one in os.scandir(home):
        with contextlib.suppress(FileNotFoundError):
            times.append(one.stat(follow_symlinks=False).st_mtime)
    return time.time() - max(times or [os.stat(home).st_mtime])


def _said(home: str, known: Json) -> str:
    if known["boot"] != _boot():
        return "the host was started anew"
    try:
        with open(os.path.join(home, "agent.log"), "rb") as file:
            return _tail(file)
    except OSError:
        return ""


# --- processes


def _spawn(home: str, script: str, grace_s: float) -> None:
    """Start the script in a session of its own. It notes itself before it begins, so that it is never unknown."""
    trouble, told = os.pipe()
    if os.fork() == 0:
        try:
            _become(home, script, grace_s)
        except OSError as error:
            os.write(told, json.dumps([error.errno, error.strerror, str(error.filename or home)]).encode())
        finally:
            os._exit(71)
    os.close(told)
    with open(trouble, "rb") as file:
        said = file.read()
    if said:
        number, why, path = json.loads(said.decode())
        raise OSError(number, why, path)


def _become(home: str, script: str, grace_s: float) -> None:
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    log = os.open(os.path.join(home, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    me = (os.getpid(), (_stat(os.getpid()) or ("", 0))[1])
    note = {
        "pid": me[0],
        "born": me[1],
        "boot": _boot(),
        "node": _node(),
        "grace_s": grace_s,
    }
    _write(os.path.join(home, "process.json"), json.dumps(note))
    # Of the connection nothing is left to those who live longer than it does.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SSH_")}
    kept[ALLOCATION_MARK] = _by(me)
    os.execvpe("sh", ["sh", "-c", script], kept)


def _record(home: str) -> Json | None:
    try:
        with open(os.path.join(home, "process.json")) as file:
            found: Json = json.load(file)
    except (FileNotFoundError, ValueError):
        return None
    # Others may keep theirs in the same place, and write down less.
    return found if "node" in found else None


def _runs(home: str) -> bool:
    known = _record(home)
    return known is not None and _alive(known)


def _alive(known: Json) -> bool:
    return bool(known["node"] == _node() and known["boot"] == _boot() and _same(known["pid"], known["born"]))


def _same(pid: int, born: int) -> bool:
    found = _stat(pid)
    return found is not None and found[1] == born and found[0] not in "ZX"


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """State, time of birth, parent and session of a process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        return words[0], int(words[19]), int(words[1]), int(words[3])
    except (OSError, IndexError):
        return None


def _living() -> dict[int, tuple[str, int, int, int]]:
    found = ((pid, _stat(pid)) for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()])
    return {pid: one for pid, one in found if one is not None and one[0] not in "ZX"}


def _tree(known: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """These processes and all below them, as far as they live; each by its number and time of birth."""
    below: dict[int, list[tuple[int, int]]] = {}
    for pid, (_, born, parent, _) in _living().items():
        below.setdefault(parent, []).append((pid, born))
    todo, seen = [one for one in known if _same(*one)], set()
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += below.get(one[0], [])
    return seen


def _end(home: str, known: Json) -> list[int]:
    """SIGTERM once, whoever asks how often: a second one would cut the grace short; what is left in spite of all."""
    root = (known["pid"], known["born"])
    if not _same(*root):
        return _kill(_left_by(root))
    tree = _tree({root})
    mark = os.path.join(home, "ending")
    if _is_first(mark):
        _signal({root}, signal.SIGTERM)
    deadline = _made_at(mark) + known["grace_s"] + MARGIN_S
    look_at = 0.0
    while _same(*root) and time.time() < deadline:
        if time.monotonic() >= look_at:
            tree |= _tree({root})
            look_at = time.monotonic() + TREE_S
        time.sleep(LOOK_S)
    return _kill(tree | {root} | _left_by(root))


def _left_by(root: tuple[int, int]) -> set[tuple[int, int]]:
    """Who is in the session of an agent, or went into another and has its environment still."""
    found = _stat(root[0])
    # As long as one is in the session, its number is nobody else's; so if it is another's by now, so is the session.
    leader = root[0] if found is None or found[1] == root[1] else None
    hired = f"{ALLOCATION_MARK}={_by(root)}".encode()
    return {
        (pid, born)
        for pid, (_, born, _, session) in _living().items()
        if session == leader or hired in _environment(pid)
    }


def _by(root: tuple[int, int]) -> str:
    return "{}-{}".format(*root)


def _environment(pid: int) -> list[bytes]:
    """What a process began with, if we may know."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _is_first(mark: str) -> bool:
    """Whether nobody has made this mark before; where no mark can be made, everybody is the first."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _made_at(mark: str) -> float:
    try:
        return min(time.time(), os.stat(mark).st_mtime)
    except OSError:
        return time.time()


def _kill(known: set[tuple[int, int]]) -> list[int]:
    """All of them are stopped before any is killed, so that none starts another meanwhile."""
    deadline = time.monotonic() + MARGIN_S
    while True:
        stopped: set[tuple[int, int]] = set()
        while _tree(known) - stopped:
            known = _tree(known)
            _signal(known - stopped, signal.SIGSTOP)
            stopped |= known
        if not stopped or time.monotonic() > deadline:
            return sorted(pid for pid, _ in stopped)
        _signal(stopped, signal.SIGKILL)
        time.sleep(LOOK_S)


def _signal(processes: set[tuple[int, int]], number: int) -> None:
    for pid, born in processes:
        if _same(pid, born):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


# --- this machine


def _node() -> str:
    return socket.gethostname() or "?"


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _machine(hires: str) -> Json:
    while not os.path.isdir(hires):
        hires = os.path.dirname(hires)
    disk = os.statvfs(hires)
    return {
        "cpus": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
    }


def _gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith(b"GPU ") for line in done.stdout.splitlines())


def _unfit(check: str) -> Json | None:
    """What keeps this machine from running an agent, if anything does; whatever the check started is ended with it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    # Files, not pipes: what a pool's setup leaves in the background would keep a pipe open.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as erred:
        try:
            code: int | None = subprocess.call(
                ["sh", "-c", check], stdin=subprocess.DEVNULL, stdout=said, stderr=erred, timeout=CHECK_S
            )
        except subprocess.TimeoutExpired:
            code = None
        me = (os.getpid(), (_stat(os.getpid()) or ("", 0))[1])
        _kill(_tree({me}) - {me})
        texts = [_tail(said), _tail(erred)]
    if code == 0 and texts[0].strip().endswith("fit"):
        return None
    return {"state": "unfit", "exit": code, "said": texts[0], "erred": texts[1]}


def _tail(file: IO[bytes]) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
    return file.read().decode("utf-8", "replace")


if __name__ == "__main__":
    main()
