"""The settings of `init` as what the queue is started with. Pure: nothing is started here.

A setting that is given and means nothing here is named in `unused`, with the reason where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from transferqueue.errors import UsageError
from transferqueue.limits import parse_bytes

ROWS_MAX: Final = 1 << 40
"""Samples of a partition where ``total_storage_size`` is null."""
_USED: Final = frozenset({"total_storage_size", "total_storage_bytes", "ssd_offload.enabled", "ssd_offload.path"})
"""Settings of the storage that always mean something."""
_SPREAD: Final = frozenset({"num_data_storage_units", "required_node_resource"})
"""Settings that mean something on several nodes."""
_REASONS: Final = {
    "payload_transfer": "values go by shared memory on a node, and by one TCP stream between nodes",
    "num_data_storage_units": "one node has one shared memory",
    "required_node_resource": "there is one node",
}


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the storage is started with.

    Args:
        rows_max: samples of one partition.
        bytes_max: memory on each node; None: the queue's default.
        is_spread: several Ray nodes share the queue, or its rows may go to a disk: `deploy_ray` starts it.
        shards: memory on other nodes, as of `deploy_ray`.
        resources: Ray resources that the node of the server has.
        spill_dir: for samples that memory does not hold; "": none.
        unused: given settings that mean nothing here, as they are shown to the user.
    """

    rows_max: int
    bytes_max: int | None
    is_spread: bool
    shards: int | Literal["per-node"]
    resources: dict[str, float]
    spill_dir: str
    unused: list[str]


def storage_settings(config: Mapping[str, Any], nodes: int) -> StorageSettings:
    """The storage that a configuration asks for, on a Ray cluster of so many nodes (0: there is no Ray).

    Raises `UsageError` for a setting of a wrong type, and for ``ssd_offload`` without a path or without Ray.
    """
    backend = _mapping("backend", config.get("backend"))
    name = str(backend.get("storage_backend") or "SimpleStorage")
    storage = _mapping(f"backend.{name}", backend.get(name))
    offload = _mapping(f"backend.{name}.ssd_offload", storage.get("ssd_offload"))
    spill_dir = _spill_dir(offload, nodes)
    is_spread = nodes > 1 or bool(spill_dir)
    units, resource = storage.get("num_data_storage_units"), storage.get("required_node_resource")
    size = storage.get("total_storage_bytes")
    return StorageSettings(
        rows_max=int(storage.get("total_storage_size") or ROWS_MAX),
        bytes_max=None if size is None else parse_bytes(size),
        is_spread=is_spread,
        shards="per-node" if units is None or nodes <= 1 else _units(units),
        resources={str(resource): 0.001} if resource and nodes > 1 else {},
        spill_dir=spill_dir,
        unused=list(_unused(config, name, storage, is_spread=nodes > 1, is_spilling=bool(spill_dir))),
    )


def _mapping(name: str, section: Any) -> Mapping[str, Any]:
    if section is not None and not isinstance(section, Mapping):
        raise UsageError(f"setting {name} is {section!r}; give a section of settings")
    return section or {}


def _units(units: Any) -> int:
    if not isinstance(units, int) or units < 1:
        raise UsageError(f"setting num_data_storage_units is {units!r}; give a number from 1, or null: one a node")
    return units


def _spill_dir(offload: Mapping[str, Any], nodes: int) -> str:
    if not offload.get("enabled"):
        return ""
    if not offload.get("path") or not nodes:
        raise UsageError(
            f"setting ssd_offload.enabled is true with path {offload.get('path')!r} on {nodes} Ray nodes; give an "
            "absolute path on a disk, and run on Ray"
        )
    return str(offload["path"])


def _unused(
    config: Mapping[str, Any], name: str, storage: Mapping[str, Any], *, is_spread: bool, is_spilling: bool
) -> Iterator[str]:
    """Name each given setting that means nothing here. Settings that are null, or of another backend, are not given."""
    known = {
        "metrics": {"enabled", "port", "endpoint"},
        "controller": {"sampler", "polling_mode"},
        "lock": {"enabled"},  # locks need no setting
        "backend": set(),
    }
    for section, keys in known.items():
        if section != "backend":
            yield from (f"{section}.{key}" for key in _given(_mapping(section, config.get(section))) if key not in keys)
    yield from (key for key, value in config.items() if key not in known and value is not None)
    if name != "SimpleStorage":
        yield f"backend.storage_backend {name} (this queue stores everything itself)"
    for key in _given(storage):
        if key in _USED or (key in _SPREAD and is_spread) or (key.startswith("ssd_offload.") and not is_spilling):
            continue
        reason = _REASONS.get(key.partition(".")[0])
        yield f"backend.{name}.{key}" + (f" ({reason})" if reason else "")


def _given(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _given(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}"
