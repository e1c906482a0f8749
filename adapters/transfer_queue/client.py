"""The drop-in's client: bytes go straight to the tables, questions of who was given what to the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

import transferqueue as tq
from transferqueue.adapters.transfer_queue import checkpoint
from transferqueue.adapters.transfer_queue.checkpoint import stored
from transferqueue.adapters.transfer_queue.columns import columns_of, schema_of_field, stacked, tensordict_of
from transferqueue.adapters.transfer_queue.controller import open_table
from transferqueue.adapters.transfer_queue.errors import StorageKeyNotFoundError
from transferqueue.adapters.transfer_queue.metadata import READY, BatchMeta, schema_of
from transferqueue.adapters.transfer_queue.tags import given_tags, partition_of, stored_tags, table_of
from transferqueue.errors import AlreadyExists, NotFound

Parser = Callable[[Any], Any]

_TRIES: Final = 8
"""A key that two clients put for the first time at once is new to one of them; the other updates it."""


class TransferQueueClient:
    """A process's way to the partitions. Every method may be called from any thread, and has an ``async_`` twin for any loop.

    ask: calls a method of the controller by name. rows_max: of a partition that this client makes.
    """

    def __init__(self, queue: tq.Queue, ask: Callable[..., Any], rows_max: int, client_id: str = "") -> None:
        self.client_id = client_id
        self._queue, self._ask, self._rows_max = queue, ask, rows_max

    # ------------------------------------------------------------ by index

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Choose samples of a partition that have all `data_fields`, and count them as consumed by `task_name`.

        mode ``fetch``: as the sampler chooses; an empty batch, or with ``polling_mode`` off a wait, while there are too
        few. ``force_fetch``: all samples, ready or not, consumed or not. ``insert``: new samples without data.
        """
        found: BatchMeta = self._ask(
            "get_meta", list(data_fields), batch_size, partition_id, mode, task_name, sampling_config
        )
        return found

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Write columns of samples: of those that `metadata` names, or of new ones in `partition_id`."""
        data = _parsed(data, data_parser)
        if metadata is None:
            if partition_id is None:
                raise ValueError("put without metadata needs partition_id")
            return self._put_new(data, partition_id)
        if len(data) != len(metadata):
            raise ValueError(f"data of {len(data)} samples for metadata of {len(metadata)}")
        for part in metadata.chunk_by_partition():
            table = self._table(part.partition_ids[0])
            places = [at for at, name in enumerate(metadata.partition_ids) if name == part.partition_ids[0]]
            self._write(
                table, part.global_indexes, data if len(places) == len(data) else data[places], part.custom_meta
            )
        return metadata.add_fields(data)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Columns of the samples that `metadata` names, in its order."""
        if not len(metadata):
            return TensorDict({}, batch_size=[0])
        if len(set(metadata.partition_ids)) == 1:
            return self._get(metadata.partition_ids[0], metadata.global_indexes, metadata.field_names)
        parts = [self.get_data(metadata[at]) for at in range(len(metadata))]
        return _stacked(parts, metadata.field_names)

    def wait_for(
        self, data_fields: list[str], batch_size: int, partition_id: str, task_name: str, wait_s: float
    ) -> None:
        """Return when `task_name` has `batch_size` ready samples before it, or after `wait_s`."""
        self._ask("wait_for", list(data_fields), batch_size, partition_id, task_name, wait_s)

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge the custom meta of `metadata` into the samples' tags."""
        for part in metadata.chunk_by_partition():
            self._merge_tags(self._table(part.partition_ids[0]), part.global_indexes, part.custom_meta)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Delete samples."""
        for part in metadata.chunk_by_partition():
            self._ask("clear_samples", part.global_indexes, part.partition_ids[0])

    def clear_partition(self, partition_id: str) -> None:
        """Delete a partition. One that is not there: nothing."""
        self._ask("clear_partition", partition_id)

    # ------------------------------------------------------------ status

    def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Indexes of a partition, and 1 for those that `task_name` was given; two None for one that is not there."""
        return self._ask("consumption", task_name, partition_id) or (None, None)

    def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Indexes of a partition, and 1 for those that have all `data_fields`; two None for one that is not there."""
        return self._ask("production", list(data_fields), partition_id) or (None, None)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether there are samples, and all were given to `task_name`."""
        return _all(self.get_consumption_status(task_name, partition_id)[1])

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether there are samples, and all have all `data_fields`."""
        return _all(self.get_production_status(data_fields, partition_id)[1])

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Forget what `task_name` (None: any task) was given. Whether the partition is there."""
        return bool(self._ask("reset_consumption", partition_id, task_name))

    def get_partition_list(self) -> list[str]:
        """Names of the partitions."""
        return [name for table in self._queue.tables() if (name := partition_of(table)) is not None]

    # ------------------------------------------------------------ by key

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Metadata of samples by key; create: those that do not exist are made, without data.

        Without `create`, keys that do not exist are `ValueError`.
        """
        keys = _keys(keys)
        table = self._table(partition_id) if create else self._existing(partition_id)
        if table is None:
            raise ValueError(f"partition {partition_id!r} not found")
        rows = table.find(keys) if keys else np.empty(0, np.int64)
        if (rows < 0).any():
            if not create:
                missing = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
                raise ValueError(f"keys {missing[:5]} not found in partition {partition_id!r}")
            rows = self._create(table, keys)
        return self._meta(table, partition_id, rows)

    def kv_retrieve_keys(self, global_indexes: list[int] | int, partition_id: str) -> list[str]:
        """Keys of samples by index. ``RuntimeError`` for a sample without one."""
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(isinstance(index, int) for index in indexes):
            raise TypeError(f"global_indexes is {type(global_indexes).__name__}; give an int or a list of int")
        table = self._existing(partition_id)
        if table is None:
            raise RuntimeError(f"partition {partition_id!r} not found")
        with table.read(np.asarray(indexes, np.int64), fields=()) as rows:
            keys = list(rows.keys)
        if not all(keys):
            raise RuntimeError(f"some of the indexes {indexes[:5]} have no key")
        return keys

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Keys and tags, by partition; a partition that is not there is not in it."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.get_partition_list() if partition_id is None else [partition_id]:
            table = self._existing(name)
            if table is not None:
                with table.read(fields=()) as rows:
                    found[name] = {key: given_tags(tags) for key, tags in zip(rows.keys, rows.tags, strict=True) if key}
        return found

    def kv_put(
        self, keys: list[str], partition_id: str, fields: TensorDict | None, tags: Sequence[Mapping[str, Any]] | None
    ) -> list[str]:
        """Write columns and merge tags of samples by key, made if they are new; return all fields that they have now."""
        table = self._table(partition_id)
        rows = table.find(keys)
        if (rows < 0).all():
            try:
                self._put(table, fields, keys, tags)
                return [] if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118
            except AlreadyExists:  # another client was quicker with one of the keys
                rows = table.find(keys)
        if (rows < 0).any():
            rows = self._create(table, keys)
        self._write(table, rows.tolist(), fields, tags)
        with table.read(rows) as found:
            return list(found.fields)

    def kv_get(self, keys: list[str], partition_id: str, select_fields: Sequence[str] | None) -> TensorDict:
        """Columns of samples by key: all that each of them has, or those of `select_fields` (unknown ones dropped)."""
        table = self._existing(partition_id)
        rows = table.find(keys) if table is not None and keys else np.full(len(keys), -1)
        if table is None or (rows < 0).any() or not keys:
            missing = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
            raise ValueError(f"keys {missing[:5]} not found in partition {partition_id!r}")
        return self._get(partition_id, rows.tolist(), None if select_fields is None else list(select_fields))

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        """Delete samples by key; those that are not there are passed over."""
        table = self._existing(partition_id)
        if table is not None and keys:
            rows = [row for row in table.find(keys).tolist() if row >= 0]
            if rows:
                self._ask("clear_samples", rows, partition_id)

    # ------------------------------------------------------------ checkpoints

    def save_controller_checkpoint(self, path: str | Path) -> None:
        """Write who was given what to a file of this process's machine, as JSON."""
        checkpoint.save_controller(self._ask, Path(path))

    def load_controller_checkpoint(self, path: str | Path) -> None:
        """Continue from such a file. Damaged or foreign ones: `Corruption`, `UsageError`, and nothing changed."""
        checkpoint.load_controller(self._ask, Path(path))

    def save_storage_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Write all partitions to ``checkpoint_dir/storage``, as Arrow files, from this process."""
        stored.save(self._queue, self._have, Path(checkpoint_dir))

    def load_storage_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Make the partitions those of such a directory, and no others. To be called while nobody else writes.

        Damaged or foreign ones: `Corruption`, `UsageError`, ``FileNotFoundError``, and nothing changed.
        """
        checkpoint.load_storage(self._queue, self._ask, Path(checkpoint_dir), self._rows_max)

    def verify_checkpoint(self, checkpoint_dir: str | Path) -> None:
        """Refuse a checkpoint that could not be loaded whole, as `load_storage_checkpoint` does. Changes nothing."""
        checkpoint.verify(Path(checkpoint_dir), self._ask, self._rows_max)

    def close(self) -> None:
        """Detach; the service goes on for others."""
        self._queue.close()

    # ------------------------------------------------------------ tables

    def _table(self, partition_id: str) -> tq.Table:
        return open_table(self._queue, partition_id, self._rows_max)

    def _existing(self, partition_id: str) -> tq.Table | None:
        try:
            return self._queue.table(table_of(partition_id))
        except NotFound:
            return None

    def _have(self, field: str, partition_id: str) -> set[int]:
        rows, has = self.get_production_status([field], partition_id)
        return set() if rows is None or has is None else set(rows[has == 1].tolist())

    def _put_new(self, data: TensorDict, partition_id: str) -> BatchMeta:
        rows = self._put(self._table(partition_id), data, None, None)
        return BatchMeta(
            global_indexes=rows.tolist(),
            partition_ids=[partition_id] * len(rows),
            field_schema={str(name): schema_of(data.get(name)) for name in data.keys()},  # noqa: SIM118
            production_status=np.full(len(rows), READY, np.int8),
        )

    def _put(
        self,
        table: tq.Table,
        data: TensorDict | None,
        keys: Sequence[str] | None,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> np.ndarray[Any, Any]:
        columns = self._columns(table, data)
        facts: dict[str, Any] = {"tags": [stored_tags(each) for each in tags]} if tags else {}
        if keys is not None:
            facts["key"] = list(keys)
        return table.put(timeout_s=0, **facts, **columns)

    def _create(self, table: tq.Table, keys: Sequence[str]) -> np.ndarray[Any, Any]:
        """Rows of all keys; those that do not exist are made, in one put."""
        for _ in range(_TRIES):
            rows = table.find(keys)
            new = [key for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
            if not new:
                return rows
            try:
                table.put(key=new, timeout_s=0)
            except AlreadyExists:
                continue
        raise AlreadyExists(f"keys of table {table.name} are put and deleted by others all the time; try again")

    def _write(
        self,
        table: tq.Table,
        rows: Sequence[int],
        data: TensorDict | None,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        facts: dict[str, Any] = {"tags": self._merged(table, rows, tags)} if tags and any(tags) else {}
        columns = self._columns(table, data)
        if facts or columns:
            table.update(np.asarray(rows, np.int64), overwrite=True, **facts, **columns)

    def _columns(self, table: tq.Table, data: TensorDict | None) -> dict[str, Any]:
        if data is None:
            return {}
        new, columns = columns_of(data, table.fields)
        if new:
            table.add_fields(new)
        return columns

    def _merged(self, table: tq.Table, rows: Sequence[int], tags: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        with table.read(np.asarray(rows, np.int64), fields=()) as found:
            return [{**old, **stored_tags(new)} for old, new in zip(found.tags, tags, strict=True)]

    def _merge_tags(self, table: tq.Table, rows: Sequence[int], tags: Sequence[Mapping[str, Any]]) -> None:
        table.update(np.asarray(rows, np.int64), tags=self._merged(table, rows, tags))

    def _get(self, partition_id: str, rows: Sequence[int], names: Sequence[str] | None) -> TensorDict:
        table = self._existing(partition_id)
        if table is None:
            raise StorageKeyNotFoundError(f"partition {partition_id!r} not found")
        wanted = np.asarray(rows, np.int64)
        try:
            if names is None:
                with table.read(wanted) as found:
                    return tensordict_of(found, found.fields)
            chosen = [name for name in names if name in table.fields]
            with table.read(wanted, fields=chosen) as found:
                return tensordict_of(found, chosen)
        except NotFound as error:
            raise StorageKeyNotFoundError(str(error)) from error

    def _meta(self, table: tq.Table, partition_id: str, rows: np.ndarray[Any, Any]) -> BatchMeta:
        with table.read(rows) as found:
            return BatchMeta(
                global_indexes=rows.tolist(),
                partition_ids=[partition_id] * len(rows),
                field_schema={name: schema_of_field(table.fields[name]) for name in found.fields},
                production_status=np.full(len(rows), READY if found.fields else 0, np.int8),
                custom_meta=[given_tags(tags) for tags in found.tags],
            )


def _twin(name: str) -> Callable[..., Any]:
    async def twin(self: TransferQueueClient, *arguments: Any, **named: Any) -> Any:
        return await asyncio.to_thread(getattr(self, name), *arguments, **named)

    twin.__name__ = twin.__qualname__ = f"async_{name}"
    twin.__doc__ = f"`{name}`, for any event loop."
    return twin


for _name in [name for name, value in vars(TransferQueueClient).items() if callable(value) and name[0] != "_"]:
    if _name != "close":
        setattr(TransferQueueClient, f"async_{_name}", _twin(_name))

AsyncTransferQueueClient = TransferQueueClient


def _keys(keys: list[str] | str) -> list[str]:
    found = [keys] if isinstance(keys, str) else keys
    if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
        raise TypeError(f"keys is {type(keys).__name__}; give a str or a list of str")
    return found


def _all(status: torch.Tensor | None) -> bool:
    return status is not None and status.numel() > 0 and bool((status == 1).all())


def _parsed(data: TensorDict, parser: Parser | None) -> TensorDict:
    """What `parser` makes of the columns, in place: tensors as they are, nested ones and plain values as lists."""
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


def _stacked(parts: Iterable[TensorDict], names: Sequence[str]) -> TensorDict:
    """Samples of several partitions, one after the other."""
    parts = list(parts)
    found: dict[str, Any] = {}
    for name in names:
        values = [part.get(name) for part in parts]
        if isinstance(values[0], torch.Tensor) and not values[0].is_nested:
            found[name] = torch.cat(values)
        elif isinstance(values[0], torch.Tensor):
            rows = [row for value in values for row in value.unbind()]
            found[name] = torch.nested.as_nested_tensor(rows, layout=values[0].layout)
        else:
            found[name] = NonTensorStack(*[row for value in values for row in value.tolist()])
    return TensorDict(found, batch_size=[len(parts)])
