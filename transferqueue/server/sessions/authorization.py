"""Whether a client may send a request: by its role, and by the key that opened its session. The node asks before anything else sees a request.

The law:

- A client that came by the socket file, from inside the process, or over loopback tcp of a server without keys is of the
  same user and machine: `admin`.
- Any other showed a key, and has the role that the key file gives it, at every message anew: once it is revoked, it has
  none, its sessions end, and it gets no answer.
- A session belongs to the key that opened it. To any other it does not exist.
- Each request declares the roles that may send it (`transferqueue.wire.messages`). Roles: `transferqueue.wire.roles`.
"""

from __future__ import annotations

from pathlib import PurePath

from transferqueue.errors import Disconnected, PermissionDenied, UsageError
from transferqueue.server.sessions.sessions import NOWHERE, OpenSession, Peer
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire import messages as m
from transferqueue.wire.requests import declaration
from transferqueue.wire.roles import ROLES, SHARDS, Role


class Authorizer:
    """Maps a peer's key to its current role. keyring: None for a server without keys."""

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring

    def role(self, peer: Peer) -> Role | None:
        """The role of whoever sent a frame; None: nobody, not to be answered."""
        if not isinstance(peer, KeyedPeer):
            return "admin"
        owner = self._keyring.owner(peer.key) if self._keyring is not None else None
        return owner.role if owner is not None else None


def check_lock(peer: Peer, hello: m.Hello) -> None:
    """`UsageError` if a key holder names a lock that is no session file: it would learn which files there are."""
    if key_of(peer) and hello.lock and PurePath(hello.lock).parent.name != "sessions":
        raise UsageError(
            f"session refused: lock {hello.lock!r} is no session file; keep it in a directory named sessions"
        )


def check_offer(role: Role, hello: m.Hello) -> None:
    """`PermissionDenied` if the memory of a session is offered by one whose key is not for that."""
    if hello.shard is not None and role not in SHARDS:
        raise PermissionDenied(
            f"a shard may not join with a key of role {role}; join with a token of role shard "
            "(transferqueue keys new NAME --role shard)"
        )


def key_of(peer: Peer) -> str:
    """The public key that a peer showed; "" for one of the same user, who needs none."""
    return peer.key if isinstance(peer, KeyedPeer) else ""


def why_not_allowed(role: Role, request: m.Request) -> PermissionDenied | None:
    """Why `role` may not send this, naming those that may; None: it may."""
    may = declaration(request).roles
    if role in may:
        return None
    allowed = " and ".join(one for one in ROLES if one in may)
    return PermissionDenied(
        f"{m.tag_of(request)} is not for a client whose key has role {role}; {allowed} may send it: join with a token "
        "of such a role (transferqueue keys new NAME --role ROLE)"
    )


def check_owner(session: OpenSession, peer: Peer, *, by_client: bool = False) -> None:
    """`Disconnected` if `peer` showed another key than the client of `session` did.

    by_client: it named the session by its client id, which nobody else knows: that is enough where the server was
    restarted and has not heard of the session since.
    """
    if key_of(peer) != key_of(session.peer) and not (by_client and session.peer == NOWHERE):
        raise Disconnected(f"session {session.number} is not open to this key; connect again")
