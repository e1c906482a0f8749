"""The weight channel: versioned publication of model weights to whoever generates with them.

A version is one block of one row, with a field per tensor, committed at once. Names of tensors are kept with a
leading underscore, since those of a state dict may begin with a digit and names of fields may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from transferqueue.client import checks
from transferqueue.client.client import Client
from transferqueue.client.commits import CERTAIN, placed, write
from transferqueue.client.deadline import Deadline
from transferqueue.client.driving import Operation, ask, drive
from transferqueue.client.writing import Fate
from transferqueue.errors import NotFound, SchemaError, UsageError, listing
from transferqueue.limits import TIMEOUT_S_DEFAULT, check_name
from transferqueue.schema import Field
from transferqueue.storage.blocks import Draft
from transferqueue.storage.column import Column
from transferqueue.storage.placement import Blocks
from transferqueue.storage.prepare import Prepared, prepare
from transferqueue.wire import messages as m

if TYPE_CHECKING:
    import torch


class Weights(Mapping[str, Any]):
    """One version of the weights: a mapping from names to tensors, in shared memory and nowhere else.

    ``weights[name]`` is a torch tensor where torch is installed, else a numpy array; `torch` and `numpy` give all of
    them as one or the other. They are views of this process's own: they may be changed in place without anyone else
    seeing it, and stay valid for as long as they are held. The version's memory is pinned until `release`, the end of a
    ``with`` block, or collection.
    """

    def __init__(self, channel: str, version: int, columns: dict[str, Column], held: list[Blocks]) -> None:
        self._channel, self._version = channel, version
        self._columns, self._held = columns, held

    @property
    def channel(self) -> str:
        """Name of the channel."""
        return self._channel

    @property
    def version(self) -> int:
        """The version that these are."""
        return self._version

    def torch(self) -> dict[str, torch.Tensor]:
        """All tensors, as ``model.load_state_dict`` takes them; no bytes are copied."""
        return {name: column.torch()[0] for name, column in self._columns.items()}

    def numpy(self) -> dict[str, NDArray[Any]]:
        """All tensors as numpy arrays; bf16 and fp8 need ml_dtypes. No bytes are copied."""
        return {name: column.numpy()[0] for name, column in self._columns.items()}

    def __getitem__(self, name: str) -> Any:
        column = self._columns.get(name)
        if column is None:
            raise NotFound(
                f'tensor "{name}" is not in version {self._version} of channel "{self._channel}"; it has '
                f"{listing(self._columns)}"
            )
        return column.torch()[0] if _has_torch() else column.numpy()[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def release(self) -> None:
        """Return the memory, as soon as no view of it is left. Again: nothing."""
        for blocks in self._held:
            blocks.end(
                f'version {self._version} of channel "{self._channel}" was released and its memory was returned; pull it again'
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class WeightChannelBase:
    """What the channels of both fronts share."""

    def __init__(self, client: Client, name: str, keep: int) -> None:
        self._client, self._name, self._keep = client, name, keep

    @property
    def name(self) -> str:
        """The channel's name."""
        return self._name


class WeightChannel(WeightChannelBase):
    """Versioned publication of weights. Made by `Queue.weights`; any process may publish or pull."""

    def publish(self, version: int, tensors: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S_DEFAULT) -> None:
        """Publish all `tensors` (torch or numpy, by name) as `version`, in one commit; versions ascend.

        Written once, into shared memory, from whatever device they are on. Tables whose pacing names this channel
        advance their clock. The oldest versions beyond `keep` end; who still views one keeps it. Waits up to `timeout_s`
        for memory.
        """
        drive(self._client.connection, publish(self._client, self._name, self._keep, version, tensors, timeout_s))

    def pull(self, above: int = -1, *, version: int | None = None, timeout_s: float = TIMEOUT_S_DEFAULT) -> Weights:
        """The newest version above `above` (or exactly `version`), waiting up to `timeout_s` for it."""
        return drive(self._client.connection, pull(self._client, self._name, above, version, timeout_s))

    def applied(self, version: int) -> None:
        """This process generates with `version` from now on; that is a fact of its own, recorded beside publication."""
        drive(self._client.connection, applied(self._name, version))


# ---------------------------------------------------------------- operations


def channel_name(channel: str, keep: int) -> tuple[str, int]:
    """The two, checked."""
    return check_name("channel", channel), checks.positive("keep", keep)


def publish(
    client: Client, channel: str, keep: int, version: int, tensors: Mapping[str, Any], timeout_s: float
) -> Operation[None]:
    """One version, in one commit."""
    deadline = Deadline(client.clock, checks.seconds("timeout_s", timeout_s))
    number = checks.whole("version", version)
    draft = Draft(prepared(tensors))
    piece = yield from write(client, [draft], deadline)
    fate = Fate.UNKNOWN
    try:
        request = m.Publish(
            channel=channel,
            version=number,
            fields=draft.fields,
            blocks=placed(piece, [draft]),
            keep=keep,
            wait_s=deadline.left(),
        )
        yield from ask(request, m.Done)
        fate = Fate.COMMITTED
    except CERTAIN:
        fate = Fate.REFUSED
        raise
    finally:
        piece.done(fate)


def prepared(tensors: Mapping[str, Any]) -> list[Prepared]:
    """Tensors as columns of one row."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise UsageError(f"weights are {type(tensors).__name__} of no tensors; give a mapping of names to tensors")
    found: list[Prepared] = []
    for name, tensor in tensors.items():
        check_name("tensor", f"_{name}")
        if not hasattr(tensor, "shape"):
            raise SchemaError(f'tensor "{name}" is {type(tensor).__name__}; weights are torch tensors or numpy arrays')
        found.append(prepare(f"_{name}", tensor[None]))
    return found


def pull(client: Client, channel: str, above: int, version: int | None, timeout_s: float) -> Operation[Weights]:
    """A version, waited for."""
    request = m.Pull(
        channel=channel,
        above=checks.whole("above", above, least=-1),
        version=-1 if version is None else checks.whole("version", version),
        wait_s=checks.seconds("timeout_s", timeout_s),
    )
    found = yield from ask(request, m.Weights)
    fields: dict[str, Field] = {field.name: field for field in found.fields}
    zero = bytes(4)
    parts = [m.Part(block.fields, [block], block_of_row=zero, slot_of_row=zero) for block in found.blocks]
    columns, held = yield from client.memory.columns(parts, fields, 1, f'channel "{channel}"')
    return Weights(channel, found.version, {name[1:]: column for name, column in columns.items()}, held)


def applied(channel: str, version: int) -> Operation[None]:
    """This session generates with the version."""
    yield from ask(m.Applied(channel=channel, version=checks.whole("version", version)), m.Done)


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None
