"""Checkpoints: all partitions and who was given what, in one directory, as Arrow files and JSON. docs/DROP_IN.md has the layout.

A save writes beside the directory and renames, so it is there whole or not at all. A load compares every file with its size and
checksum first: one that is damaged or foreign changes nothing. Nothing is pickled, so a checkpoint of another is only data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

import transferqueue as tq
from transferqueue.adapters.transfer_queue.checkpoint import arrow_samples as stored
from transferqueue.adapters.transfer_queue.checkpoint import checksummed_json as sealed
from transferqueue.errors import UsageError

CONTROLLER: Final = "controller.json"
_KIND: Final = "transferqueue drop-in checkpoint 1"
_KIND_CONTROLLER: Final = "transferqueue drop-in controller 1"
Ask = Callable[..., Any]


class ControllerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the controller keeps: consumed indexes by partition and task, and the sampler's class and memory (`plain.plain`)."""

    consumed: dict[str, dict[str, list[int]]]
    sampler: str
    memory: Any


class CheckpointMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``metadata.json``: what belongs together, and what the user says of it. timestamp: seconds since 1970."""

    storage_saved: bool
    user_metadata: dict[str, Any]
    timestamp: float
    controller: sealed.FileRecord
    storage: sealed.FileRecord


def save_controller(ask: Ask, path: Path) -> sealed.FileRecord:
    """Write what the controller keeps to a file."""
    return sealed.write(path, _KIND_CONTROLLER, ask("state"))


def load_controller(ask: Ask, path: Path) -> None:
    """Let the controller keep what is in a file; of samples that are not there, nothing."""
    ask("restore", msgspec.to_builtins(sealed.read(path, _KIND_CONTROLLER, ControllerState)))


def load_storage(queue: tq.Queue, ask: Ask, parent: Path, rows_max: int) -> None:
    """Make the partitions those of a checkpoint, and no other."""
    manifest = stored.verified(parent)
    stored.admit(manifest, rows_max)
    for name in ask("list_partitions"):
        ask("clear_partition", name)
    stored.load(queue, manifest, parent, rows_max)


def about(path: Path, user: Mapping[str, Any] | None) -> None:
    """Write ``metadata.json`` of a checkpoint whose other files are there. `UsageError` if what the user says is not JSON."""
    metadata = CheckpointMetadata(
        True,
        dict(user or {}),
        time.time(),
        sealed.part(path / CONTROLLER),
        sealed.part(path / stored.FOLDER / stored.MANIFEST),
    )
    try:
        content = msgspec.to_builtins(metadata)
        sealed.write(path / sealed.METADATA, _KIND, content)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"metadata {user!r} is not JSON ({error}); give a dict of numbers, text, lists and dicts"
        ) from error


def verify(path: Path, ask: Ask, rows_max: int) -> None:
    """Compare all files of a checkpoint, and ask the controller whether it could take it. Changes nothing."""
    if not path.is_dir():
        raise FileNotFoundError(f"checkpoint directory {path} not found")
    metadata = sealed.read(path / sealed.METADATA, _KIND, CheckpointMetadata)
    sealed.compare(path / CONTROLLER, metadata.controller)
    sealed.compare(path / stored.FOLDER / stored.MANIFEST, metadata.storage)
    ask("check_state", msgspec.to_builtins(sealed.read(path / CONTROLLER, _KIND_CONTROLLER, ControllerState)))
    stored.admit(stored.verified(path), rows_max)
