"""All errors of the queue, in one tree, grouped by who must act.

::

    TransferQueueError
    ├── UsageError                you: fix the call; nothing was changed
    │   ├── SchemaError               a column does not fit its field
    │   ├── NotFound                  table, field, task, row or key that does not exist
    │   │   └── ColumnFreed               a column of a row that was there, and was freed
    │   ├── AlreadyExists             table, task or key that does
    │   ├── Impossible                a configuration or request that could never make progress
    │   ├── Sealed                    put into, or seal of, a sealed table
    │   ├── BatchEnded                memory of a batch used after its lease ended
    │   ├── Forked                    a handle used in a forked child
    │   ├── PermissionDenied          this client's role may not do that
    │   └── AddressInUse              a second server on one address
    ├── FlowSignal                no fault: wait, drop or finish
    │   ├── EndOfTable                sealed and drained: no further row will come
    │   ├── RowsEnded                 rows that a lease waits for were dropped, deleted or finished
    │   ├── DeadlineExceeded          a wait ended by its deadline; the text says why, and which client holds the rows
    │   ├── LeaseExpired              the lease is not yours; the call changed nothing
    │   ├── RowsChanged               rows were written after they were read; the update changed nothing
    │   ├── VersionGivenUp            a version of weights published in parts; a part did not come
    │   └── Full                      refused now, because the caller asked not to wait
    ├── PeerError                 the network, another process, or the machine
    │   ├── Unreachable               nothing answered at the address before the deadline
    │   ├── Disconnected              the server or this session is gone, or the queue was closed
    │   ├── ProtocolError             a message that cannot be decoded
    │   │   └── VersionMismatch           a message of another version: upgrade one end
    │   ├── OutOfMemory               the arena or its disk cannot grow
    │   ├── ShardLost                 the shard that had these bytes is gone, and no replica has them
    │   ├── JournalFailed             the server's journal cannot be written
    │   │   └── DiskFailed                its disk is full or gives errors; nothing is damaged
    │   └── Corruption                bytes do not match their checksum or bounds
    └── InternalError             us: please report it

A message names the subject, the value, the rule and the remedy, in that order:
``field "rewards" is not in table "rollouts"; it has prompt_ids, response_ids``.
"""

from __future__ import annotations

from typing import Final

from transferqueue.errors.text import shortened, visible, visible_lines


class TransferQueueError(Exception):
    """Root of all errors raised by the queue. Its text is complete without a traceback, and short whatever value it
    names."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shortened(each) if isinstance(each, str) else each for each in args))


class UsageError(TransferQueueError, ValueError):
    """The call is wrong. Nothing was changed; fix the call."""


class SchemaError(UsageError):
    """A column does not fit its field: dtype, shape, raggedness or row count."""


class NotFound(UsageError, LookupError):
    """A table, field, task, row or key does not exist; the message lists those that do."""


class ColumnFreed(NotFound):
    """A column of a row was there and was freed, though the row lives on; the message says when, and by which task or
    session."""


class AlreadyExists(UsageError):
    """A table, task or key with this name exists with other settings, or a field of a row is already set."""


class Impossible(UsageError):
    """A configuration or request that could never make progress. The message shows the arithmetic."""


class Sealed(UsageError):
    """The table is sealed: no row may enter, and it cannot be sealed again."""


class BatchEnded(UsageError):
    """A batch was used after its lease ended and its memory was returned."""


class Forked(UsageError):
    """A queue opened before ``os.fork`` was used in the child; connect again there."""


class PermissionDenied(UsageError):
    """The role of this client's key does not allow the request; the message names the role and those that do."""


class AddressInUse(UsageError):
    """Another server already listens at this address."""


class FlowSignal(TransferQueueError):
    """The flow of rows, and no fault: wait, drop or finish."""


class EndOfTable(FlowSignal):
    """The table is sealed and this task has drained it."""


class RowsEnded(FlowSignal):
    """Rows that a lease waited for have ended, so the wait ended. The call changed nothing.

    `ordinals` has the first and the last ordinal of each awaited span whose rows have all ended.
    """

    def __init__(self, text: str, ordinals: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__(text)
        self.ordinals = ordinals


class DeadlineExceeded(FlowSignal, TimeoutError):
    """A wait ended by its deadline. The message names the missing rows and the session that holds them."""


class LeaseExpired(FlowSignal):
    """The lease expired, was released, or belongs to another session. The call changed nothing."""


class RowsChanged(FlowSignal):
    """Rows were written after they were read, and the update was to be made only if not. It changed nothing: read them
    again."""


class VersionGivenUp(FlowSignal):
    """A version of weights published in parts was abandoned before all of them had come. No reader has it; the message
    says why."""


class Full(FlowSignal):
    """No room now, and the caller asked not to wait."""


class PeerError(TransferQueueError, ConnectionError):
    """The network, another process or the machine failed."""


class Unreachable(PeerError):
    """Nothing answered at an address before the deadline."""


class Disconnected(PeerError):
    """The server is gone, has forgotten this session, or the queue was closed."""


class ProtocolError(PeerError):
    """A message could not be understood. It was ignored; nothing was changed."""


class VersionMismatch(ProtocolError):
    """Client and server use different protocols, or one does not know a policy or an option that the other sent. A
    request like this was not executed. The message names both numbers or the unknown name, and the end to upgrade."""


class OutOfMemory(PeerError):
    """The arena, or the file system that holds it, cannot grow."""


class ShardLost(PeerError):
    """The shard that had these bytes, or should have received them, is lost (or a disk damaged them), and no replica
    has them. The message names the remedy."""


class JournalFailed(PeerError):
    """The journal of a server cannot be opened or written. The server ends; it sent no reply that the journal does not
    have."""


class DiskFailed(JournalFailed):
    """The disk of a server's state is full, or gives errors. Nothing is damaged. The server ends, or waits with its
    start, until the disk works.

    `is_full` says whether it may work again with more room.
    """

    def __init__(self, text: str, *, is_full: bool = True) -> None:
        super().__init__(text)
        self.is_full = is_full


class Corruption(PeerError):
    """Bytes do not match their checksum, or point outside their extent.

    `block` is the number of their block in the server that read them; 0: the bytes are elsewhere.
    """

    def __init__(self, text: str, *, block: int = 0) -> None:
        super().__init__(text)
        self.block = block


class InternalError(TransferQueueError):
    """A defect of the queue itself. Please report it."""


class LedgerTorn(BaseException):
    """An unexpected exception came between the first and the last write of an operation, or before all that it ordered
    was done. The server ends, since its state is not known.

    Not in the tree above, since no client gets it, and no `except Exception` may hold it.
    """


def _tree(root: type[TransferQueueError]) -> dict[str, type[TransferQueueError]]:
    by_name = {root.__name__: root}
    for child in root.__subclasses__():
        by_name |= _tree(child)
    return by_name


BY_NAME: Final = _tree(TransferQueueError)
"""The class of each error by its name. An error travels as name and text, never as code."""


def from_wire(name: str, text: str) -> TransferQueueError:
    """The error that a peer reported. An unknown name becomes an `InternalError` with name and text."""
    known, text = BY_NAME.get(name), visible_lines(text)
    return known(text) if known else InternalError(f"{visible(name)}: {text}")


def listing(names: object) -> str:
    """Names for an error message, sorted: ``a, b, c``, or ``none``. Only the first twelve are listed."""
    ordered = sorted(str(name) for name in names)  # type: ignore[attr-defined]
    if not ordered:
        return "none"
    return ", ".join(ordered[:12]) + (f" and {len(ordered) - 12} more" if len(ordered) > 12 else "")
