"""The coordinators that a queue talks to: one session with each, mostly one.

- A queue has a session with every coordinator of its deployment, or with exactly one.
- A call that names a table or a channel goes to its home coordinator (`transferqueue.wire.home_coordinator`). While
  that one is out of reach, the call fails with an error that names its address; calls to the other coordinators work.
- A call about the whole deployment asks each coordinator, in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from transferqueue.client.client import ClientSession
from transferqueue.client.session.operation_runner import Operation
from transferqueue.errors import PeerError, TransferQueueError, UsageError
from transferqueue.errors.text import counted, shown
from transferqueue.limits import check_name
from transferqueue.storage.elements.process_bound import ProcessBound
from transferqueue.wire.answers.coordinators import UnreachableCoordinator
from transferqueue.wire.home_coordinator import home_coordinator

A = TypeVar("A")


class QueueBase(ProcessBound):
    """A queue without the verbs that talk to a server. `UsageError` unless `clients` are of one deployment."""

    _remedy: ClassVar[str] = "pass queue.address, and connect there: tq.connect(address)"

    def __init__(self, *clients: ClientSession) -> None:
        check_seats(clients)
        self._clients = sorted(clients, key=lambda client: client.seat.number)

    @property
    def address(self) -> str:
        """Where other processes connect to the same tables; of several coordinators their addresses, joined by
        commas."""
        return ",".join(client.address for client in self._clients)

    @property
    def coordinators(self) -> list[str]:
        """The address of each coordinator, in the order of their numbers."""
        return [client.address for client in self._clients]

    def coordinator_of(self, name: str) -> str:
        """Return the address of the coordinator of a table or weight channel, which need not exist.

        Args:
            name: of the table or channel.

        Raises:
            UsageError: an invalid name.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     queue.coordinator_of("rollouts") == queue.address  # the only coordinator
            True
        """
        return self._of(check_name("table", name)).address

    def end_waits(self, why: TransferQueueError) -> None:
        """End all waits of this queue, and let no call wait from now on.

        A call that waits in any thread, or would have to, raises a copy of `why`. Calls that need not wait work as
        before. A supervisor calls this when the rows that the calls wait for will not come, as `workflows.flow.Flow`
        does. Callable from any thread; returns at once. `allow_waits` undoes it.

        Args:
            why: the error to raise.

        Raises:
            UsageError: `why` is no `TransferQueueError`.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     queue.end_waits(tq.FlowSignal("the producer has failed"))
            ...     try:
            ...         batch = table.lease("train", rows=1)
            ...     except tq.FlowSignal as error:
            ...         print(error)
            the producer has failed
        """
        if not isinstance(why, TransferQueueError):
            raise UsageError(
                f"why={shown(why)} is {type(why).__name__}; give an error that calls of the queue may raise, a "
                "TransferQueueError or a subclass of it"
            )
        for client in self._clients:
            client.connection.end_waits(why)

    def allow_waits(self) -> None:
        """Let calls wait again after `end_waits`.

        Example:
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
            ...     queue.end_waits(tq.FlowSignal("the producer has failed"))
            ...     queue.allow_waits()
            ...     try:
            ...         batch = table.lease("train", rows=1, timeout_s=0.01)
            ...     except tq.DeadlineExceeded:
            ...         print("it waited")
            it waited
        """
        for client in self._clients:
            client.connection.allow_waits()

    def __repr__(self) -> str:
        """The facts that this client knows already. No server is asked (`tables` and `stats` ask)."""
        used = sum(len(client.tables) for client in self._clients)
        state = ", closed" if all(client.closed for client in self._clients) else ""
        return f"<{type(self).__name__} at {self.address}: {counted(used, 'table')} used here{state}>"

    def _of(self, name: str) -> ClientSession:
        """The session with the home coordinator of a table or channel."""
        if len(self._clients) == 1 or not isinstance(name, str):  # the call itself refuses an invalid name
            return self._clients[0]
        return self._clients[home_coordinator(name, len(self._clients)) - 1]

    @property
    def _client(self) -> ClientSession:
        """The session with the only coordinator. `UsageError` if there are several."""
        if len(self._clients) > 1:
            raise UsageError(
                f"this call is for one coordinator, and the queue has {len(self._clients)}; connect to that one alone: "
                f"{self.address}"
            )
        return self._clients[0]

    def _look(self, client: ClientSession, operation: Operation[A]) -> Operation[A | UnreachableCoordinator]:
        """Ask one coordinator. If there are several and it is out of reach, return that in place of its answer."""
        try:
            return (yield from operation)
        except PeerError as error:
            if len(self._clients) == 1:
                raise
            return UnreachableCoordinator(address=client.address, unreachable=str(error))


def check_seats(clients: Sequence[ClientSession]) -> None:
    """`UsageError` unless these are one coordinator, or all of one deployment, each once."""
    if len(clients) == 1:
        return
    seats = [client.seat for client in clients]
    deployments = {(seat.deployment, seat.of) for seat in seats}
    if len(deployments) == 1 and sorted(seat.number for seat in seats) == list(range(1, seats[0].of + 1)):
        return
    listed = ", ".join(f"{client.address} is {client.seat}" for client in clients)
    raise UsageError(
        f"these {len(clients)} addresses are not all coordinators of one deployment, each once: {listed}; give the "
        f"addresses of all of it, or start the servers as one (transferqueue serve --coordinator 1/{len(clients)} to "
        f"{len(clients)}/{len(clients)})"
    )
