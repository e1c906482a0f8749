"""Who may connect: the decisions that ZeroMQ asks for (ZAP, rfc.zeromq.org/spec/27), made in the server's own loop.

ZeroMQ holds a new connection back until its question, sent to a socket inside the process, is answered; so the loop that
serves also decides, and no thread is needed for it. A connection that is let in is known by its public key from then on:
ZeroMQ attaches it to every message (`KEY_PROPERTY`), and no peer can set it.
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
    """The keys of whoever listens, and whom it lets in."""

    @property
    def server(self) -> KeyPair:
        """Its own."""

    def owner(self, public: str) -> object | None:
        """Who has this public key; None: nobody that is let in."""

    def refresh(self) -> bool:
        """Look at the keys again; whether they changed."""


class AcceptAll:
    """A pair of keys for this life, that lets in everyone: where a connection alone gives nothing, and only must be private."""

    def __init__(self) -> None:
        self.server: Final = KeyPair.new()

    def owner(self, public: str) -> object | None:
        """Whoever it is."""
        return public

    def refresh(self) -> bool:
        """They never change."""
        return False


class ZapHandler:
    """Lets the clients of a ring of keys into the listening sockets of one context. Used by one thread.

    Whoever owns it polls `socket` for reading and then calls `decide`. It is closed with its context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: KeySet) -> None:
        if not zmq.has("curve"):
            raise UsageError("keys need a ZeroMQ with CURVE, and this one has none; install pyzmq from its wheel")
        self.keyring: Final = keyring
        self.socket: Final = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_QUESTIONS)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Have addresses that `socket` is bound to from now on ask for keys. Those before stay as they are."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self.keyring.server.secret)

    def decide(self) -> bool:
        """Answer everyone who knocks, by the keys as they are now. Returns whether these changed."""
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
    """The public key that was shown; None for a question of another kind."""
    if len(question) != _QUESTION_PARTS or question[5] != b"CURVE" or len(question[6]) != 32:
        return None
    from zmq.utils import z85

    return z85.encode(question[6]).decode()
