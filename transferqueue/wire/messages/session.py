"""Messages that open, keep and close a session."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from transferqueue.limits import SHARDS_MAX
from transferqueue.wire.home_coordinator import CoordinatorIndex
from transferqueue.wire.messages.base import Bytes, Count, DoneReply, Message, Path, Pid, Secret, Text
from transferqueue.wire.messages.declarations import request
from transferqueue.wire.roles import EVERYONE


class ShardOffer(Message, tag="Offer"):
    """The memory of a session, which so is a shard.

    Args:
        path: of its arena, for processes of its host.
        capacity: bytes.
        endpoint: tcp address of its bulk endpoint, as others reach it.
        certificate: fingerprint of the certificate to expect there (`transport.bulk.tls`); "": it does not encrypt.
        secret: 32 bytes, the key of its tickets.
        number: of the shard; the coordinator gives it.
    """

    path: Path
    capacity: Annotated[int, Meta(ge=1, lt=1 << 62)]
    endpoint: Text
    certificate: Text
    secret: Secret
    number: Count = 0


class Welcome(Message):
    """A session is open.

    Args:
        epoch: this life of the coordinator.
        arenas: shard -> path of its memory.
        bulk_port: of the bulk endpoint, on the host that the client dialled; 0: the server has none.
        bulk_certificate: fingerprint of the certificate of the bulk endpoint; "": it encrypts nothing.
        durable: the session outlives the server: when it is gone, wait for the next one at the same address.
        checksums: each block is committed with the checksum of its bytes, which shows after a reboot whether the disk
            has them.
        seat: of this coordinator in its deployment.
    """

    session: int
    epoch: int
    server: Text
    runtime: Text
    arenas: Annotated[dict[int, Text], Meta(max_length=SHARDS_MAX)]
    arena_bytes: int
    bulk_port: int = 0
    durable: bool = False
    bulk_certificate: Text = ""
    seat: CoordinatorIndex = CoordinatorIndex()
    checksums: bool = False


@request(reply=Welcome, roles=EVERYONE, repeat="again", verb="connect", unanswered="connect again")
class Hello(Message):
    """Opens a session.

    Args:
        client: 16 random bytes.
        lock: path of a file on which the client holds an flock, or "".
        remote: the client does not map the arena: its bytes go over the bulk endpoint.
        shard: of a process that joins with its own memory.
    """

    client: Bytes
    pid: Pid = 0
    host: Text = ""
    lock: Text = ""
    version: Text = ""
    label: Text = ""
    remote: bool = False
    shard: ShardOffer | None = None


@request(reply=None, roles=EVERYONE, repeat="again", verb="")
class Heartbeat(Message):
    """Notice: the client lives. No answer."""


@request(reply=DoneReply, roles=EVERYONE, verb="Queue.close")
class Goodbye(Message):
    """Closes the session: its leases, reservations, grants and pins return at once."""


SessionRequests = Hello | Heartbeat | Goodbye
SessionReplies = Welcome
