"""Tensors in safetensors files (https://github.com/huggingface/safetensors): read in ranges of rows, written one at a
time.

So a process that needs a part of a model never has the whole of it, or of one of its files, in memory. Each rank of a
sharded trainer reads its rows (`TensorFiles`), and writes its files of a checkpoint (`TensorWriter`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from transferqueue.errors import UsageError, listing

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
Spec = tuple[str, tuple[int, ...]]
"""Dtype, by torch's name, and shape."""
_ALIGNED: Final = 8
"""The header ends at a multiple of so many bytes."""


def model_weight_files(directory: Path) -> list[Path]:
    """Return the files with the weights of the model in a directory, as transformers chooses them.

    Args:
        directory: of a model.

    Returns:
        ``model.safetensors``, or the files that its index names; empty if it has neither.
    """
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        return []
    named = json.loads((directory / INDEX).read_bytes())["weight_map"].values()
    return [directory / name for name in sorted(set(named))]


def numbered_file(file: str, number: int, count: int) -> str:
    """Return the name of one of several files that stand for one, as transformers names them.

    Args:
        file: name of the one.
        number: from 0.
        count: of all; 1: the name stays.

    Example:
        >>> numbered_file("model.safetensors", 0, 1), numbered_file("model.safetensors", 1, 4)
        ('model.safetensors', 'model-00002-of-00004.safetensors')
    """
    name, dot, kind = file.rpartition(".")
    return file if count == 1 else f"{name}-{number + 1:05}-of-{count:05}{dot}{kind}"


def write_index(directory: Path, files: Mapping[str, str], nbytes: int) -> None:
    """Write which file has which weight, if they are not all in one.

    Args:
        directory: of the model.
        files: the name of the file of each weight.
        nbytes: of all weights.
    """
    if set(files.values()) - {WEIGHTS}:
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(files)}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class TensorFiles:
    """The tensors of some safetensors files, by name. Only what is asked for is read.

    A tensor may lie in several files: its rows are those of the files, in their order.

    Args:
        files: in any number. They are mapped into memory as long as this object lives.

    Attributes:
        bytes_read: of all ranges that were read.

    Raises:
        OSError: a file that is not there.
        SafetensorError: a file of another kind.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import safe_open

        self._pieces: dict[str, list[Any]] = {}
        self.bytes_read = 0
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                self._pieces.setdefault(name, []).append(opened.get_slice(name))

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""
        return self._pieces.keys()

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of the first tensor with floating numbers; "" if there is none."""
        return next((dtype for dtype in map(self.dtype_of, self._pieces) if "float" in dtype), "")

    def dtype_of(self, name: str) -> str:
        """Return torch's name of the dtype of a tensor.

        Args:
            name: of the tensor.
        """
        stored = self._pieces[name][0].get_dtype()
        return next(own for own, theirs in _DTYPES.items() if theirs == stored)

    def spec(self, name: str, dtype: str = "") -> Spec:
        """Return dtype and shape of a tensor.

        Args:
            name: of the tensor.
            dtype: torch's name of that in which floating tensors are wanted; default "": as they are.
        """
        own = self.dtype_of(name)
        return dtype if dtype and "float" in own else own, self.shape(name)

    def tensor(self, name: str, dtype: str = "") -> Tensor:
        """Return a whole tensor.

        Args:
            name: of the tensor.
            dtype: as of `spec`; default "".
        """
        import torch

        own, shape = self.spec(name, dtype)
        tensor = torch.empty(shape, dtype=getattr(torch, own))
        self.read(name, tensor)
        return tensor

    def slices(self) -> dict[str, Any]:
        """Return safetensors' own slices of tensors that lie in one file each."""
        return {name: pieces[0] for name, pieces in self._pieces.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, all its files together.

        Args:
            name: of the tensor.
        """
        shapes = [tuple(piece.get_shape()) for piece in self._pieces[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()

    def read(self, name: str, into: Tensor, first: int = 0) -> None:
        """Copy rows of a tensor into another one, which may have another dtype and be on another device.

        Args:
            name: of the tensor.
            into: as many rows as are read; all of a tensor without dimensions.
            first: the first row; default 0.
        """
        if not into.ndim:
            into.copy_(self._counted(self._pieces[name][0][...]))
            return
        begin, wanted = 0, (first, first + into.shape[0])
        for piece in self._pieces[name]:
            end = begin + piece.get_shape()[0]
            low, high = max(wanted[0], begin), min(wanted[1], end)
            if low < high:
                into[low - first : high - first].copy_(self._counted(piece[low - begin : high - begin]))
            begin = end

    def piece(self, name: str, number: int) -> Tensor:
        """Return what one file has of a tensor.

        Args:
            name: of the tensor.
            number: of the file among those that have it; of a larger one, the last.
        """
        pieces = self._pieces[name]
        return self._counted(pieces[min(number, len(pieces) - 1)][...])

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes_read += tensor.nbytes
        return tensor


class TensorWriter:
    """Writes one safetensors file, tensor after tensor. A context manager, which closes the file.

    An error of the system is kept, further parts are not written, and `close` raises it: a process that takes parts
    from others goes on taking them.

    Args:
        path: of the file.
        specs: dtype (torch's name, such as ``"float32"``) and shape of each tensor, by name, in the order in which
            `write` gets them.

    Raises:
        UsageError: a dtype that safetensors does not know.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        self._error: OSError | None = None
        self._file: Any = None
        try:
            self._file = path.open("wb")
            self._file.write(_header(specs))
        except OSError as error:
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._error = self._error or error

    def write(self, part: Tensor) -> None:
        """Write a tensor, or its next rows.

        Args:
            part: on any device; whole dimensions but the first.
        """
        if self._error is None:
            try:
                self._file.write(host_bytes(part).numpy().data)
            except OSError as error:
                self._error = error

    def check(self) -> None:
        """Raise the error that kept the file from being written. Call it after the context has ended."""
        if self._error is not None:
            raise self._error


def write_weights(directory: Path, specs: Mapping[str, Spec], tensors: Iterable[Tensor], *, file_bytes: int) -> int:
    """Write tensors as the weights of a model, in files with an index. One is taken at a time.

    Args:
        directory: of the model.
        specs: of all tensors, by name.
        tensors: in the order of `specs`.
        file_bytes: most bytes of a file; one larger tensor is a file of its own.

    Returns:
        The bytes of the tensors.

    Raises:
        OSError: a file cannot be written.
    """
    parts, left = _in_parts(specs, file_bytes), iter(tensors)
    named = {numbered_file(WEIGHTS, number, len(parts)): part for number, part in enumerate(parts)}
    for file, part in named.items():
        with TensorWriter(directory / file, part) as writer:
            for _ in part:
                writer.write(next(left))
        writer.check()
    nbytes = specs_bytes(specs)
    write_index(directory, {name: file for file, part in named.items() for name in part}, nbytes)
    return nbytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one file, with the permissions that any new file gets. The library's `save_file` gives it to its
    owner alone.

    Args:
        path: of the file.
        tensors: by name, on any device.

    Raises:
        OSError: the file cannot be written.
    """
    with TensorWriter(path, {name: (dtype_name(each), tuple(each.shape)) for name, each in tensors.items()}) as writer:
        for tensor in tensors.values():
            writer.write(tensor)
    writer.check()


def specs_bytes(specs: Mapping[str, Spec]) -> int:
    """Return the bytes of tensors of these dtypes and shapes.

    Args:
        specs: by name.
    """
    return sum(map(_spec_bytes, specs.values()))


def _in_parts(specs: Mapping[str, Spec], file_bytes: int) -> list[dict[str, Spec]]:
    parts: list[dict[str, Spec]] = [{}]
    room = file_bytes
    for name, spec in specs.items():
        if parts[-1] and _spec_bytes(spec) > room:
            parts.append({})
            room = file_bytes
        parts[-1][name] = spec
        room -= _spec_bytes(spec)
    return parts


def _spec_bytes(spec: Spec) -> int:
    import torch

    return math.prod(spec[1]) * int(getattr(torch, spec[0]).itemsize)


def host_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in host memory: uint8 ``[nbytes]``. A tensor on the host is not copied.

    Args:
        tensor: on any device.
    """
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def dtype_name(tensor: Tensor) -> str:
    """Return torch's name of the dtype of a tensor.

    Args:
        tensor: a torch tensor.
    """
    return str(tensor.dtype).removeprefix("torch.")


def _header(specs: Mapping[str, Spec]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in specs.items():
        if dtype not in _DTYPES:
            raise UsageError(f'tensor "{name}" is of dtype {dtype}; safetensors files have {listing(_DTYPES)}')
        end = begin + _spec_bytes((dtype, shape))
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
