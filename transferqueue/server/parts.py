"""The door between a coordinator and its optional parts.

A part is a folder of the server: `shards` (remote memory and replicas), `durability` (journal and snapshots, a part
each), `spill` and `row_record` (files of ended rows). The assembly imports shards, snapshots and records if their
folders are installed, and journal and spill if their options are chosen; `Coordinator.attach` joins them. The
coordinator calls all its parts, in order, at the same points of each turn. No other module outside a part imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from transferqueue.errors import UsageError
from transferqueue.ledger.effects import WakeKey
from transferqueue.ledger.requests.registry import Outcome
from transferqueue.storage.elements.dtypes import U8
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    from transferqueue.ledger.rows.blocks import ExtentState
    from transferqueue.server.sessions.session_table import OpenSession

Handler = Callable[["OpenSession", int, Any, float], Outcome]
"""(session, call, request, now) -> outcome. An operation that answers `Blocked` changes nothing."""


class Part:
    """Base of parts. Each method does nothing, so a part overrides those that concern it. The loop's thread calls
    them; none may block."""

    def requests(self) -> Mapping[type[m.Request], Handler]:
        """The requests that this part carries out."""
        return {}

    # ------------------------------------------------------------ sessions

    def admit(self, hello: m.Hello, *, keyed: bool) -> m.Hello:
        """The Hello of a client that opens a session, with what the part adds. Raises if the part refuses it.

        Args:
            hello: of the client.
            keyed: it authenticated with a key.
        """
        return hello

    def session_opened(self, session: OpenSession) -> None:
        """A session is open in the ledger, and its process is about to be watched."""

    def sessions_resumed(self, granted: Collection[ExtentState]) -> None:
        """The sessions of an earlier run that continue are known. `granted`: the extents that it had granted."""

    def session_ends(self, session: OpenSession, now: float) -> None:
        """A session is about to end in the ledger. A defect ends the server."""

    def session_ended(self, hello: m.Hello, now: float) -> None:
        """The session of this client has ended in the ledger. A defect ends the server."""

    def welcome(self) -> Mapping[str, Any]:
        """Facts for clients that connect: fields of `Welcome` by name."""
        return {}

    def refuse(self, request: m.Request) -> UsageError | None:
        """Why a request may not be carried out; None: it may."""
        return None

    def issue(self, session: OpenSession, reply: m.Reply) -> m.Reply:
        """The reply as this session gets it."""
        return reply

    def waits_ended(self, keys: Collection[WakeKey], now: float) -> None:
        """No request waits on these keys any more: the sessions of those that did have ended."""

    def check_table(self, terms: m.CreateTable | m.TableTerms) -> None:
        """Raise `UsageError` if a table of these terms could not be served. A client is about to create it, or a
        snapshot with it is being restored, by another thread."""

    # ------------------------------------------------------------ what outlives the server

    @property
    def shortage(self) -> str:
        """Why requests that add work are refused now; "": they are not. Asked of parts with a `commit`."""
        return ""

    def commit(self) -> None:
        """Return when all changes so far are durable, so that answers may be sent. The sessions of a server that has
        such a part go on with the next server. `DiskFailed` if the disk is full or fails."""

    # ------------------------------------------------------------ time and memory

    def tick(self, now: float) -> None:
        """Do the work that is due."""

    def next_deadline(self) -> float | None:
        """When to call `tick` or `go_on` next even without an event; None: nothing is due."""
        return None

    def go_on(self, now: float) -> bool:
        """Begin work. Called when no request is due. Returns whether requests may be due afterwards."""
        return False

    def memory_granted(self) -> None:
        """The coordinator's own shard granted memory."""

    def memory_lacking(self, nbytes: int, use: m.GrantPurpose) -> None:
        """A request waits for memory that the coordinator's own shard may grant."""

    def memory_freed(self, extent: int) -> None:
        """The memory of this extent of the coordinator's own shard may be granted again once this returns."""

    # ------------------------------------------------------------ reports, and the end

    def explain(self, request: Any) -> str:
        """Why a request of this part waits, or what the part adds to the reason why another one does; "": nothing."""
        return ""

    def statistics(self) -> Mapping[str, Any]:
        """Figures of `ServerStats` by name."""
        return {}

    def stop(self) -> None:
        """End threads and give back what the part has. Called once, at the end."""


class Parts:
    """The parts of a coordinator, in the order in which they were attached."""

    def __init__(self) -> None:
        self.going_on: Final[list[Part]] = []
        """Those with a `go_on`, which every call passes."""
        self.issuing: Final[list[Part]] = []
        """Those with an `issue`, which every reply passes."""
        self.refusing: Final[list[Part]] = []
        """Those with a `refuse`, which every request passes."""
        self.durable: Final[list[Part]] = []
        """Those with a `commit`, which every turn passes."""
        self.short_tables: Final[dict[str, str]] = {}
        """Why requests that add work to a table are refused now, by table."""
        self._all: Final[list[Part]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._all)

    def attach(self, part: Part) -> None:
        """Add a part."""
        self._all.append(part)
        kind = type(part)
        if kind.go_on is not Part.go_on:
            self.going_on.append(part)
        if kind.issue is not Part.issue:
            self.issuing.append(part)
        if kind.refuse is not Part.refuse:
            self.refusing.append(part)
        if kind.commit is not Part.commit:
            self.durable.append(part)

    def check_table(self, terms: m.CreateTable | m.TableTerms) -> None:
        """See `Part.check_table`."""
        for part in self._all:
            part.check_table(terms)

    @property
    def shortage(self) -> str:
        """Why requests that add work are refused now; "": they are not."""
        for part in self.durable:
            if part.shortage:
                return part.shortage
        return ""


class ColdStore(Protocol):
    """Blocks outside the arena, for a snapshot or a record. `read` may be called by any thread."""

    def hold(self) -> None:
        """Keep the space of all cold blocks until `release`. Several may hold it at once."""

    def release(self) -> None:
        """End one `hold`."""

    def read(self, block: int) -> U8:
        """The bytes of a cold block that is held. `Corruption` if they cannot be read, or differ from those written."""
