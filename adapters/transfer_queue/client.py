"""The drop-in's client. It reads and writes tables directly, and asks the controller about consumption."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue import checkpoint, steps
from transferqueue.adapters.transfer_queue.checkpoint import arrow_samples
from transferqueue.adapters.transfer_queue.errors import StorageKeyNotFoundError
from transferqueue.adapters.transfer_queue.metadata import READY, BatchMeta, schema_of
from transferqueue.adapters.transfer_queue.samples import table_steps
from transferqueue.adapters.transfer_queue.samples.columns import interleaved, stacked
from transferqueue.adapters.transfer_queue.samples.merging import MergeFunction
from transferqueue.adapters.transfer_queue.samples.partitions import PartitionSteps, indexes_of, rows_of
from transferqueue.adapters.transfer_queue.samples.tags import given_tags
from transferqueue.adapters.transfer_queue.steps import ASYNC, Ask, AsyncAsk, Question, Steps
from transferqueue.errors import NotFound

Parser = Callable[[Any], Any]
T = TypeVar("T")
P = ParamSpec("P")


class ClientSteps:
    """What `TransferQueueClient` does, as `steps`."""

    def __init__(self, partitions: PartitionSteps) -> None:
        self._partitions = partitions

    # ------------------------------------------------------------ by index

    async def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Choose samples of a partition that have all `data_fields`, and count them as consumed by `task_name`.

        mode ``fetch``: the sampler chooses; while there are too few samples, returns an empty batch, or with
        ``polling_mode`` off waits. ``force_fetch``: all samples, ready or not, consumed or not. ``insert``: new samples
        without data.
        """
        _check_text(partition_id=partition_id, task_name=task_name or "")
        if sampling_config is not None and not isinstance(sampling_config, Mapping):
            raise TypeError(
                f"sampling_config is {type(sampling_config).__name__}; give a dict of the sampler's arguments"
            )
        config = None if sampling_config is None else dict(sampling_config)
        names, size = _names(data_fields), _whole("batch_size", batch_size)
        meta: BatchMeta = await Question("get_meta", names, size, partition_id, mode, task_name, config)
        return meta

    async def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Write columns of samples: of those in `metadata`, or of new ones in `partition_id`."""
        data = _parsed(data, data_parser)
        if metadata is None:
            if partition_id is None:
                raise ValueError("put without metadata needs partition_id")
            return await self._put_new(data, partition_id)
        if len(data) != len(metadata):
            raise ValueError(f"data of {len(data)} samples for metadata of {len(metadata)}")
        for part in metadata.chunk_by_partition():
            partition = part.partition_ids[0]
            places = [at for at, name in enumerate(metadata.partition_ids) if name == partition]
            some = data if len(places) == len(data) else data[places]
            await self._partitions.update(partition, part.global_indexes, some, part.custom_meta)
        return metadata.add_fields(data)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Read the columns of the samples in `metadata`, in its order."""
        if not len(metadata):
            return TensorDict({}, batch_size=[0])
        if len(set(metadata.partition_ids)) == 1:
            return await self._get(metadata.partition_ids[0], metadata.global_indexes, metadata.field_names)
        places: dict[str, list[int]] = {}
        for at, partition in enumerate(metadata.partition_ids):
            places.setdefault(partition, []).append(at)
        parts = [
            await self._get(partition, [metadata.global_indexes[at] for at in those], metadata.field_names)
            for partition, those in places.items()
        ]
        present = [set(part.keys()) for part in parts]
        lacking = [name for name in metadata.field_names if any(name not in names for names in present)]
        if lacking:
            raise StorageKeyNotFoundError(f"fields {lacking[:5]} are not in each of the partitions {list(places)[:5]}")
        return interleaved(parts, np.argsort(np.concatenate(list(places.values()))), metadata.field_names)

    async def wait_for(
        self, data_fields: list[str], batch_size: int, partition_id: str, task_name: str, wait_s: float
    ) -> None:
        """Return when `task_name` has `batch_size` ready samples that it has not consumed, or after `wait_s`."""
        _check_text(partition_id=partition_id, task_name=task_name)
        await Question(
            "wait_for", _names(data_fields), _whole("batch_size", batch_size), partition_id, task_name, float(wait_s)
        )

    async def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge the custom meta of `metadata` into the samples' tags."""
        for part in metadata.chunk_by_partition():
            await self._partitions.update(part.partition_ids[0], part.global_indexes, None, part.custom_meta)

    async def clear_samples(self, metadata: BatchMeta) -> None:
        """Delete samples."""
        for part in metadata.chunk_by_partition():
            await Question("clear_samples", part.global_indexes, part.partition_ids[0])

    async def clear_partition(self, partition_id: str) -> None:
        """Delete a partition. Does nothing if it does not exist."""
        await Question("clear_partition", partition_id)

    # ------------------------------------------------------------ status

    async def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the indexes of a partition, and 1 for those that `task_name` has consumed; two None if the partition
        does not exist."""
        return await Question("consumption", task_name, partition_id) or (None, None)

    async def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the indexes of a partition, and 1 for those that have all `data_fields`; two None if the partition
        does not exist."""
        return await Question("production", list(data_fields), partition_id) or (None, None)

    async def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether there are samples, and `task_name` has consumed all of them."""
        return _all((await self.get_consumption_status(task_name, partition_id))[1])

    async def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether there are samples, and all have all `data_fields`."""
        return _all((await self.get_production_status(data_fields, partition_id))[1])

    async def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Forget what `task_name` (None: any task) has consumed. Return whether the partition exists."""
        return bool(await Question("reset_consumption", partition_id, task_name))

    async def get_partition_list(self) -> list[str]:
        """Names of the partitions."""
        return await self._partitions.names()

    # ------------------------------------------------------------ by key

    async def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Return metadata of samples by key. With `create`, missing samples are created, without data. Without it,
        missing keys are `ValueError`.
        """
        keys = _keys(keys)
        if create:
            rows = await self._partitions.keyed(partition_id, keys)
        else:
            rows = await self.rows(keys, partition_id)
        meta: BatchMeta = await Question("describe", rows.tolist(), partition_id)
        return meta

    async def rows(self, keys: list[str], partition_id: str) -> npt.NDArray[np.int64]:
        """Return indexes of samples by key. ``ValueError`` for a partition or keys that do not exist."""
        table = await self._partitions.find(partition_id)
        if table is None:
            raise ValueError(f"partition {partition_id!r} not found")
        return await rows_of(table, keys)

    async def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Return keys of samples by index. ``RuntimeError`` for a sample without one."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(isinstance(index, int) for index in indexes):
            raise TypeError(f"global_indexes is {type(global_indexes).__name__}; give an int or a list of int")
        table = await self._partitions.find(partition_id)
        if table is None:
            raise RuntimeError(f"partition {partition_id!r} not found")
        with await table_steps.read(table, indexes_of(indexes), ()) as rows:
            keys = list(rows.keys)
        if not all(keys):
            raise RuntimeError(f"some of the indexes {indexes[:5]} have no key")
        return keys

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return keys and tags by partition; a partition that does not exist is left out."""
        tags_by_key: dict[str, dict[str, Any]] = {}
        for name in await self.get_partition_list() if partition_id is None else [partition_id]:
            table = await self._partitions.find(name)
            if table is not None:
                with await table_steps.read(table, fields=()) as rows:
                    tags_by_key[name] = {
                        key: given_tags(tags) for key, tags in zip(rows.keys, rows.tags, strict=True) if key
                    }
        return tags_by_key

    async def kv_put(
        self, keys: list[str], partition_id: str, fields: TensorDict | None, tags: Sequence[Mapping[str, Any]] | None
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Write columns and merge tags of samples by key; creates new ones. Return all fields and each sample's tags
        that they have now."""
        put = await self._partitions.put_keyed(partition_id, keys, fields, tags)
        if put is None:  # all were new
            names = [] if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118
            return names, [dict(sample_tags) for sample_tags in tags or [{}] * len(keys)]
        table, rows = put
        with await table_steps.read(table, rows, values=False) as read:
            return list(read.fields), [given_tags(sample_tags) for sample_tags in read.tags]

    async def kv_update(
        self, keys: list[str], partition_id: str, fields: TensorDict, merge_fn: MergeFunction
    ) -> list[str]:
        """Set fields of samples by key to ``merge_fn(old, new)``, in one commit. Return all fields that they have."""
        table, rows = await self._partitions.merge(partition_id, keys, fields, merge_fn)
        with await table_steps.read(table, rows, values=False) as read:
            return list(read.fields)

    async def kv_get(self, keys: list[str], partition_id: str, select_fields: Sequence[str] | None) -> TensorDict:
        """Read columns of samples by key: all fields that each has, or those in `select_fields` (unknown ones are
        ignored)."""
        if not keys:
            raise ValueError(f"no keys for partition {partition_id!r}; name at least one")
        return await self._partitions.get(partition_id, keys, select_fields)

    async def kv_clear(self, keys: list[str], partition_id: str, fields: Sequence[str] | None = None) -> None:
        """Delete samples by key, or only these fields of them; missing ones are ignored."""
        table = await self._partitions.find(partition_id)
        if table is not None and keys:
            rows = [row for row in dict.fromkeys((await table_steps.find(table, keys)).tolist()) if row >= 0]
            if rows and fields is None:
                await Question("clear_samples", rows, partition_id)
            elif rows:
                await Question(
                    "clear_fields", rows, [name for name in fields or () if name in table.fields], partition_id
                )

    # ------------------------------------------------------------ tables

    async def _put_new(self, data: TensorDict, partition_id: str) -> BatchMeta:
        rows = await self._partitions.put(partition_id, data)
        return BatchMeta(
            global_indexes=rows.tolist(),
            partition_ids=[partition_id] * len(rows),
            field_schema={str(name): schema_of(data.get(name)) for name in data.keys()},  # noqa: SIM118
            production_status=np.full(len(rows), READY, np.int8),
        )

    async def _get(self, partition_id: str, rows: Sequence[int], names: Sequence[str]) -> TensorDict:
        try:
            return await self._partitions.get_rows(partition_id, rows, names)
        except NotFound as error:
            raise StorageKeyNotFoundError(str(error)) from error


def _blocking(
    method: Callable[Concatenate[ClientSteps, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[TransferQueueClient, P], T]:
    def call(self: TransferQueueClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self.run(method(self.steps, *arguments, **named))

    return steps.named(call, method)


class TransferQueueClient:
    """A process's access to the partitions. Every method may be called from any thread, and has an ``async_`` twin for
    any event loop.

    `ask` calls a method of the controller by name, and so does `ask_async` in an event loop. `rows_max` bounds a
    partition that this client creates. `room_s`: how long a put waits for memory.
    """

    def __init__(
        self,
        queue: tq.Queue,
        ask: Ask,
        ask_async: AsyncAsk,
        rows_max: int,
        client_id: str = "",
        room_s: float = 0.0,
    ) -> None:
        self.client_id = client_id
        self.steps = ClientSteps(PartitionSteps(queue, rows_max, renews=True, room_s=room_s))
        self._queue, self._ask, self._ask_async, self._rows_max = queue, ask, ask_async, rows_max

    @property
    def queue(self) -> tq.Queue:
        """The queue of this process."""
        return self._queue

    @property
    def async_queue(self) -> tq.AsyncQueue:
        """The queue of this process, for event loops."""
        return tq.AsyncQueue(*self._queue._clients)

    def run(self, call: Steps[T]) -> T:
        """Return the result of a call, in this thread."""
        return steps.run(call, self._ask)

    async def arun(self, call: Steps[T]) -> T:
        """Return the result of a call, in an event loop."""
        return await steps.arun(call, self._ask_async)

    get_meta = _blocking(ClientSteps.get_meta)
    put = _blocking(ClientSteps.put)
    get_data = _blocking(ClientSteps.get_data)
    wait_for = _blocking(ClientSteps.wait_for)
    set_custom_meta = _blocking(ClientSteps.set_custom_meta)
    clear_samples = _blocking(ClientSteps.clear_samples)
    clear_partition = _blocking(ClientSteps.clear_partition)
    get_consumption_status = _blocking(ClientSteps.get_consumption_status)
    get_production_status = _blocking(ClientSteps.get_production_status)
    check_consumption_status = _blocking(ClientSteps.check_consumption_status)
    check_production_status = _blocking(ClientSteps.check_production_status)
    reset_consumption = _blocking(ClientSteps.reset_consumption)
    get_partition_list = _blocking(ClientSteps.get_partition_list)
    kv_retrieve_meta = _blocking(ClientSteps.kv_retrieve_meta)
    kv_retrieve_keys = _blocking(ClientSteps.kv_retrieve_keys)
    kv_list = _blocking(ClientSteps.kv_list)
    kv_put = _blocking(ClientSteps.kv_put)
    kv_update = _blocking(ClientSteps.kv_update)
    kv_get = _blocking(ClientSteps.kv_get)
    kv_clear = _blocking(ClientSteps.kv_clear)

    # ------------------------------------------------------------ checkpoints

    def save_controller_checkpoint(self, path: str | Path) -> None:
        """Write the consumption state to a file on this process's machine, as JSON."""
        checkpoint.save_controller(self._ask, Path(path))

    def load_controller_checkpoint(self, path: str | Path) -> None:
        """Restore the consumption state from such a file. A damaged or foreign file is `Corruption` or `UsageError` and
        changes nothing."""
        checkpoint.load_controller(self._ask, Path(path))

    def save_storage_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Write all partitions to ``checkpoint_dir/storage``, as Arrow files, from this process."""
        arrow_samples.save(self._queue, self._have, Path(checkpoint_dir))

    def load_storage_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Replace all partitions by those of such a directory. Call it while no other process writes.

        Damaged or foreign files are `Corruption`, `UsageError` or ``FileNotFoundError`` and change nothing.
        """
        checkpoint.load_storage(self._queue, self._ask, Path(checkpoint_dir), self._rows_max)

    def verify_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Raise what `load_storage_checkpoint` would raise for a checkpoint that cannot be loaded completely. Changes
        nothing."""
        checkpoint.verify(Path(checkpoint_dir), self._ask, self._rows_max)

    def dump(self, path: Path, keys: list[str], partition_id: str) -> None:
        """Write samples of these keys to a new directory."""
        rows = self.run(self.steps.rows(keys, partition_id))
        checkpoint.dump(self._queue, self._have, path, partition_id, rows)

    def load_dump(self, path: Path) -> int:
        """Put the samples of a dump by their keys. Return how many."""
        return checkpoint.load_dump(self._queue, path, self._rows_max)

    def _have(self, field: str, partition_id: str) -> set[int]:
        rows, has = self.get_production_status([field], partition_id)
        return set() if rows is None or has is None else set(rows[has == 1].tolist())

    def close(self) -> None:
        """Detach; the service stays for others."""
        self._queue.close()


def _awaited(method: Callable[..., Steps[Any]]) -> Callable[..., Any]:
    async def call(self: TransferQueueClient, *arguments: Any, **named: Any) -> Any:
        return await self.arun(method(self.steps, *arguments, **named))

    return steps.named(call, method, ASYNC)


def _in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(self: TransferQueueClient, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(method, self, *arguments, **named)

    return steps.named(call, method, ASYNC)


for _name, _method in list(vars(TransferQueueClient).items()):
    if _name.endswith("_checkpoint"):  # files
        setattr(TransferQueueClient, ASYNC + _name, _in_thread(_method))
    elif _name in vars(ClientSteps) and _name[0] != "_":
        setattr(TransferQueueClient, ASYNC + _name, _awaited(vars(ClientSteps)[_name]))

AsyncTransferQueueClient = TransferQueueClient


def _keys(keys: list[str] | str) -> list[str]:
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(names, list) or not all(issubclass(kind, str) for kind in set(map(type, names))):
        raise TypeError(f"keys is {type(keys).__name__}; give a str or a list of str")
    return names


def _check_text(**arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}; give a str")


def _names(data_fields: Iterable[str]) -> list[str]:
    """Names of fields as a list. ``TypeError`` for one name alone, which would be taken for names of one letter
    each."""
    names = None if isinstance(data_fields, str) or not isinstance(data_fields, Iterable) else list(data_fields)
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f"data_fields={data_fields!r}; give a list of names, such as ['prompts', 'responses']")
    return names


def _whole(name: str, number: Any) -> int:
    try:
        return index(number)
    except TypeError:
        raise TypeError(f"{name}={number!r} is {type(number).__name__}; give a whole number") from None


def _all(status: torch.Tensor | None) -> bool:
    return status is not None and status.numel() > 0 and bool((status == 1).all())


def _parsed(data: TensorDict, parser: Parser | None) -> TensorDict:
    """Apply `parser` to the columns, in place: tensors as they are, nested ones and plain values as lists."""
    if parser is None:
        return data
    columns: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118
        value = data.get(name)
        if isinstance(value, torch.Tensor):
            columns[str(name)] = list(value.unbind()) if value.is_nested else value
        else:
            columns[str(name)] = value.tolist()
    sizes = {name: len(value) for name, value in columns.items()}
    parser(columns)
    if {name: len(value) for name, value in columns.items()} != sizes:
        raise ValueError("data_parser added, removed or resized columns; it may only change values in place")
    return TensorDict({name: stacked(value) for name, value in columns.items()}, batch_size=data.batch_size)
