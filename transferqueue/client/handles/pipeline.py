"""The base of `Pipeline` and `AsyncPipeline`: the calls in flight, and the errors that no caller has seen yet."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, Final, Generic, TypeVar

from transferqueue.client.client import ClientSession
from transferqueue.client.operations.arguments import positive
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.client.session.operation_runner import PipelinedOperation, trimmed
from transferqueue.client.table_info import TableInfo
from transferqueue.errors import InternalError, TransferQueueError, UsageError
from transferqueue.limits import PIPELINE_CALLS_MAX, parse_bytes
from transferqueue.storage.elements.process_bound import ProcessBound

T = TypeVar("T")
P = TypeVar("P", bound="PromiseBase[Any]")


class PromiseBase(Generic[T]):
    """The result of one call of a pipeline, or its error, once it is settled."""

    __slots__ = ("_error", "_held", "_value")

    def __init__(self) -> None:
        self._held: PipelinedOperation[T] | None = None
        self._value: T | None = None
        self._error: TransferQueueError | None = None

    def started(self, outcome: T | PipelinedOperation[T]) -> None:
        """The call is on its way; or it had nothing to send, and this is its result."""
        if isinstance(outcome, PipelinedOperation):
            self._held = outcome
        else:
            self.settle(outcome)

    def settle(self, value: T) -> None:
        """Keep the result."""
        self._held, self._value = None, value

    def fail(self, error: TransferQueueError) -> None:
        """Keep the error."""
        self._held, self._error = None, error

    def outcome(self) -> T:
        """The result; raises the error, which counts as seen then."""
        if self._error is not None:
            raise trimmed(self.take_error())
        return self._value  # type: ignore[return-value]

    def take_error(self) -> TransferQueueError:
        """The error, which counts as seen then."""
        if (error := self._error) is None:
            raise InternalError("a call of a pipeline has no error")
        return error


class PipelineBase(ProcessBound, Generic[P]):
    """Calls in flight, oldest first, and those that have failed, in order."""

    _remedy: ClassVar[str] = "make one where the rows are put"

    def __init__(self, client: ClientSession, terms: TableInfo, calls: int, nbytes: int | str) -> None:
        self._client, self._terms = client, terms
        self._calls_max = positive("calls", calls)
        if self._calls_max > PIPELINE_CALLS_MAX:
            raise UsageError(f"calls={calls} is above {PIPELINE_CALLS_MAX}, the most that may be in flight; give fewer")
        self._bytes_max = positive("bytes", parse_bytes(nbytes))
        self._in_flight: Final[deque[P]] = deque()
        self._bytes = 0
        self._failed: Final[deque[P]] = deque()
        self._is_open = False

    def __len__(self) -> int:
        """Calls that are not settled yet."""
        return len(self._in_flight)

    def _is_full(self) -> bool:
        return len(self._in_flight) >= self._calls_max or self._bytes >= self._bytes_max

    def _is_half_full(self) -> bool:
        return 2 * len(self._in_flight) > self._calls_max or 2 * self._bytes > self._bytes_max

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(
                "a pipeline is used inside its block, whose end waits for the answers; write: with table.pipeline() as "
                "pipeline: ..."
            )

    def _take_oldest(self) -> tuple[P, PipelinedOperation[Any]]:
        promise = self._in_flight.popleft()
        held = promise._held
        if held is None:
            raise InternalError("a call of a pipeline is in flight, and settled")
        self._bytes -= held.nbytes
        return promise, held

    def _add(self, promise: P) -> None:
        if promise._held is not None:
            self._bytes += promise._held.nbytes
            self._in_flight.append(promise)

    def _raise_unseen(self) -> None:
        """Raise the first error that no caller has seen. The others are named in a note."""
        unseen = [promise.take_error() for promise in self._failed]
        self._failed.clear()
        if unseen:
            first, *others = unseen
            for error in others:
                first.add_note(f"another call of this pipeline failed too: {type(error).__name__}: {error}")
            raise trimmed(first)

    def _abandon(self) -> None:
        """Stop waiting for the calls in flight: the server may carry them out or not."""
        while self._in_flight:
            promise, held = self._take_oldest()
            held.abandon()
            held.operation.close()
            promise.fail(held.unknown())


def facts_among(columns: dict[str, Any]) -> tuple[GivenFacts, dict[str, Any]]:
    """The facts among keyword arguments, and the columns."""
    facts = {name: columns.pop(name) for name in GivenFacts.__struct_fields__ if name in columns}
    return GivenFacts(**facts), columns
