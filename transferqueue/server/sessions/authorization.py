"""Which role may send which request. This table is the whole rule; the node asks it before anything else sees a request.

The law:

- A client that came by the socket file, from inside the process, or over loopback tcp of a server without keys is of the
  same user and machine: `admin`.
- Any other showed a key, and has the role that the key file gives it, at every message anew: once it is revoked, it has
  none, its sessions end, and it gets no answer.
- A session belongs to the key that opened it. To any other it does not exist.
- A request that is not in the table is the admin's.

In a job: rollout workers are producers; reward and reference workers and the trainer are consumers, which bring results
back with their acks and, as trainers, publish weights and move the clock; a dashboard is an observer; a process that brings
memory is a shard, and sees nothing but its orders; whoever makes tables is admin.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from transferqueue.errors import Disconnected, PermissionDenied, UsageError
from transferqueue.server.sessions.sessions import NOWHERE, OpenSession, Peer
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.transport.security.keyring import Keyring
from transferqueue.transport.security.keys import ROLES, Role
from transferqueue.wire import messages as m

_EVERYONE: Final = frozenset(ROLES)
_CLIENTS: Final = frozenset[Role](_EVERYONE - {"shard"})
_WORKERS: Final = frozenset[Role]({"admin", "producer", "consumer"})
_PRODUCERS: Final = frozenset[Role]({"admin", "producer"})
_CONSUMERS: Final = frozenset[Role]({"admin", "consumer"})
_ADMINS: Final = frozenset[Role]({"admin"})
_SHARDS: Final = frozenset[Role]({"admin", "shard"})

MAY: Final[dict[type[m.Request], frozenset[Role]]] = {
    # the session itself, and what there is
    m.Hello: _EVERYONE,
    m.Heartbeat: _EVERYONE,
    m.Goodbye: _EVERYONE,
    m.Unpin: _CLIENTS,
    m.OpenTable: _CLIENTS,
    m.ListTables: _CLIENTS,
    m.Observe: _CLIENTS,
    m.Cursor: _CLIENTS,
    m.ListShards: _WORKERS,
    # new rows
    m.PutRequest: _PRODUCERS,
    m.Reserve: _PRODUCERS,
    m.Unreserve: _PRODUCERS,
    # rows that are there
    m.LeaseRequest: _CONSUMERS,
    m.Ack: _CONSUMERS,
    m.CommitCheckpoint: _CONSUMERS,
    m.Rollback: _CONSUMERS,
    m.ReleaseRequest: _CONSUMERS,
    m.Renew: _CONSUMERS,
    m.ReadRequest: _CONSUMERS,
    m.Delete: _CONSUMERS,
    # either side: bytes to write, late columns, the end, the weights that both work with
    m.Grant: _WORKERS,
    m.ReturnGrant: _WORKERS,
    m.Update: _WORKERS,
    m.Drop: _WORKERS,
    m.Find: _WORKERS,
    m.Seal: _WORKERS,
    m.Pull: _WORKERS,
    m.ReportApplied: _WORKERS,
    m.AcquireUpdateSlot: _WORKERS,
    m.ReleaseUpdateSlot: _WORKERS,
    # the trainer's
    m.Publish: _CONSUMERS,
    m.GetLatestVersion: _CONSUMERS,
    m.AdvanceClock: _CONSUMERS,
    # the terms that all others work under
    m.CreateTable: _ADMINS,
    m.AddTask: _ADMINS,
    m.AddFields: _ADMINS,
    m.DropTable: _ADMINS,
    # memory that joins and leaves
    m.PollCommands: _SHARDS,
    m.Drain: _ADMINS,
    # everything there is, and the server's files
    m.SnapshotRequest: _ADMINS,
    m.Restore: _ADMINS,
    m.WatchJob: _ADMINS,
}


class Authorizer:
    """Who may do what, by the keys as they are now. keyring: None for a server without keys."""

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
    if hello.shard is not None and role not in _SHARDS:
        raise PermissionDenied(
            f"a shard may not join with a key of role {role}; join with a token of role shard "
            "(transferqueue keys new NAME --role shard)"
        )


def key_of(peer: Peer) -> str:
    """The public key that a peer showed; "" for one of the same user, who needs none."""
    return peer.key if isinstance(peer, KeyedPeer) else ""


def why_not_allowed(role: Role, request: m.Request) -> PermissionDenied | None:
    """Why `role` may not send this, naming those that may; None: it may."""
    may = MAY.get(type(request), _ADMINS)
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
