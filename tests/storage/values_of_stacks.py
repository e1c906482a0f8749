"""Values that stacks for post-training put, by kind, and whether what came back is what was given."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import importlib.util
import pathlib
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import transferqueue as tq


@tq.register_value
@dataclasses.dataclass(frozen=True)
class ToolCall:
    name: str
    scores: Any = None


@tq.register_value
class Role(enum.Enum):
    USER = "user"


@tq.register_value
class Parts(enum.Flag):
    TEXT = 1
    IMAGE = 2


@tq.register_value
class Point(NamedTuple):
    x: int
    y: Any


def image(mode: str, size: tuple[int, int] = (9, 2)) -> Any:
    from PIL import Image

    made = Image.frombytes(mode, size, bytes(range(200))[: len(Image.new(mode, size).tobytes())])
    made.info["dpi"] = (72, 72)
    return made


def palette_image() -> Any:
    from PIL import Image

    made = Image.new("P", (3, 2), 1)
    made.putpalette(bytes(range(12)))
    return made


def batch_feature() -> Any:
    from transformers.feature_extraction_utils import BatchFeature

    return BatchFeature({"pixel_values": torch.ones(2, 3), "image_grid_thw": torch.tensor([[1, 2, 3]])})


ALWAYS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bool": lambda: True,
    "int": lambda: -3,
    "a large int": lambda: 1 << 80,
    "a negative large int": lambda: -(1 << 64),
    "float": lambda: 0.1,
    "complex": lambda: 1 + 2j,
    "str": lambda: "ä",
    "bytes": lambda: b"\x00a",
    "bytearray": lambda: bytearray(b"ab"),
    "list": lambda: [1, "a", None],
    "tuple": lambda: (1, (2, "a")),
    "set": lambda: {1, "a", (2, 3)},
    "frozenset": lambda: frozenset([1, 2]),
    "dict": lambda: {"a": {"b": [1]}},
    "dict with keys of int": lambda: {1: "a", 2: "b"},
    "dict with other keys": lambda: {(1, 2): "a", None: 1, 1.5: 2, True: 3, b"x": 4},
    "dict with a large key": lambda: {1 << 70: 1},
    "OrderedDict": lambda: collections.OrderedDict(b=1, a=2),
    "date": lambda: dt.date(2026, 2, 28),
    "time": lambda: dt.time(1, 2, 3, 4),
    "datetime": lambda: dt.datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001  (without a zone)
    "datetime in UTC": lambda: dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    "datetime in a named offset": lambda: dt.datetime(2026, 1, 2, tzinfo=dt.timezone(dt.timedelta(hours=2), "X")),
    "datetime in a zone": lambda: dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "timedelta": lambda: dt.timedelta(-1, 2, 3),
    "Decimal": lambda: decimal.Decimal("1.50"),
    "UUID": lambda: uuid.UUID(int=7),
    "path": lambda: pathlib.Path("/data/a.png"),
    "ndarray": lambda: np.arange(3, dtype=np.float32),
    "ndarray in a dict": lambda: {"a": np.arange(6).reshape(2, 3).T},
    "big-endian ndarray": lambda: np.arange(3).astype(">i4"),
    "empty ndarray": lambda: np.empty((0, 2)),
    "ndarray of text": lambda: np.array(["ab", "c"]),
    "ndarray of dates": lambda: np.array(["2026-01-01"], "M8[D]"),
    "ndarray of objects": lambda: np.array(["a", None, np.ones(2)], dtype=object),
    "numpy scalar": lambda: np.float32(1.5),
    "numpy text": lambda: np.str_("x"),
    "numpy dtype": lambda: np.dtype("int16"),
    "tensor": lambda: torch.arange(6.0).reshape(2, 3).T,
    "tensor of bf16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "scalar tensor": lambda: torch.tensor(2.5),
    "empty tensor": lambda: torch.empty(0, 3),
    "list of tensors": lambda: [torch.ones(2), torch.zeros(3, dtype=torch.int64)],
    "dict of tensors": lambda: {"pixel_values": torch.ones(2, 3), "image_grid_thw": torch.tensor([[1, 2, 3]])},
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "torch dtype": lambda: torch.bfloat16,
    "torch size": lambda: torch.Size([1, 2]),
    "torch device": lambda: torch.device("cpu"),
    "dataclass": lambda: ToolCall("search", torch.ones(2)),
    "enum": lambda: Role.USER,
    "flag": lambda: Parts.TEXT | Parts.IMAGE,
    "named tuple": lambda: Point(1, np.ones(2)),
}
"""A value of each kind."""
WITH_PILLOW: dict[str, Callable[[], Any]] = {
    **{f"image {mode}": lambda mode=mode: image(mode) for mode in ("RGB", "RGBA", "L", "1", "I", "F", "I;16")},
    "image with a palette": palette_image,
    "list of images": lambda: [image("RGB"), image("L")],
}
WITH_TRANSFORMERS: dict[str, Callable[[], Any]] = {"BatchFeature": batch_feature}


def kinds() -> dict[str, Callable[[], Any]]:
    """Values of all kinds whose libraries are installed here."""
    optional = {"PIL": WITH_PILLOW, "transformers": WITH_TRANSFORMERS}
    installed = [made for module, made in optional.items() if importlib.util.find_spec(module)]
    return {**ALWAYS, **{name: make for made in installed for name, make in made.items()}}


def same(given: Any, found: Any) -> bool:
    """Whether types and values are the same, also inside."""
    if type(given) is not type(found):
        return False
    if isinstance(given, np.ndarray | np.generic):
        return given.dtype == found.dtype and given.shape == found.shape and _same_items(given, found)
    if isinstance(given, torch.Tensor):
        return _same_tensors(given, found)
    if dataclasses.is_dataclass(given):
        return same(vars(given), vars(found))
    if isinstance(given, collections.abc.Mapping):
        return _same_items(list(given.items()), list(found.items()))
    if isinstance(given, list | tuple):
        return _same_items(given, found)
    if isinstance(given, dt.datetime | dt.time):
        return given == found and (given.fold, str(given.tzinfo)) == (found.fold, str(found.tzinfo))
    return bool(given == found)


def _same_items(given: Any, found: Any) -> bool:
    if isinstance(given, np.ndarray | np.generic):
        if not given.dtype.hasobject:
            return given.tobytes() == found.tobytes()
        given, found = given.reshape(-1).tolist(), found.reshape(-1).tolist()
    return len(given) == len(found) and all(same(one, other) for one, other in zip(given, found, strict=True))


def _same_tensors(given: torch.Tensor, found: torch.Tensor) -> bool:
    if given.is_nested:
        return given.layout == found.layout and all(map(_same_tensors, given.unbind(), found.unbind()))
    return given.dtype == found.dtype and given.shape == found.shape and torch.equal(given, found)
