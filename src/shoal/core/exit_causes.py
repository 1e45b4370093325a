"""Exit causes: why a member ended, and which of several failures caused the others.

`classify` runs in the agent, which knows the exit code, the signal, the recorded exception and what it did to the
process itself. The cause decides whether the member is restarted (`core.fleet.restart_policy`). When a whole run fails,
most members only lost a peer; `root_cause` finds the failure that is worth showing.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal import exit_codes

Cause = Literal["done", "user", "infrastructure", "preempted", "asked", "refused"]

TOGETHER_S = 10.0
_CODE = re.compile(r"\bS(\d)\d\d\b")
_VICTIM_CODES = frozenset({"S204", "S207"})
# A restart does not help with a wrong token, version or model, and the other members are not to blame.
_REFUSED_CODES = frozenset({"S201", "S202", "S203", "S206", "S211", "S320", "S322"})
# The script and the settings of the run do not go together: every member fails in the same way, and so it will again.
_HOPELESS_CODES = frozenset({"S215", "S315", "S316", "S317"})
# The same, if it happens before the first step; later the number of members may be the cause.
_HOPELESS_AT_START = frozenset({"S102"})
_ERROR = re.compile(r"error\[(S\d\d\d)\]")
_VICTIM_KINDS = (
    "ExchangeBroken",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
    "ConnectionClosed",
    "DistBackendError",
    "Connection closed by peer",
    "Connection reset by peer",
)
# Signals that the machine sends to a process, in contrast to errors of its own code.
_MACHINE_SIGNALS = frozenset({signals.SIGKILL, signals.SIGSEGV, signals.SIGBUS, signals.SIGILL, signals.SIGABRT})
# Seen on virtual machines: the CPU announces amx_bf16, the kernel does not permit AMX, and oneDNN (torch, TensorFlow)
# uses it all the same for bfloat16 matrix products.
_ILLEGAL_INSTRUCTION = (
    "the CPU rejected an instruction; a bfloat16 matrix product does that where the CPU announces amx_bf16 but may not "
    "use it — do: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment"
)


@dataclass(frozen=True, slots=True)
class RecordedException:
    """A member's uncaught exception, which it wrote to a file before it ended."""

    kind: str
    text: str
    code: str = ""
    traceback: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """What the agent knows about the end of a member.

    `stop_reason`, `limit_exceeded` and `had_notice` say why the agent sent it a signal. `oom_kills` counts kills by the
    kernel for lack of memory while it ran. `last_output` is the last line that it wrote.
    """

    exit_code: int | None
    signal: int | None
    stop_reason: str = ""
    limit_exceeded: str = ""
    had_notice: bool = False
    exception: RecordedException | None = None
    oom_kills: int = 0
    last_output: str = ""


@dataclass(frozen=True, slots=True)
class ExitCause:
    """Cause of an exit, and one line that says what happened."""

    cause: Cause
    detail: str


def classify(end: ExitFacts) -> ExitCause:
    """Return the cause of an exit."""
    if end.stop_reason:
        return ExitCause("asked", end.stop_reason)
    if end.limit_exceeded:
        return ExitCause("user", end.limit_exceeded)
    if end.exit_code == exit_codes.OK:
        return ExitCause("done", "")
    if end.exit_code == exit_codes.RESUMABLE:
        # A member that the run stopped leaves with this code too; then the agent gave it no notice.
        return ExitCause("preempted", "left after a notice" if end.had_notice else "left as it was told")
    if end.signal == signals.SIGTERM and end.had_notice:
        return ExitCause("preempted", "ended by SIGTERM after a notice")
    if end.exception is not None and end.signal is None:
        return _of_exception(end.exception, end.last_output)
    if end.signal is not None:
        return _of_signal(end)
    words = f": {end.last_output}" if end.last_output else ""
    return ExitCause("user", f"exit code {end.exit_code}{words}")


def is_hopeless(detail: str, *, before_first_step: bool) -> bool:
    """Return whether the error in a cause's detail says that the run cannot work as it was asked for."""
    error = _ERROR.match(detail)
    code = error.group(1) if error is not None else ""
    return code in _HOPELESS_CODES or (before_first_step and code in _HOPELESS_AT_START)


def _of_exception(why: RecordedException, last_output: str) -> ExitCause:
    if why.kind == "SystemExit":
        words = f": {last_output}" if last_output not in ("", *why.text.splitlines()) else ""
        return ExitCause("user", f"sys.exit({why.text}){words}")
    line = f"{why.kind}: {why.text}".rstrip(": ").splitlines()[0]
    if why.code:
        line = f"error[{why.code}] {why.text}"
    if why.code in _REFUSED_CODES:
        return ExitCause("refused", line)
    ours = (why.code.startswith("S2") and why.code not in _HOPELESS_CODES) or why.kind == "ExchangeBroken"
    return ExitCause("infrastructure" if ours else "user", line)


def _of_signal(end: ExitFacts) -> ExitCause:
    assert end.signal is not None
    name = _name(end.signal)
    if end.signal == signals.SIGKILL:
        doubt = "out of memory: the kernel killed a process" if end.oom_kills else "perhaps out of memory"
        return ExitCause("infrastructure", f"killed by signal 9 ({doubt})")
    if end.signal == signals.SIGINT:
        return ExitCause("user", "KeyboardInterrupt")
    if end.signal in _MACHINE_SIGNALS:
        words = f": {end.last_output}" if end.last_output else ""
        hint = f"; {_ILLEGAL_INSTRUCTION}" if end.signal == signals.SIGILL else ""
        return ExitCause("infrastructure", f"crashed by signal {end.signal} ({name}){words}{hint}")
    return ExitCause("infrastructure", f"killed by signal {end.signal} ({name})")


def _name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class MemberFailure:
    """A member's exit or error, as journaled."""

    member: str
    at: float
    cause: str
    detail: str


@dataclass(frozen=True, slots=True)
class RootCause:
    """The failure to show first, and those that only followed from it."""

    first: MemberFailure
    victims: tuple[MemberFailure, ...]
    reason: str


def root_cause(failures: Sequence[MemberFailure], together_s: float = TOGETHER_S) -> RootCause | None:
    """Return which of these failures caused the others; None if there is nothing to explain.

    Failures more than `together_s` apart are unrelated; only the last group counts. In it, an error of the user's code
    explains more than a process that was killed, and that more than a member that merely lost its peers. An error that
    a member repeats after a restart is reported once.
    """
    relevant = [failure for failure in failures if failure.cause in ("user", "refused", "infrastructure")]
    group = _last_group(sorted(relevant, key=lambda failure: failure.at), together_s)
    if not group:
        return None
    first = min(group, key=lambda failure: (_rank(failure), failure.at))
    others = {(failure.member, failure.detail): failure for failure in group}
    others.pop((first.member, first.detail))
    victims = tuple(others.values())
    return RootCause(first, victims, _reason(first, victims))


def is_victim(failure: MemberFailure) -> bool:
    """Return whether a failure says only that another process was gone."""
    code = _CODE.search(failure.detail)
    return bool(code and code.group() in _VICTIM_CODES) or any(kind in failure.detail for kind in _VICTIM_KINDS)


def _rank(failure: MemberFailure) -> int:
    if is_victim(failure):
        return 2
    return 0 if failure.cause in ("user", "refused") else 1


def _last_group(ordered: Sequence[MemberFailure], together_s: float) -> list[MemberFailure]:
    group: list[MemberFailure] = []
    for failure in ordered:
        if group and failure.at - group[-1].at > together_s:
            group = []
        group.append(failure)
    return group


def _reason(first: MemberFailure, victims: Sequence[MemberFailure]) -> str:
    if not victims:
        return f"{first.member}: {first.detail}"
    same = sum(failure.detail == first.detail for failure in victims)
    others = len(victims) - same
    parts = [f"{same} more with the same error"] if same else []
    parts += [f"{others} that followed from it"] if others else []
    return f"{first.member}: {first.detail} ({', '.join(parts)})"
