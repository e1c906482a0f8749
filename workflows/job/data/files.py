"""Which files a data set consists of, by its path and split.

=============================================  ==================================================================
path                                           files
=============================================  ==================================================================
``org/name``, if there is no such path         none: an id of the hub (`transferqueue.workflows.job.data.hub`)
a file                                         that file; the split is not looked at
a directory that ``datasets`` saved            those that ``state.json`` lists; with ``dataset_dict.json``, those of
                                               the split's directory
any other directory                            files of the split, by their names: ``train.jsonl``,
                                               ``data/train-00000-of-00002.parquet``, ``train/part-0.parquet``; if no
                                               file's name tells a split, all of them are the split ``train``
=============================================  ==================================================================

All files of a data set have one kind. They are read in the order of their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.workflows.job.data.data_rows import (
    DataRows,
    JoinedRows,
    arrow_rows,
    csv_rows,
    json_rows,
    parquet_rows,
)
from transferqueue.workflows.job.data.hub import hub_rows, is_hub_id

FILES_MAX: Final = 16_384
"""Files of one data set: each is opened, and the largest public ones have some thousands."""

_READERS: Final[Mapping[str, Callable[[Path], DataRows]]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
    ".ipc": arrow_rows,
    ".feather": arrow_rows,
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".json": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
}
_KINDS: Final = (
    "Parquet (.parquet), Arrow IPC (.arrow, .ipc, .feather), JSON Lines (.jsonl, .ndjson, .json) and CSV (.csv, .tsv)"
)
ENTRIES_MAX: Final = 100_000
"""Entries of a directory that are looked at, folders below it included: more is not a data set but a disk."""

_SPLITS: Final = ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation")
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names that files give to a split."""
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}")
"""Name of one of several files of a split, as the hub stores them."""
_NO_SPLITS: Final = ("data", "part", "shard", "default")
"""Names of files that tell no split."""
_NOT_DATA: Final = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})


def open_data(path: str | Path, *, split: str = "train", subset: str = "") -> DataRows:
    """Open the rows of a data set; call `DataRows.select` before rows are read. subset: configuration of one that is
    given by an id of the hub.

    Reads Parquet footers and Arrow schemas, JSON Lines once, and CSV whole; an id is loaded, or downloaded first.
    Raises `NotFound` for a path or split that does not exist, and `UsageError` for files of another kind, of several
    kinds, broken ones, and a data set without rows.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory:
    ...     written = Path(directory, "train.jsonl").write_text('{"question": "2+2?", "answer": 4}')
    ...     rows = open_data(directory).select(["question"])
    ...     len(rows), rows.row(0)
    (1, {'question': '2+2?'})
    """
    if is_hub_id(str(path)):
        return hub_rows(str(path), subset=subset, split=split)
    if subset:
        raise UsageError(
            f"data.subset={subset!r} with data.path {path}, which is no id of the hub: give the path of its files, and "
            "leave the subset out"
        )
    files = data_files(Path(path).expanduser(), split)
    opened = [_READERS[file.suffix.lower()](file) for file in files]
    rows = opened[0] if len(opened) == 1 else JoinedRows([rows for rows in opened if len(rows)] or opened[:1])
    if not len(rows):
        raise UsageError(f"data.path {path} has no rows, in {listing(file.name for file in files)}; give at least one")
    return rows


def data_files(path: Path, split: str) -> list[Path]:
    """Return the files of the data set, in the order in which they are read."""
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _of_directory(path, split)
    else:
        raise NotFound(
            f"data.path {path}: there is no such file or directory; a data set of the hub is given by its id, such as "
            '"openai/gsm8k"'
        )
    _check_kind(path, files)
    return files


def _check_kind(path: Path, files: Sequence[Path]) -> None:
    unknown = [file for file in files if file.suffix.lower() not in _READERS]
    if unknown:
        raise UsageError(
            f"data.path {unknown[0]} ends in {unknown[0].suffix or 'nothing'!r}; read are {_KINDS}; convert it, for "
            "example with pyarrow.parquet.write_table"
        )
    kinds = sorted({file.suffix.lower() for file in files})
    if len({_READERS[kind] for kind in kinds}) > 1:
        raise UsageError(f"data.path {path} has files of several kinds: {', '.join(kinds)}; give the path of one kind")
    if len(files) > FILES_MAX:
        raise UsageError(f"data.path {path} has {len(files)} files, over {FILES_MAX}; join them")


# ---------------------------------------------------------------- directories


def _of_directory(path: Path, split: str) -> list[Path]:
    if (path / "state.json").is_file():
        return _saved(path)
    if (path / "dataset_dict.json").is_file():
        return _saved(_saved_split(path, split))
    files = sorted(file for file in _entries(path) if _is_data(file, path))
    if not files:
        names = listing(file.name for file in path.iterdir())
        raise NotFound(f"data.path {path} has no data files; it has {names}; read are {_KINDS}")
    return _of_split(path, files, split)


def _entries(path: Path) -> Iterator[Path]:
    for count, entry in enumerate(path.rglob("*")):
        if count == ENTRIES_MAX:
            raise UsageError(
                f"data.path {path} has over {ENTRIES_MAX} entries; give the path of the data's own directory"
            )
        yield entry


def _is_data(file: Path, root: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    return file.suffix.lower() in _READERS and file.name not in _NOT_DATA and not hidden and file.is_file()


def _of_split(path: Path, files: Sequence[Path], split: str) -> list[Path]:
    by_file = {file: _split_of(file.relative_to(path), split) for file in files}
    if not any(by_file.values()) and split == "train":
        return list(files)
    chosen = [file for file, name in by_file.items() if name in _ALIASES.get(split, (split,))]
    if chosen:
        _check_one_folder(path, chosen, split)
        return chosen
    has = listing({name for name in by_file.values() if name}) if any(by_file.values()) else "no files that name one"
    raise NotFound(f'data.path {path} has no split "{split}": it has {has} ({listing(file.name for file in files)})')


def _check_one_folder(path: Path, files: Sequence[Path], split: str) -> None:
    """Refuse several data sets in one directory, such as ``main/train.parquet`` and ``other/train.parquet``."""
    folders = {file.parent.relative_to(path) for file in files if _named_split(file.name.split(".")[0], split)}
    if len(folders) > 1:
        raise UsageError(
            f'data.path {path} has the split "{split}" in several folders: {listing(folders)}; give the path of one of '
            "them"
        )


def _split_of(file: Path, asked: str) -> str:
    """Return the split that the name of a file, else of one of its folders, tells; "" if none does."""
    parts = (file.name.split(".")[0], *reversed(file.parts[:-1]))
    return next((name for part in parts if (name := _named_split(part, asked))), "")


def _named_split(part: str, asked: str) -> str:
    """Return the split that one name tells: ``train``, ``train-00000-of-00002``, ``gsm8k_test``."""
    part, asked = part.lower(), asked.lower()
    sharded = _SHARD.fullmatch(part)
    part = sharded[1] if sharded else part
    if part == asked:
        return asked
    if sharded and part not in _NO_SPLITS:
        return part
    if part.startswith((f"{asked}-", f"{asked}_")):
        return asked
    words = re.split(r"[-_]", part)
    return next((word for word in (words[0], words[-1]) if word in _SPLITS), "")


# ---------------------------------------------------------------- what datasets.save_to_disk wrote


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files", default_factory=list)
    indices_files: list[_DataFile] | None = msgspec.field(name="_indices_data_files", default=None)


class _Splits(msgspec.Struct):
    splits: list[str]


def _saved(path: Path) -> list[Path]:
    state = _read(path / "state.json", _State)
    if state.indices_files:
        raise UsageError(
            f"data.path {path} was saved with an index over its rows; save it again after flatten_indices()"
        )
    files = [path / _plain_name(path, file.filename) for file in state.data_files]
    for file in files:
        if not file.is_file():
            raise NotFound(f"data.path {path}: its state.json lists {file.name}, which is not there; save it again")
    if not files:
        raise UsageError(f"data.path {path} has no rows: its state.json lists no files")
    return files


def _saved_split(path: Path, split: str) -> Path:
    splits = _read(path / "dataset_dict.json", _Splits).splits
    if split not in splits:
        raise NotFound(f'data.path {path} has no split "{split}"; it has {listing(splits)}')
    return path / _plain_name(path, split)


def _plain_name(path: Path, name: str) -> str:
    if Path(name).name != name:
        raise UsageError(f"data.path {path} lists {name!r}, which is not a name in this directory")
    return name


def _read(path: Path, into: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=into)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is not what datasets.save_to_disk writes: {error}; save the data again") from error
