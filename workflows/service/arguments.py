"""Arguments of the service's calls, checked: prompts and their samples, columns, facts, notices."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.client.operations.row_metadata import GivenFacts
from transferqueue.errors import SchemaError, UsageError, listing
from transferqueue.limits import TEXT_CHARS_MAX

NOTICE: Final = "notice"
"""Name of the tensor that carries a version's notice, as the bytes of its JSON."""
_GROUP_BITS: Final = 52
"""Group ids start at a random number, so that putting processes need not agree; they stay exact as float64."""
FACTS: Final = frozenset(GivenFacts.__struct_fields__)
_SAID: Final = FACTS | {"self", "rows", "overwrite", "reservation", "timeout_s", "step", "failed", "reason"}
"""Parameters of the queue's calls, which therefore cannot be column names."""


def check_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `facts`. Raises `UsageError` for names that are no facts: the queue would take them for columns."""
    unknown = facts.keys() - FACTS
    if unknown:
        raise UsageError(f"fact {listing(unknown)} is unknown; known are {', '.join(sorted(FACTS))}")
    return facts


def check_columns(columns: object) -> Mapping[str, Any]:
    """Return `columns`. Raises `UsageError` for names that are facts or options."""
    if not isinstance(columns, Mapping):
        raise UsageError(f"columns are {type(columns).__name__}; give a dict of names and columns")
    reserved = _SAID & columns.keys()
    if reserved:
        raise UsageError(f"column {listing(reserved)} is named as a fact of rows or as an option; give facts")
    return columns


class PromptBatch:
    """The rows of one call of `put_prompts_data`: `rows` of them, with columns and facts."""

    def __init__(self, columns: Mapping[str, Any], samples: int, facts: Mapping[str, Any]) -> None:
        if not isinstance(samples, int) or samples < 1:
            raise UsageError(f"samples={samples!r} is not a positive number of rows for each prompt")
        if not check_columns(columns):
            raise UsageError("prompts without a column: give at least one, such as prompt_ids")
        prompts = _count(columns)
        self.rows = prompts * samples
        self.asked: dict[str, Any] = {
            name: tq.Repeat(column, samples) if samples > 1 else column for name, column in columns.items()
        }
        self.asked |= {name: _spread(name, fact, prompts, samples) for name, fact in check_facts(facts).items()}
        if samples > 1:
            self.asked.setdefault("group_id", np.repeat(_new_groups(prompts), samples))
            self.asked.setdefault("group_size", samples)


def _count(columns: Mapping[str, Any]) -> int:
    for name, column in columns.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise SchemaError(f'field "{name}" is a single value; give a list with one value for each prompt')
    counts = {len(column) for column in columns.values()}
    if len(counts) > 1 or 0 in counts:
        raise SchemaError(
            f"columns of {listing(counts)} prompts; give each column one value for each prompt, at least one"
        )
    return counts.pop()


def _spread(name: str, fact: Any, prompts: int, samples: int) -> Any:
    """Turn a fact of each prompt into one of each row; keys of a prompt's rows get the suffixes ``/0``, ``/1`` and so
    on.
    """
    if isinstance(fact, str | Mapping) or not isinstance(fact, Sequence | np.ndarray) or samples == 1:
        return fact
    if len(fact) != prompts:
        raise SchemaError(f"{name} has {len(fact)} values for {prompts} prompts; give one for each, or one for all")
    if name == "key":
        return [f"{key}/{sample}" for key in fact for sample in range(samples)]
    return [value for value in fact for _ in range(samples)]


def _new_groups(prompts: int) -> NDArray[np.int64]:
    return secrets.randbits(_GROUP_BITS) + np.arange(prompts, dtype=np.int64)


def announcement(tensors: Mapping[str, Any] | None, notice: Any) -> Mapping[str, Any]:
    """Return the tensors to publish as a version: `tensors`, and the notice, if there is one or nothing else."""
    tensors = tensors or {}
    if NOTICE in tensors:
        raise UsageError(f'tensor "{NOTICE}" is named as the notice that travels with a version; name it otherwise')
    if tensors and notice is None:
        return tensors
    try:
        text = msgspec.json.encode(notice)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the notice cannot be JSON: {error}; give text, numbers, lists and dicts") from error
    if len(text) > TEXT_CHARS_MAX:
        raise UsageError(f"the notice has {len(text)} bytes of JSON; at most {TEXT_CHARS_MAX}: tell where to find more")
    return {**tensors, NOTICE: np.frombuffer(text, np.uint8)}


def notice_of(weights: tq.Weights) -> Any:
    """Return the notice of a version; None if it was published without one.

    Args:
        weights: of `Service.get_weights`.
    """
    notice = weights.numpy().get(NOTICE)
    return None if notice is None else msgspec.json.decode(notice.tobytes())
