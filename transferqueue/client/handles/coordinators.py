"""The coordinators of a deployment as a client has them: a session with each, mostly one. Who has what, says `transferqueue.wire.home_coordinator`.

The law:

- A queue has a session with every coordinator of its deployment, or with one alone; nothing in between.
- What names a table or a channel goes to its coordinator, and is there all that it is with one. While that one is out of
  reach, such a call ends as with one, with an error that names its address; calls for the others go on.
- What looks at everything asks each, in the order of their seats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transferqueue.client.client import ClientSession
from transferqueue.client.operations.tables import observe
from transferqueue.client.session.run import Operation
from transferqueue.errors import PeerError, TransferQueueError, UsageError
from transferqueue.limits import check_name
from transferqueue.storage.elements.process_bound import Staying
from transferqueue.wire.home_coordinator import home_coordinator

Plain = dict[str, Any]


class QueueBase(Staying):
    """What the queues of both fronts share: their coordinators. Those given are of one deployment, or `UsageError`."""

    elsewhere: ClassVar[str] = "pass queue.address, and connect there: tq.connect(address)"

    def __init__(self, *clients: ClientSession) -> None:
        check_seats(clients)
        self._clients = sorted(clients, key=lambda one: one.seat.number)

    @property
    def address(self) -> str:
        """Where other processes connect to the same tables; of several coordinators their addresses, joined by commas."""
        return ",".join(one.address for one in self._clients)

    @property
    def coordinators(self) -> list[str]:
        """The address of each coordinator, in the order of their seats."""
        return [one.address for one in self._clients]

    def coordinator_of(self, name: str) -> str:
        """The address of the coordinator that a table or weight channel of this name belongs to, whether there is one or not."""
        return self._of(check_name("table", name)).address

    def end_waits(self, why: TransferQueueError) -> None:
        """From now on no call of this queue waits: one that waits in any thread, or would have to, raises a copy of `why`.

        What can be done at once is done as before. A supervisor calls this when whatever the calls wait for is gone, as
        `workflows.flow.Flow` does. Callable from any thread; returns at once. `UsageError` if `why` is no error of the queue.
        """
        if not isinstance(why, TransferQueueError):
            raise UsageError(
                f"why={why!r} is {type(why).__name__}; give an error that calls of the queue may raise, a TransferQueueError or "
                "a subclass of it"
            )
        for client in self._clients:
            client.connection.end_waits(why)

    def allow_waits(self) -> None:
        """Calls may wait again after `end_waits`."""
        for client in self._clients:
            client.connection.allow_waits()

    def __repr__(self) -> str:
        """What this client knows already; nothing is asked of a server (`tables` and `stats` do)."""
        used = sum(len(client.tables) for client in self._clients)
        state = ", closed" if all(client.closed for client in self._clients) else ""
        return f"<{type(self).__name__} at {self.address}: {used} tables used here{state}>"

    def _of(self, name: str) -> ClientSession:
        """The client of the coordinator that a table or channel belongs to."""
        if len(self._clients) == 1 or not isinstance(name, str):  # what is no name, the call itself refuses
            return self._clients[0]
        return self._clients[home_coordinator(name, len(self._clients)) - 1]

    @property
    def _client(self) -> ClientSession:
        """Of the only coordinator. `UsageError` where there are more: this is nothing that they do together."""
        if len(self._clients) > 1:
            raise UsageError(
                f"this is for one coordinator, and the queue is of {len(self._clients)}, which do nothing at one moment; connect to "
                f"each alone: {self.address}"
            )
        return self._clients[0]

    def _look(self, what: str) -> Operation[Plain]:
        """What one coordinator says of itself. Where there are more, one that is out of reach is told of in its place."""
        try:
            return (yield from observe(what))
        except PeerError as error:
            if len(self._clients) == 1:
                raise
            return {"unreachable": str(error)}

    def _together(self, answers: Sequence[Plain]) -> Plain:
        """What all said: of several, their tables and channels together, and under "coordinators" each answer by its address."""
        if len(answers) == 1:
            return answers[0]
        found: Plain = {"coordinators": dict(zip(self.coordinators, answers, strict=True))}
        for kind in ("tables", "channels", "dropped_tables"):
            parts = [answer[kind] for answer in answers if kind in answer]
            if parts:
                found[kind] = {name: value for part in parts for name, value in part.items()}
        if all("balanced" in answer for answer in answers):
            found["balanced"] = all(answer["balanced"] for answer in answers)
        return found


def check_seats(clients: Sequence[ClientSession]) -> None:
    """`UsageError` unless these are one coordinator, or all of one deployment, each once."""
    if len(clients) == 1:
        return
    seats = [one.seat for one in clients]
    deployments = {(seat.deployment, seat.of) for seat in seats}
    if len(deployments) == 1 and sorted(seat.number for seat in seats) == list(range(1, seats[0].of + 1)):
        return
    told = ", ".join(f"{one.address} is {one.seat}" for one in clients)
    raise UsageError(
        f"these {len(clients)} addresses are not all coordinators of one deployment, each once: {told}; give the addresses of all of "
        f"it, or start the servers as one (transferqueue serve --coordinator 1/{len(clients)} to {len(clients)}/{len(clients)})"
    )
