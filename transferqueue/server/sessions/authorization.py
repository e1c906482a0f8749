"""Which client may send a request: its role decides, and the key that opened its session. Checked before anything else.

- A client on the socket file, inside the process, or on loopback tcp of a server without keys belongs to the same user
  on the same machine: its role is `admin`.
- Any other client authenticated with a key. The server looks up the key's role in the key file for each message. A
  withdrawn key has no role: its sessions end, and it gets no answer.
- A session belongs to the key that opened it. For any other key it does not exist.
- Each request declares the largest size of its frame. A frame over `SMALL_FRAME_BYTES` is decoded only after its role
  and size are checked by its envelope; a smaller one takes less than a millisecond to decode.
- Each request declares the roles that may send it (`transferqueue.wire.messages`, `transferqueue.wire.roles`).
"""

from __future__ import annotations

from pathlib import PurePath

from transferqueue.errors import Disconnected, PermissionDenied, ProtocolError, UsageError
from transferqueue.limits import SMALL_FRAME_BYTES
from transferqueue.server.sessions.session_table import NOWHERE, OpenSession, Peer
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.transport.security.keyring import Keyring
from transferqueue.wire import messages as m
from transferqueue.wire.codec import CallHead
from transferqueue.wire.messages.declarations import BY_TAG, Declaration
from transferqueue.wire.roles import ROLES, SHARDS, Role


class Authorizer:
    """Maps a peer's key to its current role. `keyring`: None for a server without keys."""

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring

    def role(self, peer: Peer) -> Role | None:
        """The role of a peer; None if its key is unknown or withdrawn, so that it gets no answer."""
        if not isinstance(peer, KeyedPeer):
            return "admin"
        owner = self._keyring.owner(peer.key) if self._keyring is not None else None
        return owner.role if owner is not None else None


def check_lock(peer: Peer, hello: m.Hello) -> None:
    """`UsageError` if a client with a key names a lock that is no session file: a client could find out otherwise which
    files exist."""
    if key_of(peer) and hello.lock and PurePath(hello.lock).parent.name != "sessions":
        raise UsageError(
            f"session refused: lock {hello.lock!r} is no session file; keep it in a directory named sessions"
        )


def check_offer(role: Role, hello: m.Hello) -> None:
    """`PermissionDenied` if a client offers a shard and its role does not allow that."""
    if hello.shard is not None and role not in SHARDS:
        raise PermissionDenied(
            f"a shard may not join with a key of role {role}; join with a token of role shard "
            "(transferqueue keys new NAME --role shard)"
        )


def key_of(peer: Peer) -> str:
    """The public key of a peer; "" for a client of the same user, which needs none."""
    return peer.key if isinstance(peer, KeyedPeer) else ""


def not_allowed(role: Role, declared: Declaration) -> PermissionDenied:
    """The refusal of a request that is not for this role; it names the roles that may send it."""
    allowed = " and ".join(name for name in ROLES if name in declared.roles)
    return PermissionDenied(
        f"{declared.tag} is not for a client whose key has role {role}; {allowed} may send it: join with a token "
        "of such a role (transferqueue keys new NAME --role ROLE)"
    )


def check_size(role: Role, head: CallHead, nbytes: int) -> None:
    """`ProtocolError` or `PermissionDenied` unless `role` may send a frame of `nbytes` with this envelope."""
    declared = BY_TAG.get(head.tag)
    if declared is None:
        raise ProtocolError(
            f"{nbytes:,} bytes are not a message: the server does not know request {head.tag!r}, and reads at most "
            f"{SMALL_FRAME_BYTES:,} bytes of an unknown one"
        )
    if role not in declared.roles:
        raise not_allowed(role, declared)
    if nbytes > declared.bytes_max:
        raise ProtocolError(
            f"{declared.tag} has {nbytes:,} bytes, more than the {declared.bytes_max:,} allowed: send less at a time"
        )


def check_owner(session: OpenSession, peer: Peer, *, by_client: bool = False) -> None:
    """`Disconnected` if `peer` has another key than the client that opened the session.

    With `by_client`, the peer named the session by its client id, which is secret. After a restart of the server that
    is enough, until the client has said Hello again.
    """
    if key_of(peer) != key_of(session.peer) and not (by_client and session.peer == NOWHERE):
        raise Disconnected(f"session {session.number} is not open to this key; connect again")
