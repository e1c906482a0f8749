"""Operations on weight channels, and the weights that a pull gives.

A version is a composition of blocks, one a tensor (`publish` says which of them a publication writes). A pull names
them all, and it reads bytes only to compare checksums; tensors that the caller has already are neither fetched nor read
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.device import destination
from transferqueue.client.operations.range_updates import KeptVersions
from transferqueue.client.operations.stored_ranges import StoredRange, stored_ranges
from transferqueue.client.operations.tensor_parts import WHOLE, Only, TensorParts
from transferqueue.client.operations.weight_blocks import BASE
from transferqueue.client.operations.weight_parts import (
    ArrivedTensors,
    SharedTensor,
    await_version,
    fetch_ranges,
    release_all,
    return_pins,
)
from transferqueue.client.session.calls import Deadline, seconds
from transferqueue.client.session.deferred_interrupts import DeferredInterrupts
from transferqueue.client.session.operation_runner import Operation, request_reply
from transferqueue.errors import Corruption, NotFound, UsageError, listing
from transferqueue.errors.on_failure import OnFailure
from transferqueue.errors.text import shown
from transferqueue.limits import DELTAS_MAX, check_name
from transferqueue.schema import Field, Slice
from transferqueue.storage.elements.process_bound import ProcessBound
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    import torch

    from transferqueue.storage.columns.column import Column

T = TypeVar("T")

TRIES: Final = 2
"""How often a pull is tried if bytes do not match their checksums."""

BEGUN_S: Final = 60.0
"""Default time for all parts of a version to come: longer than writing a shard takes."""

TURN_S: Final = 30.0
"""Default length of a turn: longer than loading weights takes, short enough for the others to wait for a dead
process."""


class Weights(ProcessBound, Mapping[str, Any]):
    """One version of the weights: a mapping from names to tensors of the base, in shared memory and nowhere else.

    ``weights[name]`` is a torch tensor where torch is installed, else a numpy array; `torch` and `numpy` give all of
    them as one or the other, of the base or of an adapter. They are views of this process's own: they may be changed in
    place, which no other process sees, and stay valid for as long as they are held; those that a pull took over from
    weights before (``since``) are the same memory as there. A tensor that was published in several slices is put
    together in new memory each time it is asked for: one copy. The version's memory is pinned until `release`, the end
    of a ``with`` block, or collection.

    Example:
        >>> import numpy as np
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     channel = queue.weights("policy")
        ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
        ...     with channel.pull(timeout_s=10) as weights:
        ...         print(weights.channel, weights.version, weights.adapters, sorted(weights), weights["head"].tolist())
        policy 1 [] ['embed', 'head'] [1.0, 1.0]
    """

    _remedy: ClassVar[str] = "pass queue.address, the channel and the version, and pull it there"

    def __init__(
        self,
        channel: str,
        version: int,
        tensors: dict[str, SharedTensor],
        changed: frozenset[str],
        published: Mapping[str, StoredRange],
        since: int = -1,
        removed: frozenset[str] = frozenset(),
    ) -> None:
        self._channel, self._version, self._since, self._removed = channel, version, since, removed
        self._tensors, self._changed = tensors, changed
        self._published = dict(published)
        self._slices = {name: one.slice for name in tensors if (one := published[name]).slice is not None}
        self._places = self._fields_by_tensor()
        self._unpinned: dict[str, SharedTensor] = {}
        self._released = False

    def __repr__(self) -> str:
        count = len(self._places)
        return f"<Weights of channel {self.channel!r}: version {self.version}, {count} tensors>"

    @property
    def channel(self) -> str:
        """Name of the channel."""
        return self._channel

    @property
    def version(self) -> int:
        """Number of the version."""
        return self._version

    @property
    def since(self) -> int:
        """Version of the weights that the pull was given as ``since``; -1: none.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"head": np.ones(2)})
            ...     first = channel.pull()
            ...     first.since, channel.pull(since=first).since
            (-1, 1)
        """
        return self._since

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters over this base."""
        return sorted({name.partition("/")[0] for name in self._tensors if not name.startswith(BASE)})

    def changed(self, adapter: str | None = None) -> frozenset[str]:
        """Return the names of tensors that are not those of ``since``: all, where none was given.

        Args:
            adapter: name of the adapter whose tensors are meant; default None: the base.

        Raises:
            NotFound: the version does not have the adapter.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     first = channel.pull()
            ...     written = channel.publish(2, {"embed": np.zeros((4, 2)), "head": np.zeros(2)})
            ...     sorted(channel.pull(above=1, since=first).changed())
            ['head']
        """
        prefix = self._prefix(adapter)
        changed = {self._tensor_of(field) for field in self._changed}
        return frozenset(name[len(prefix) :] for name in changed if name.startswith(prefix))

    def removed(self) -> frozenset[str]:
        """Return the names of tensors of the base of ``since`` that the version does not have, pulled or not.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     first = channel.pull()
            ...     written = channel.publish(2, {"embed": np.zeros((4, 2))})
            ...     sorted(channel.pull(above=1, since=first).removed())
            ['head']
        """
        return self._removed

    def moved(self, name: str) -> NDArray[np.int64] | None:
        """Return which elements of a tensor of the base may differ from those of ``since``, as far as that is known.

        Args:
            name: of the tensor.

        Returns:
            Their positions in the flat tensor, int64 ``[elements]``, perhaps some of them twice; None: any may differ.

        Raises:
            NotFound: the version, or the part of it that was pulled, does not have the tensor.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel, embed = queue.weights("policy"), np.zeros((64, 64))
            ...     written = channel.publish(1, {"embed": embed})
            ...     first = channel.pull()
            ...     embed[1, 2] = 1
            ...     written = channel.publish(2, {"embed": embed})
            ...     channel.pull(above=1, since=first).moved("embed")
            array([66])
        """
        full = f"{BASE}{name}"
        if full not in self._places:
            raise self._lacks(name)
        found = [np.empty(0, np.int64)]
        for field in self._places[full]:
            tensor = self._tensors[field]
            if field not in self._changed:
                continue
            if tensor.moved is None:
                return None
            found.append(np.asarray(tensor.moved + self._first(field) * math.prod(tensor.field.fixed[1:]), np.int64))
        return np.concatenate(found)

    def fields(self, adapter: str | None = None) -> dict[str, Field]:
        """Return dtype and shape of each tensor, as it is in this mapping. Reads no bytes.

        Args:
            adapter: name of the adapter whose tensors are meant; default None: the base.

        Raises:
            NotFound: the version does not have the adapter.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     field = channel.pull().fields()["embed"]
            >>> field.dtype, field.shape
            ('float64', (4, 2))
        """
        return self._of_each(adapter, self._field)

    def published(self) -> dict[str, Field]:
        """Return dtype and shape of each tensor of the base as it was published, also of those that were not pulled.

        Reads no bytes.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     weights = channel.pull(only=["head"])
            >>> list(weights.fields()), sorted(weights.published())
            (['head'], ['embed', 'head'])
        """
        found: dict[str, Field] = {}
        for stored in self._published.values():
            name, field, one = stored.tensor, stored.field, stored.slice
            if name.startswith(BASE):
                first = field.shape[:1] if one is None else (one.rows,)
                found[name[len(BASE) :]] = Field(name, field.dtype, (*first, *field.shape[1:]))
        return found

    def torch(self, adapter: str | None = None, *, device: Any = None) -> dict[str, torch.Tensor]:
        """Return all tensors as ``model.load_state_dict`` takes them. Only those in several slices are copied.

        Args:
            adapter: name of the adapter whose tensors are meant; default None: the base.
            device: where the tensors are copied to, as by `lease`: the calling thread's stream comes after the copies,
                and the memory stays pinned until they have ended. Tensors of ``since`` are copied again. Default None:
                views of shared memory.

        Raises:
            NotFound: the version does not have the adapter.
            OutOfMemory: no room for the copies.
            UsageError: a device that is not here.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     module_state = channel.pull().torch()
            >>> module_state["head"]
            tensor([1., 1.], dtype=torch.float64)
        """
        to = destination(device)
        columns = self._columns(chain.from_iterable(self._of_each(adapter, lambda _, fields: fields).values()))
        return self._of_each(adapter, partial(self._torch, columns if to is None else to(columns)))

    def _columns(self, fields: Iterable[str]) -> dict[str, Column]:
        return {field: self._tensors[field].column for field in fields}

    def numpy(self, adapter: str | None = None) -> dict[str, NDArray[Any]]:
        """Return all tensors as numpy arrays, as `torch`. bf16 and fp8 need ml_dtypes.

        Args:
            adapter: name of the adapter whose tensors are meant; default None: the base.

        Raises:
            NotFound: the version does not have the adapter.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     channel.pull().numpy()["head"]
            array([1., 1.])
        """
        return self._of_each(adapter, self._numpy)

    def _of_each(self, adapter: str | None, value_of: Callable[[str, list[str]], T]) -> dict[str, T]:
        """`value_of` each tensor of the base (or of an adapter) and its fields, by the tensor's name in this
        mapping."""
        prefix = self._prefix(adapter)
        return {name[len(prefix) :]: value_of(name, at) for name, at in self._places.items() if name.startswith(prefix)}

    # ------------------------------------------------------------ slices

    def _tensor_of(self, field: str) -> str:
        """The tensor that a field is, or is a slice of."""
        return self._slices[field].tensor if field in self._slices else field

    def _fields_by_tensor(self) -> dict[str, list[str]]:
        """Fields of each tensor, in the order of their rows."""
        found: dict[str, list[str]] = {}
        for field in self._tensors:
            found.setdefault(self._tensor_of(field), []).append(field)
        for fields in found.values():
            fields.sort(key=self._first)
        return found

    def _first(self, field: str) -> int:
        return self._slices[field].first if field in self._slices else 0

    def _field(self, name: str, fields: list[str]) -> Field:
        found = [self._tensors[field].column.field for field in fields]
        if len(found) == 1:
            return Field(name, found[0].dtype, found[0].shape)
        return Field(name, found[0].dtype, (sum(each.fixed[0] for each in found), *found[0].shape[1:]))

    def _torch(self, columns: Mapping[str, Column], name: str, fields: list[str]) -> Any:
        values = [columns[field].torch()[0] for field in fields]
        return self._put_together(name, fields, values, values[0].new_empty)

    def _numpy(self, name: str, fields: list[str]) -> Any:
        values = [self._tensors[field].column.numpy()[0] for field in fields]
        return self._put_together(name, fields, values, partial(np.empty, dtype=values[0].dtype))

    def _put_together(
        self, name: str, fields: list[str], values: list[Any], empty: Callable[[tuple[int, ...]], Any]
    ) -> Any:
        """The tensor whose fields have these values: a view if it is one, else a copy into an `empty` one."""
        return values[0] if len(values) == 1 else _join(empty(self._field(name, fields).fixed), values)

    def _prefix(self, adapter: str | None) -> str:
        if adapter is None:
            return BASE
        if adapter not in self.adapters:
            raise NotFound(
                f'adapter "{adapter}" is not in version {self._version} of channel "{self._channel}"; it has '
                f"{listing(self.adapters)}"
            )
        return f"{adapter}/"

    def _shared(self, stored: StoredRange, part: Slice = WHOLE) -> SharedTensor | None:
        """This version's part of a range, counted once more, if it has the same content; else None."""
        if not self._has(stored, part):
            return None
        mine = self._tensors[stored.field.name]
        return mine if mine.share() else None

    def _has(self, stored: StoredRange, part: Slice = WHOLE) -> bool:
        """Whether this version, which is not released, has this part of the range, and no other, with its content."""
        mine = self._held(stored.field.name)
        return mine is not None and mine.is_of(stored, part)

    def _had(self, stored: StoredRange, part: Slice) -> bool:
        """Whether this version had this part of the range with its content, before it was unpinned."""
        mine = self._unpinned.get(stored.field.name)
        return mine is not None and mine.is_of(stored, part)

    def _held(self, name: str) -> SharedTensor | None:
        """What this version, if it is not released, has of a range."""
        return None if self._released else self._tensors.get(name)

    def __getitem__(self, name: str) -> Any:
        full = f"{BASE}{name}"
        fields = self._places.get(full)
        if fields is None:
            raise self._lacks(name)
        return self._torch(self._columns(fields), full, fields) if _has_torch() else self._numpy(full, fields)

    def _lacks(self, name: str) -> NotFound:
        return NotFound(
            f'tensor "{name}" is not in version {self._version} of channel "{self._channel}"; it has {listing(self)}'
        )

    def __iter__(self) -> Iterator[str]:
        return (name[1:] for name in self._places if name.startswith(BASE))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def unpin(self) -> None:
        """Return the server's memory, and keep the tensors that lie in memory of this process.

        So a reader that holds weights for the ``since`` of its next pull leaves the server's memory free for as long.
        The tensors that were views of it are no longer in this mapping. A later pull reads them again, and `changed`
        names them only if their content changed.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     weights = channel.pull()
            ...     weights.unpin()
            ...     written = channel.publish(2, {"embed": np.zeros((4, 2)), "head": np.zeros(2)})
            ...     sorted(channel.pull(above=1, since=weights).changed())
            ['head']
        """
        pinned = {name: tensor for name, tensor in self._tensors.items() if not tensor.is_own}
        if self._released or not pinned:
            return
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name not in pinned}
        self._places = self._fields_by_tensor()
        self._unpinned |= pinned
        release_all(
            pinned,
            f'version {self._version} of channel "{self._channel}" was unpinned and its memory was returned; pull it '
            "again",
        )

    def release(self) -> None:
        """Return the memory, as soon as no view of it is left and no later version shares it.

        A second call does nothing.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 2)), "head": np.ones(2)})
            ...     weights = channel.pull()
            ...     head = weights.numpy()["head"]
            ...     weights.release()
            >>> head  # a view that was taken before
            array([1., 1.])
        """
        interrupts = DeferredInterrupts()  # one between two tensors would keep the others, or the lock that all share
        interrupts.begin()
        try:
            if self._released:
                return
            self._released = True
            for tensor in self._tensors.values():
                tensor.release(
                    f'version {self._version} of channel "{self._channel}" was released and its memory was returned; '
                    "pull it again"
                )
        finally:
            interrupts.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def channel_terms(channel: str, keep: int, deltas: int) -> tuple[str, KeptVersions]:
    """Check the name of a channel, the number of versions to keep, and that of differences of a tensor."""
    kept = KeptVersions(checks.positive("keep", keep), checks.whole("deltas", deltas, most=DELTAS_MAX))
    return check_name("channel", channel), kept


def _join(whole: Any, parts: list[Any]) -> Any:
    """Copy the parts, one after the other, into a tensor or array."""
    at = 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


def pull_weights(
    client: ClientSession,
    channel: str,
    above: int,
    version: int | None,
    since: Weights | None,
    timeout_s: float | None,
    only: Only | None = None,
) -> Operation[Weights]:
    """Wait for a version and pull it, or the tensors `only` of it. Pull it again if bytes do not match their
    checksums."""
    if since is not None and not isinstance(since, Weights):
        raise UsageError(
            f"since={shown(since)} is {type(since).__name__}; give the Weights that were pulled, or a version as above="
        )
    wanted = TensorParts(only)
    deadline = yield from checks.within(timeout_s)
    request = m.Pull(
        channel=channel,
        above=checks.whole("above", above, least=-1),
        version=-1 if version is None else checks.whole("version", version),
    )
    arrived = ArrivedTensors()
    try:
        for _ in range(TRIES - 1):
            try:
                return (yield from _pull(client, request, deadline, since, wanted, arrived))
            except Corruption:  # bytes changed on the way, and may arrive whole next time
                request = msgspec.structs.replace(request, refused=arrived.refused)
        return (yield from _pull(client, request, deadline, since, wanted, arrived))
    finally:
        arrived.release()


def _pull(
    client: ClientSession,
    request: m.Pull,
    deadline: Deadline,
    since: Weights | None,
    wanted: TensorParts,
    arrived: ArrivedTensors,
) -> Operation[Weights]:
    """Pull once. After a difference was refused, nothing that is held is made into another content."""

    def needed(stored: StoredRange) -> Slice | None:
        part = wanted.of(stored)
        return None if part is None or (since is not None and since._has(stored, part)) else part

    def base(name: str) -> SharedTensor | None:
        return None if since is None or request.refused else since._held(name)

    reply = yield from await_version(client, request, deadline, arrived, needed, base)
    with OnFailure(return_pins, client, reply.blocks, ()):
        published = stored_ranges(reply.fields, reply.blocks, reply.ranges)
        chosen = _chosen(published, wanted, f'version {reply.version} of channel "{request.channel}"')
    shared = {} if since is None else _shared(chosen, since)
    with OnFailure(release_all, shared, "the pull that shared it failed"):
        rest = {name: one for name, one in chosen.items() if name not in shared}
        new = {name: one for name, one in rest.items() if not arrived.has(*one)}
        subject = f'version {reply.version} of channel "{request.channel}"'
        fetched = yield from fetch_ranges(client, reply, new, base, subject, arrived)
    early = {name: arrived.take(name) for name in rest if name not in fetched}
    tensors = shared | early | fetched
    ordered = {name: tensors[name] for name in chosen}
    if since is None:
        return Weights(request.channel, reply.version, ordered, frozenset(rest), published)
    changed = frozenset(name for name, one in rest.items() if not since._had(*one))
    gone = _tensors_of(since._published) - _tensors_of(published)
    removed = frozenset(name.removeprefix(BASE) for name in gone if name.startswith(BASE))
    return Weights(request.channel, reply.version, ordered, changed, published, since.version, removed)


def _tensors_of(published: Mapping[str, StoredRange]) -> set[str]:
    return {stored.tensor for stored in published.values()}


def _chosen(
    published: Mapping[str, StoredRange], wanted: TensorParts, subject: str
) -> dict[str, tuple[StoredRange, Slice]]:
    """The wanted part of each range. `NotFound` for a tensor that the version does not have."""
    found = {name: (stored, wanted.of(stored)) for name, stored in published.items()}
    chosen = {name: (stored, part) for name, (stored, part) in found.items() if part is not None}
    missing = wanted.names - {stored.tensor for stored, _ in chosen.values()}
    if missing:
        names = {stored.tensor.removeprefix(BASE) for stored in published.values()}
        raise NotFound(
            f"{subject} has no tensor {listing(name[1:] for name in missing)}, or not these rows of it; it has "
            f"{listing(names)}"
        )
    return chosen


def _shared(chosen: Mapping[str, tuple[StoredRange, Slice]], since: Weights) -> dict[str, SharedTensor]:
    """The ranges that are the same in `since`, by their fields."""
    tensors = {name: since._shared(stored, part) for name, (stored, part) in chosen.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def report_applied(channel: str, version: int) -> Operation[None]:
    """Report that this session generates with the version."""
    yield from request_reply(m.ReportApplied(channel=channel, version=checks.whole("version", version)), m.DoneReply)


def acquire_update_slot(channel: str, at_once: int, length_s: float, timeout_s: float | None) -> Operation[None]:
    """Wait for an update slot: leave for this session to change its weights."""
    deadline = yield from checks.within(timeout_s)
    request = m.AcquireUpdateSlot(
        channel=channel,
        at_once=checks.positive("at_once", at_once),
        length_s=seconds("length_s", length_s),
        wait_s=deadline.wait_s,
    )
    yield from request_reply(request, m.DoneReply)


def release_update_slot(channel: str) -> Operation[None]:
    """Give the update slot back before its length has passed."""
    yield from request_reply(m.ReleaseUpdateSlot(channel=channel), m.DoneReply)


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None
