"""The ``config.json`` of a model that is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from transferqueue.errors import UsageError


def model_config(model: str) -> dict[str, Any] | None:
    """Return the configuration of a model: of a directory, or of an id in the local cache of the hub. None: it is not
    on this machine.

    Raises:
        UsageError: the file is no JSON object.
    """
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        file = _cached(model)
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError) as error:
        raise UsageError(f"{file}: not the configuration of a model: {error}") from error


def _cached(model: str) -> Path:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path
        cached = None
    return Path(cached) if isinstance(cached, str) else Path()
