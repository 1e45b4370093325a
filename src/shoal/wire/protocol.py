"""Protocol number, and the message types that members and agents share."""

from __future__ import annotations

import msgspec

from shoal.wire.limits import Name, Text

# Raise it with every change of a message, of a journalled event or of the layout of a coordinator's directory.
PROTOCOL = 2


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=lambda name: name.removesuffix("Msg")):
    """Base of all messages; the tag on the wire is the class name without `Msg`."""


class RejectedMsg(Message, frozen=True):
    """Coordinator to member or agent: an error that ends the connection, as the fields of a ShoalError.

    Sent instead of a welcome if the version, the run or the name is wrong, and after a message that breaks the
    protocol. The receiver raises the error and does not reconnect.
    """

    code: Name
    what: Text
    why: Text = ""
    do: Text = ""
