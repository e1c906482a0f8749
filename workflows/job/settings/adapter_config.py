"""The description of adapters in the format of peft, which a run may begin with. No torch here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.job.run_files import ADAPTER_CONFIG, ADAPTERS

_CLOSED: Final[dict[str, tuple[Any, ...]]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
}
"""Keys of peft's configuration with the values that leave adapters plain."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a job takes from peft's ``adapter_config.json``. targets: last parts of the names of the layers."""

    rank: int = msgspec.field(name="r")
    alpha: float = msgspec.field(name="lora_alpha")
    targets: list[str] = msgspec.field(name="target_modules")
    peft_type: str = "LORA"


def adapter_config(path: str) -> AdapterConfig:
    """Read the description of the adapters in the directory `path`.

    Raises `NotFound` for a directory without adapters, and `UsageError` for adapters that are no plain ones of low
    rank.
    """
    place = Path(path).expanduser()
    for name in (ADAPTER_CONFIG, ADAPTERS):
        if not (place / name).is_file():
            raise NotFound(
                f"trainer.lora_adapter={path!r} has no {name}; give a directory that peft wrote, or the folder or a "
                "checkpoint step-N of a run with adapters"
            )
    try:
        values = msgspec.json.decode((place / ADAPTER_CONFIG).read_bytes(), type=dict[str, Any])
        config = msgspec.convert(values, AdapterConfig)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"trainer.lora_adapter={path!r}: {ADAPTER_CONFIG} cannot be read: {error}; its target_modules are a list "
            "of names"
        ) from error
    odd = [name for name, plain in _CLOSED.items() if values.get(name, plain[0]) not in plain]
    if config.peft_type != "LORA" or odd:
        raise UsageError(
            f"trainer.lora_adapter={path!r} has {', '.join(odd) or config.peft_type}: trained adapters have one rank, "
            "without further weights; merge it into the model (peft's merge_and_unload), and give that as model.path"
        )
    if config.rank < 1 or not (config.alpha > 0 and math.isfinite(config.alpha)):
        raise UsageError(f"trainer.lora_adapter={path!r} has r={config.rank} and lora_alpha={config.alpha}")
    return config
