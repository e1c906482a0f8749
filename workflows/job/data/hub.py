"""Rows of a data set that an id of the hub names, by the library ``datasets``, from its cache; downloaded if need
be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.workflows.job.data.data_rows import ArrowRows

_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_VERSION_MIN: Final = 4
"""First version of ``datasets`` that runs no code which comes with a data set."""
_INSTALL: Final = 'pip install "datasets>=4"'


def is_hub_id(path: str) -> bool:
    """Whether `path` is an id, and no path: it has two parts, and the first is no directory here.

    >>> is_hub_id("openai/gsm8k"), is_hub_id("./openai/gsm8k"), is_hub_id("prompts.jsonl")
    (True, False, False)
    """
    return bool(_ID.fullmatch(path)) and not Path(path).parent.is_dir()


def hub_rows(name: str, *, subset: str, split: str) -> ArrowRows:
    """Return the rows of one split, memory-mapped. Blocks while files are downloaded.

    Raises `UsageError` without the library, and for an id whose configuration is open; `NotFound` for an id, a
    configuration or a split that neither the hub nor the cache has.
    """
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"data.path {name} is no path here, and an id of the hub needs the library datasets: {_INSTALL}; or give "
            "the path of downloaded files"
        ) from error
    if int(datasets.__version__.split(".")[0]) < _VERSION_MIN:
        raise UsageError(
            f"data.path {name}: datasets {datasets.__version__} may run code of a data set; {_INSTALL} --upgrade"
        )
    try:
        loaded = datasets.load_dataset(name, subset or None, split=split)
    except ValueError as error:  # the configuration or the split
        raise UsageError(f"data.path {name}: {_first_line(error)}; set data.subset and data.split") from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise NotFound(
            f"data.path {name}: there is no such path here, and no data set that the hub or the local cache gives: "
            f"{_first_line(error)}; download it where there is a network, or give the path of its files"
        ) from error
    if not len(loaded):
        raise UsageError(f"data.path {name} has no rows in its split {split!r}; give another")
    table = loaded.data.table
    return ArrowRows(Path(name), table.schema, table.to_batches())


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return listing(lines[:1]) if lines else type(error).__name__
