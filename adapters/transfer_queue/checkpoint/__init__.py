"""Checkpoints: all partitions and their consumption in one directory, as Arrow files and JSON.
`transferqueue docs drop-in` has the layout.

A save writes to a temporary directory and renames it, so a checkpoint is complete or absent. A load first compares
every file with its size and checksum; a damaged or foreign file changes nothing. Nothing is pickled, so loading a
foreign checkpoint runs no code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.adapters.transfer_queue.checkpoint import arrow_samples, checksummed_json
from transferqueue.errors import AlreadyExists, UsageError

CONTROLLER: Final = "controller.json"
_KIND: Final = "transferqueue drop-in checkpoint 1"
_KIND_CONTROLLER: Final = "transferqueue drop-in controller 1"
Ask = Callable[..., Any]


class ControllerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The controller's state: consumed indexes by partition and task, and the sampler's class and state
    (`samples.tags.text_of`)."""

    consumed: dict[str, dict[str, list[int]]]
    sampler: str
    memory: str


class CheckpointMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``metadata.json``: records of the other files, and the user's metadata. `timestamp`: seconds since 1970."""

    storage_saved: bool
    user_metadata: dict[str, Any]
    timestamp: float
    controller: checksummed_json.FileRecord
    storage: checksummed_json.FileRecord


def save_controller(ask: Ask, path: Path) -> checksummed_json.FileRecord:
    """Write the controller's state to a file."""
    return checksummed_json.write(path, _KIND_CONTROLLER, ask("state"))


def load_controller(ask: Ask, path: Path) -> None:
    """Restore the controller's state from a file; entries of samples that do not exist are ignored."""
    ask("restore", msgspec.to_builtins(checksummed_json.read(path, _KIND_CONTROLLER, ControllerState)))


def load_storage(queue: tq.Queue, ask: Ask, parent: Path, rows_max: int) -> None:
    """Replace all partitions by those of a checkpoint."""
    manifest = arrow_samples.verified(parent)
    arrow_samples.admit(manifest, rows_max)
    for name in ask("list_partitions"):
        ask("clear_partition", name)
    arrow_samples.load(queue, manifest, parent, rows_max)


def dump(queue: tq.Queue, have: arrow_samples.Have, path: Path, partition_id: str, rows: arrow_samples.Rows) -> None:
    """Write some samples of a partition to a new directory. `AlreadyExists` if there is one."""
    if path.exists():
        raise AlreadyExists(f"{path} exists, and a dump never changes one; name a new directory")
    arrow_samples.save(queue, have, path, {partition_id: rows})


def load_dump(queue: tq.Queue, path: Path, rows_max: int) -> int:
    """Put the samples of a dump by their keys. Return how many."""
    return arrow_samples.merge(queue, arrow_samples.verified(path), path, rows_max)


def row_index(path: Path) -> dict[str, Any]:
    """The partition, keys and tags of a dump, and the fields of each key."""
    (partition,) = arrow_samples.verified(path).partitions
    return {"partition_id": partition.partition_id, **arrow_samples.keyed_rows(path, partition)}


def about(path: Path, user: Mapping[str, Any] | None) -> None:
    """Write ``metadata.json`` of a checkpoint whose other files exist. Raises `UsageError` if the user's metadata is
    not JSON."""
    metadata = CheckpointMetadata(
        True,
        dict(user or {}),
        time.time(),
        checksummed_json.part(path / CONTROLLER),
        checksummed_json.part(path / arrow_samples.FOLDER / arrow_samples.MANIFEST),
    )
    try:
        content = msgspec.to_builtins(metadata)
        checksummed_json.write(path / checksummed_json.METADATA, _KIND, content)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"metadata {user!r} is not JSON ({error}); give a dict of numbers, text, lists and dicts"
        ) from error


def verify(path: Path, ask: Ask, rows_max: int) -> None:
    """Compare all files of a checkpoint, and check that the controller could load its state. Changes nothing."""
    if not path.is_dir():
        raise FileNotFoundError(f"checkpoint directory {path} not found")
    metadata = checksummed_json.read(path / checksummed_json.METADATA, _KIND, CheckpointMetadata)
    checksummed_json.compare(path / CONTROLLER, metadata.controller)
    checksummed_json.compare(path / arrow_samples.FOLDER / arrow_samples.MANIFEST, metadata.storage)
    ask("check_state", msgspec.to_builtins(checksummed_json.read(path / CONTROLLER, _KIND_CONTROLLER, ControllerState)))
    arrow_samples.admit(arrow_samples.verified(path), rows_max)
