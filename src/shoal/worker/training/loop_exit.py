"""How a script left its training loop: on purpose, or because an exception is on its way.

A loop over a generator that is left before its end closes the generator. That looks the same from inside for `break`
and for an exception: Python raises GeneratorExit in both cases and hides the exception that is being raised. But one
means that the training is over for all members, and the other that this member has failed and may be restarted.

The frame that dropped the generator tells them apart: `break` and `return` pop it from the stack with an instruction of
their own, an exception drops it at whichever instruction raised. For all else (`sys.exit`, `close()`, an exception that
is caught outside the loop) the answer is "not known yet", and the session waits for what happens next: a report of the
exception, the exit code of the process, or another use of the run.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

_DROPS_ITERATOR = ("POP_TOP", "POP_ITER")
# The last instruction of a generator around ours, such as a progress bar, which is being closed as well.
_CLOSED_TOO = ("YIELD_VALUE", "RESUME", "SEND")


def left_on_purpose() -> bool:
    """Return whether `break` or `return` closed the generator that calls this."""
    frame = sys._getframe(1).f_back
    while frame is not None and _instruction(frame) in _CLOSED_TOO:
        frame = frame.f_back
    return frame is not None and _instruction(frame) in _DROPS_ITERATOR


def _instruction(frame: FrameType) -> str:
    """Return the name of the instruction that a frame executes."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
