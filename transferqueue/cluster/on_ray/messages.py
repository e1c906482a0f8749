"""How a deployment on Ray is called, and what its actor and those who look for it tell each other. Pure.

A deployment is a named actor: ``ray://NAMESPACE/NAME``, where ``ray`` alone is ``ray://transferqueue/default``. What
crosses Ray is text: JSON of the types here, read against them.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

import msgspec

from transferqueue.errors import ProtocolError, UsageError
from transferqueue.limits import check_name
from transferqueue.wire.home_coordinator import CoordinatorIndex

NAMESPACE: Final = "transferqueue"
NAME: Final = "default"
SCHEME: Final = "ray://"
PORTS: Final = range(20_000, 32_768)
"""Above those that Ray gives its workers, below those that kernels lend to outgoing connections: one that was taken here is
free again for the next life of its server."""

_SEAT: Final = ".coordinator-"

T = TypeVar("T")


class DeploymentName(msgspec.Struct, frozen=True):
    """The name of a deployment."""

    namespace: str = NAMESPACE
    name: str = NAME

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.name}"

    def of_seat(self, number: int) -> DeploymentName:
        """One coordinator of several, alone; the actor of the first has the name of the deployment."""
        return DeploymentName(self.namespace, f"{self.name}{_SEAT}{number}")

    @property
    def is_one_seat(self) -> bool:
        """Whether this is one coordinator of several."""
        return _SEAT in self.name

    @property
    def actor(self) -> str:
        """The name of the actor."""
        return self.name.removesuffix(f"{_SEAT}1")

    def digest(self, more: str = "") -> str:
        """A short text that stands for this name in paths, which have little room."""
        return hashlib.blake2b(f"{self}#{more}".encode(), digest_size=8).hexdigest()

    def ports(self) -> list[int]:
        """Ports to try, the same ones every time, others for other names."""
        first = int(self.digest(), 16) % len(PORTS)
        return [PORTS[(first + step) % len(PORTS)] for step in range(64)]


class DeploySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an actor is told when it is made, and again in each of its lives.

    id: other for each deployment of a name. state: its directory; "": one of its own, that ends with it. port 0: one of its choice.
    """

    named: DeploymentName
    id: str
    durability: str
    state: str
    arena_bytes: int
    port: int
    snapshots: str
    seat: CoordinatorIndex = CoordinatorIndex()


class Endpoints(msgspec.Struct, frozen=True, tag="Ways", forbid_unknown_fields=True):
    """How to reach the server: by its socket from processes of `host` (see `this_host`), else by the join token. seats: coordinators
    of its deployment."""

    host: str
    ipc: str
    token: str
    seats: int = 1

    def __repr__(self) -> str:
        return f"Ways({self.ipc!r})"


class ShardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the actor of a shard is told: the deployment it joins, which tells it the way; most bytes that it lends (0: the default)."""

    named: DeploymentName
    arena_bytes: int
    label: str


class DeployRefused(msgspec.Struct, frozen=True, tag="Refused", forbid_unknown_fields=True):
    """Why there is no server."""

    error: str
    text: str


DEPLOY: Final[msgspec.json.Decoder[DeploySpec]] = msgspec.json.Decoder(DeploySpec)
LEND: Final[msgspec.json.Decoder[ShardSpec]] = msgspec.json.Decoder(ShardSpec)
SAID: Final[msgspec.json.Decoder[Endpoints | DeployRefused]] = msgspec.json.Decoder(Endpoints | DeployRefused)


def is_ray_address(address: object) -> bool:
    """Whether this is meant as the name of a deployment on Ray."""
    return isinstance(address, str) and (address == "ray" or address.startswith(SCHEME))


def parse_named(address: str) -> DeploymentName:
    """The deployment that an address names, else `UsageError`."""
    if address == "ray":
        return DeploymentName()
    namespace, slash, name = address.removeprefix(SCHEME).partition("/")
    if not (slash and namespace and name and "/" not in name):
        raise UsageError(
            f'address {address!r} names no deployment on Ray; write "ray", or ray://NAMESPACE/NAME as deploy_ray said'
        )
    return checked(DeploymentName(namespace, name))


def checked(named: DeploymentName) -> DeploymentName:
    """The same, if both its parts may be names: those of tables, without a slash."""
    for kind, part in (("namespace", named.namespace), ("deployment", named.name)):
        if "/" in check_name(kind, part):
            raise UsageError(f"{kind} name {part!r} has a slash, which separates namespace and name; leave it out")
    return named


def write(told: object) -> str:
    """JSON of one of the types here."""
    return msgspec.json.encode(told).decode()


def read(text: object, decoder: msgspec.json.Decoder[T]) -> T:
    """What `write` made, read against the decoder's type. `ProtocolError` for anything else."""
    if not isinstance(text, str):
        raise ProtocolError(f"a deployment on Ray said {type(text).__name__}, not text; is it one of this library?")
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"what a deployment on Ray said is not understood: {error}; let both sides have one version"
        ) from error
