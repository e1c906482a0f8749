"""The result of sending a frame at the server's end."""

from __future__ import annotations

import enum


class SendResult(enum.Enum):
    """ON_ITS_WAY: the frame was written or queued. GONE: the peer is gone. UNREAD: the peer does not read, and its
    queue is full."""

    ON_ITS_WAY = enum.auto()
    GONE = enum.auto()
    UNREAD = enum.auto()
