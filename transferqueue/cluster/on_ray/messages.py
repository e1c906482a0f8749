"""The name of a deployment on Ray, and the messages between its actors and the processes that look for it. No I/O.

A deployment is a named actor. Its address is ``ray://NAMESPACE/NAME``; ``ray`` alone means
``ray://transferqueue/default``. Ray carries only text: JSON of the types here, which the receiver decodes against them.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

import msgspec

from transferqueue.errors import ProtocolError, UsageError
from transferqueue.limits import check_name
from transferqueue.transport.address import RAY_SCHEME
from transferqueue.wire.home_coordinator import CoordinatorIndex

NAMESPACE: Final = "transferqueue"
NAME: Final = "default"
PORTS: Final = range(20_000, 32_768)
"""Above the ports of Ray's workers and below those that kernels give to outgoing connections, so a server finds its
port free when it restarts."""

_COORDINATOR: Final = ".coordinator-"

T = TypeVar("T")


class DeploymentName(msgspec.Struct, frozen=True):
    """The name of a deployment, or of one coordinator of it."""

    namespace: str = NAMESPACE
    name: str = NAME

    def __str__(self) -> str:
        return f"{RAY_SCHEME}{self.namespace}/{self.name}"

    def of_coordinator(self, number: int) -> DeploymentName:
        """The name of one coordinator of several, counted from 1. The actor of the first has the name of the
        deployment."""
        return DeploymentName(self.namespace, f"{self.name}{_COORDINATOR}{number}")

    @property
    def is_one_coordinator(self) -> bool:
        """Whether this names one coordinator of several."""
        return _COORDINATOR in self.name

    @property
    def actor(self) -> str:
        """The name of the Ray actor."""
        return self.name.removesuffix(f"{_COORDINATOR}1")

    def digest(self, more: str = "") -> str:
        """A hash of this name (and of `more`) in 16 hex digits, for paths: those of sockets are short."""
        return hashlib.blake2b(f"{self}#{more}".encode(), digest_size=8).hexdigest()

    def ports(self) -> list[int]:
        """The 64 ports to try, in order: always the same for one name, and others for other names."""
        first = int(self.digest(), 16) % len(PORTS)
        return [PORTS[(first + step) % len(PORTS)] for step in range(64)]


class DeploySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters of a coordinator actor, for each start.

    Args:
        id: differs between deployments of one name.
        state: its state directory; "": a directory that is removed with it.
        arena_bytes: 0: the default.
        port: 0: it chooses one.
        snapshots: "": the default directory.
        spill_dir: "": cold rows stay in memory.
    """

    named: DeploymentName
    id: str
    durability: str
    state: str
    arena_bytes: int
    port: int
    snapshots: str
    seat: CoordinatorIndex = CoordinatorIndex()
    spill_dir: str = ""
    spill_bytes: int = 0


class Endpoints(msgspec.Struct, frozen=True, tag="Ways", forbid_unknown_fields=True):
    """How to reach a server: through its socket from processes of `host` (see `this_host`), else with the join token.
    `seats` is the number of coordinators of its deployment."""

    host: str
    ipc: str
    token: str
    seats: int = 1

    def __repr__(self) -> str:
        return f"Ways({self.ipc!r})"


class ShardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a shard actor: the deployment that it joins, and the most bytes that it may hold (0: the
    default)."""

    named: DeploymentName
    arena_bytes: int
    label: str


class DeployRefused(msgspec.Struct, frozen=True, tag="Refused", forbid_unknown_fields=True):
    """Why there is no server: the name and text of an error."""

    error: str
    text: str


DEPLOY_SPEC: Final[msgspec.json.Decoder[DeploySpec]] = msgspec.json.Decoder(DeploySpec)
SHARD_SPEC: Final[msgspec.json.Decoder[ShardSpec]] = msgspec.json.Decoder(ShardSpec)
REPLY: Final[msgspec.json.Decoder[Endpoints | DeployRefused]] = msgspec.json.Decoder(Endpoints | DeployRefused)


def parse_named(address: str) -> DeploymentName:
    """The deployment that an address names. `UsageError` if it names none."""
    if address == "ray":
        return DeploymentName()
    namespace, slash, name = address.removeprefix(RAY_SCHEME).partition("/")
    if not (slash and namespace and name and "/" not in name):
        raise UsageError(
            f'address {address!r} names no deployment on Ray; write "ray", or ray://NAMESPACE/NAME as deploy_ray said'
        )
    return checked(DeploymentName(namespace, name))


def checked(named: DeploymentName) -> DeploymentName:
    """`named`, if both its parts are valid names without a slash. Else `UsageError`."""
    for kind, part in (("namespace", named.namespace), ("deployment", named.name)):
        if "/" in check_name(kind, part):
            raise UsageError(f"{kind} name {part!r} has a slash, which separates namespace and name; leave it out")
    return named


def write(message: object) -> str:
    """JSON of one of the types here."""
    return msgspec.json.encode(message).decode()


def read(text: object, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the text of `write`. `ProtocolError` for text that is not of the decoder's type."""
    if not isinstance(text, str):
        raise ProtocolError(f"a deployment on Ray sent {type(text).__name__}, not text; is it one of this library?")
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"a message of a deployment on Ray cannot be decoded: {error}; install one version at both ends"
        ) from error
