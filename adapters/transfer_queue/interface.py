"""The functions that ``import transfer_queue`` provides. Each has an ``async_`` twin for any event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tensordict import TensorDict

from transferqueue.adapters.transfer_queue import checkpoint, deployment, locks
from transferqueue.adapters.transfer_queue.checkpoint import checksummed_json
from transferqueue.adapters.transfer_queue.client import Parser, TransferQueueClient, _keys, _parsed
from transferqueue.adapters.transfer_queue.metadata import KVBatchMeta
from transferqueue.adapters.transfer_queue.samples.columns import single
from transferqueue.adapters.transfer_queue.samples.merging import MergeFunction

Tags = dict[str, Any]
T = TypeVar("T")
P = ParamSpec("P")


def init(conf: Any = None) -> Any:
    """Start the service, or attach this process to a running one (`conf` is then ignored).

    `conf` is an ``OmegaConf`` or a dict, merged over ``config.yaml``. Returns the merged configuration.
    """
    from omegaconf import OmegaConf

    config = deployment.start(conf).config
    return OmegaConf.create(config, flags={"allow_objects": True})


def close() -> None:
    """Detach this process; in the process that started the service, end it. Does nothing if not started."""
    deployment.stop()


def get_client() -> TransferQueueClient:
    """The client of this process."""
    return deployment.current().client


def get_metrics_endpoint() -> str | None:
    """``host:port`` of the Prometheus endpoint; None while metrics are disabled."""
    endpoint = (deployment.current().config.get("metrics") or {}).get("endpoint")
    return None if endpoint is None else str(endpoint)


async def _kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | Mapping[str, Any] | None = None,
    tag: Tags | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Write fields and merge the tag of one sample. Values of a dict get a batch dimension."""
    if fields is None and tag is None:
        raise ValueError("kv_put needs fields or tag; both are missing")
    return await _kv_batch_put(
        [key], partition_id, None if fields is None else single(fields), None if tag is None else [tag], data_parser
    )


async def _kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[Tags] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Write fields and merge tags of samples by key. The result has all fields and tags that they have now."""
    keys = _keys(keys)
    if fields is None and not tags:
        raise ValueError("kv_batch_put needs fields or tags; both are missing")
    if fields is not None and tuple(fields.batch_size[:1]) != (len(keys),):
        raise ValueError(f"fields have batch size {tuple(fields.batch_size)} for {len(keys)} keys")
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"{len(tags)} tags for {len(keys)} keys: give one for each")
    data = None if fields is None else _parsed(fields, data_parser)
    fields_now, tags_now = await get_client().steps.kv_put(keys, partition_id, data, tags)
    return KVBatchMeta(keys=keys, tags=tags_now, partition_id=partition_id, fields=fields_now)


async def _kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: Sequence[str] | str | None = None
) -> TensorDict:
    """Read fields of samples by key: all that each has, or those selected; unknown ones are ignored."""
    return await get_client().steps.kv_get(_keys(keys), partition_id, _names(select_fields))


async def _kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None) -> TensorDict:
    """Read fields of the samples that a put returned. ``ValueError`` for a selected field that is not in `meta`."""
    names = _names(select_fields)
    unknown = [name for name in names or () if name not in (meta.fields or ())]
    if unknown:
        raise ValueError(f"select_fields {unknown} not found in the fields of the metadata, {meta.fields}")
    if meta.partition_id is None:
        raise ValueError("the metadata names no partition")
    return await get_client().steps.kv_get(meta.keys, meta.partition_id, meta.fields if names is None else names)


async def _kv_update(
    key: str, partition_id: str, fields: TensorDict | Mapping[str, Any], merge_fn: MergeFunction
) -> KVBatchMeta:
    """Set each of these fields of one sample to ``merge_fn(old, new)``, as `kv_batch_update`. Values of a dict get a
    batch dimension."""
    if not isinstance(fields, TensorDict | Mapping):
        raise TypeError(f"fields is {type(fields).__name__}; give the new values by field")
    _check_names(fields)
    return await _kv_batch_update([key], partition_id, single(fields), merge_fn)


async def _kv_batch_update(
    keys: list[str] | str, partition_id: str, fields: TensorDict, merge_fn: MergeFunction
) -> KVBatchMeta:
    """Set each of these fields of samples by key to ``merge_fn(old, new)``, in one commit. The result names all fields
    that they have.

    `merge_fn` gets one sample's old value and the new one, and returns the value to be stored: a tensor of the same
    dtype, or for other fields a plain value. It runs in this process, again if another writer changed one of the values
    meanwhile, so it should depend on its arguments alone. Its exceptions pass through.

    Raises ``ValueError`` for keys, fields or a partition that do not exist, ``TypeError`` for a result of another type,
    ``TimeoutError`` if others write the same values for a minute. Nothing is changed then.
    """
    keys = _keys(keys)
    if not isinstance(fields, TensorDict):
        raise TypeError(f"fields is {type(fields).__name__}; give a TensorDict with the new values")
    if not callable(merge_fn):
        raise TypeError(f"merge_fn is {type(merge_fn).__name__}; give a function of the old value and the new one")
    _check_names(fields)
    if tuple(fields.batch_size[:1]) != (len(keys),):
        raise ValueError(f"fields have batch size {tuple(fields.batch_size)} for {len(keys)} keys")
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"keys {keys[:5]} are none, or one of them is named twice; name each once")
    fields_now = await get_client().steps.kv_update(keys, partition_id, fields, merge_fn)
    return KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id=partition_id, fields=fields_now)


async def _kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return keys and their tags, by partition."""
    return await get_client().steps.kv_list(partition_id)


async def _kv_clear(keys: list[str] | str, partition_id: str, fields: Sequence[str] | str | None = None) -> None:
    """Delete samples by key, or only these fields of them: the keys, their tags and other fields stay, and a field may
    be put again.

    Keys, fields and partitions that do not exist are ignored. ``TypeError`` if `fields` are not names, ``ValueError``
    if there are none.
    """
    names = _names(fields)
    if names is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(f"fields is {fields!r}; give a str or a list of str, or None to delete the samples")
    if names == []:
        raise ValueError(
            "fields is empty, so nothing would be cleared; name fields, or give None to delete the samples"
        )
    await get_client().steps.kv_clear(_keys(keys), partition_id, names)


def kv_local_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None
) -> AbstractContextManager[locks.KeyLock]:
    """Hold keys among the threads and tasks of this process, in a ``with`` block. No call checks it.

    Blocks until all keys are free, for `timeout` seconds at most (None: without limit), then ``TimeoutError``.
    ``RuntimeError`` in an event loop, or inside another local lock.
    """
    return locks.locked(get_client().queue, locks.LOCAL, keys, partition_id, timeout, locks.LEASE_S)


def kv_global_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None, lease_s: float = locks.LEASE_S
) -> AbstractContextManager[locks.KeyLock]:
    """`kv_local_lock` among all processes of the service. Its value has ``check()``, which raises `LockLostError` if
    the lock is lost, as after a stop of this process for `lease_s` seconds."""
    return locks.locked(get_client().queue, locks.GLOBAL, keys, partition_id, timeout, lease_s)


def async_kv_local_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None
) -> AbstractAsyncContextManager[locks.KeyLock]:
    """`kv_local_lock`, for any event loop, in an ``async with`` block."""
    return locks.async_locked(get_client().async_queue, locks.LOCAL, keys, partition_id, timeout, locks.LEASE_S)


def async_kv_global_lock(
    keys: list[str] | str, partition_id: str, timeout: float | None = None, lease_s: float = locks.LEASE_S
) -> AbstractAsyncContextManager[locks.KeyLock]:
    """`kv_global_lock`, for any event loop, in an ``async with`` block."""
    return locks.async_locked(get_client().async_queue, locks.GLOBAL, keys, partition_id, timeout, lease_s)


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write all partitions and the consumption state to a directory on this process's machine; replaces an earlier
    checkpoint.

    `metadata` is JSON, kept as ``user_metadata`` of ``metadata.json``. `include_storage` is ignored, as documented for
    storage in memory. Blocks until the files are on disk; the directory is complete or absent. Raises `UsageError` if
    `checkpoint_dir` is something else, or if the metadata or a sampler's memory is not JSON.
    """
    client = get_client()
    with checksummed_json.directory(Path(checkpoint_dir).absolute(), checksummed_json.METADATA) as path:
        # In this order samples handed out meanwhile are handed out again after a load, not lost.
        client.save_controller_checkpoint(path / checkpoint.CONTROLLER)
        client.save_storage_checkpoint(path)
        checkpoint.about(path, metadata)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Restore the state that `save_checkpoint` wrote: indexes, keys, tags, fields, consumption.

    Call it while no other process writes. ``FileNotFoundError`` for a missing directory, `Corruption` for a changed
    file, `UsageError` for a directory of another program, another sampler or more samples than fit; nothing is changed
    then.
    """
    client, path = get_client(), Path(checkpoint_dir)
    client.verify_checkpoint(path)
    client.load_storage_checkpoint(path)
    client.load_controller_checkpoint(path / checkpoint.CONTROLLER)


def dump_data_by_key(dump_dir: str | Path, keys: list[str] | str, partition_id: str) -> None:
    """Write the samples of these keys, their fields and tags, to a new directory on this process's machine.

    Consumption is not written. Pause writers of these keys meanwhile. `AlreadyExists` for a directory that is there,
    ``ValueError`` for keys or a partition that are not.
    """
    get_client().dump(Path(dump_dir).absolute(), _keys(keys), partition_id)


def load_data_by_key(dump_dir: str | Path) -> dict[str, Any]:
    """Put the samples of a dump by their keys, as `kv_batch_put` does: other samples, fields and tags stay, and new
    keys get new indexes. Return ``partition_id`` and the number of ``keys``.

    `Corruption` for a changed file, `SchemaError` for a field that the partition has with another type; nothing is
    put then.
    """
    index = checkpoint.row_index(Path(dump_dir))
    return {"partition_id": index["partition_id"], "keys": get_client().load_dump(Path(dump_dir))}


def read_row_index(dump_dir: str | Path) -> dict[str, Any]:
    """The ``partition_id`` of a dump, its ``keys``, their ``tags``, and ``fields`` by key. Needs no running service."""
    return checkpoint.row_index(Path(dump_dir))


def _check_names(fields: TensorDict | Mapping[str, Any]) -> None:
    names = list(fields.keys())
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"fields has the names {names}; give at least one, each a str")


def _names(names: Sequence[str] | str | None) -> list[str] | None:
    return [names] if isinstance(names, str) else None if names is None else list(names)


def _calls(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> tuple[Callable[P, T], Callable[P, Coroutine[Any, Any, T]]]:
    """The call for threads, and its twin for event loops."""

    def call(*arguments: P.args, **named: P.kwargs) -> T:
        return get_client().run(function(*arguments, **named))

    async def twin(*arguments: P.args, **named: P.kwargs) -> T:
        return await get_client().arun(function(*arguments, **named))

    for one in (call, twin):
        wraps(function)(one)
        one.__name__ = one.__qualname__ = function.__name__[1:]
    twin.__name__ = twin.__qualname__ = f"async{function.__name__}"
    twin.__doc__ = f"`{call.__name__}`, for any event loop."
    return call, twin


kv_put, async_kv_put = _calls(_kv_put)
kv_batch_put, async_kv_batch_put = _calls(_kv_batch_put)
kv_batch_get, async_kv_batch_get = _calls(_kv_batch_get)
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _calls(_kv_batch_get_by_meta)
kv_update, async_kv_update = _calls(_kv_update)
kv_batch_update, async_kv_batch_update = _calls(_kv_batch_update)
kv_list, async_kv_list = _calls(_kv_list)
kv_clear, async_kv_clear = _calls(_kv_clear)
