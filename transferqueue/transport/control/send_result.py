"""What a server's end of a transport says about a frame that it was given."""

from __future__ import annotations

import enum


class SendResult(enum.Enum):
    """What became of a frame: it is with the kernel or kept for the peer; the peer is gone; or it does not read."""

    ON_ITS_WAY = enum.auto()
    GONE = enum.auto()
    UNREAD = enum.auto()
