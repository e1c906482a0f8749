"""Decides which clients may connect, with ZeroMQ's authentication protocol (ZAP, rfc.zeromq.org/spec/27).

For each new connection ZeroMQ sends a question to a socket inside the process, and holds the connection until the
answer. The server's loop answers, so no further thread is needed. ZeroMQ attaches the public key of an accepted
connection to each of its messages (`KEY_PROPERTY`); a peer cannot set it.
"""

from __future__ import annotations

from typing import Final, Protocol

import zmq

from transferqueue.errors import UsageError
from transferqueue.limits import FRAMES_DRAINED_MAX
from transferqueue.transport.security.keys import KeyPair

KEY_PROPERTY: Final = "User-Id"
_QUESTIONS: Final = "inproc://zeromq.zap.01"
_QUESTION_PARTS: Final = 7


class KeySet(Protocol):
    """The key pair of a listening process, and the clients that it accepts."""

    @property
    def server(self) -> KeyPair:
        """The key pair of the listening process."""

    def owner(self, public: str) -> object | None:
        """The owner of this public key; None if it is not accepted."""

    def refresh(self) -> bool:
        """Read the keys again, and return whether they changed."""


class ZapHandler:
    """Accepts the clients of a key set at the listening sockets of one ZeroMQ context. Not thread-safe.

    The owner polls `socket` for reading and then calls `decide`. Closing the context closes the handler.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: KeySet) -> None:
        if not zmq.has("curve"):
            raise UsageError("keys need a ZeroMQ with CURVE, which this one lacks; install pyzmq from its wheel")
        self.keyring: Final = keyring
        self.socket: Final = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_QUESTIONS)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` ask for keys at the addresses that it binds from now on. Earlier addresses do not change."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.keyring.server.secret)

    def decide(self) -> bool:
        """Answer all waiting connections with the current keys. Returns whether the keys have changed."""
        changed = self.keyring.refresh()
        for _ in range(FRAMES_DRAINED_MAX):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.socket.send_multipart(self._answer(question))
        return changed

    def _answer(self, question: list[bytes]) -> list[bytes]:
        public = _public(question)
        known = public is not None and self.keyring.owner(public) is not None
        verdict = [b"200", b"", public.encode()] if known and public else [b"400", b"", b""]
        return [*question[:2], *verdict, b""]


def _public(question: list[bytes]) -> str | None:
    """The public key that the client presents; None for a question of another kind."""
    if len(question) != _QUESTION_PARTS or question[5] != b"CURVE" or len(question[6]) != 32:
        return None
    from zmq.utils import z85

    return z85.encode(question[6]).decode()
