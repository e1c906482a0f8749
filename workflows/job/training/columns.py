"""Columns of leased rows as tensors that losses read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transferqueue.errors import UsageError
from transferqueue.workflows.job.settings.job import AlgorithmSettings

RowColumns = Mapping[str, Sequence[Any]]
"""Columns of R rows by name, one value a row: arrays ``[T]`` or ``[T, k]`` of numbers, or single numbers and texts."""
_PER_TOKEN = {
    "rollout_logprobs": "rollout_logprobs_N",
    "prox_logprobs": "old_logprobs_N",
    "ref_logprobs": "ref_logprobs_N",
    "values": "old_values_N",
    "returns": "returns_N",
    "token_advantages": "advantages_N",
}
"""Columns with one float for each response token, and their names in the losses."""
TRUNCATED = "length"
"""The finish reason of a response that reached its longest length."""


def rows_of(columns: RowColumns) -> int:
    """Return the number of rows; `UsageError` if the columns do not have one each."""
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) != 1:
        raise UsageError(f"columns have {counts} rows; give each one value a row")
    return next(iter(counts.values()))


def select(columns: RowColumns, rows: Sequence[int]) -> dict[str, list[Any]]:
    """Return these rows of the columns, in this order."""
    return {name: [column[row] for row in rows] for name, column in columns.items()}


def joined(parts: Sequence[RowColumns]) -> dict[str, list[Any]]:
    """Return the rows of all parts, part after part."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def lengths(columns: RowColumns) -> list[int]:
    """Return the number of prompt and response tokens of each row."""
    pairs = zip(columns["prompt_ids"], columns["response_ids"], strict=True)
    return [len(prompt) + len(response) for prompt, response in pairs]


def stale_tokens(columns: RowColumns, algorithm: AlgorithmSettings, version: int) -> NDArray[np.bool_] | None:
    """Return which response tokens older weights drew than the algorithm allows in the loss of a step, ``[N]``; None if
    it allows all. version: of the weights before the step. Tokens whose version is not known (-1) are none of them."""
    oldest = version - algorithm.token_staleness.mask
    if not algorithm.token_staleness.mask or "token_versions" not in columns:
        return None
    counts = [len(response) for response in columns["response_ids"]]
    _check(columns["token_versions"], counts, "token_versions")
    versions_N = np.concatenate([np.asarray(row) for row in columns["token_versions"]])
    return (versions_N >= 0) & (versions_N < oldest)


def loss_columns(
    columns: RowColumns,
    algorithm: AlgorithmSettings,
    device: torch.device,
    stale_N: NDArray[np.bool_] | None = None,
) -> dict[str, Tensor]:
    """Return what `Responses` takes beside the log-probs: mask, offsets, and every column of `columns` that a loss
    reads.

    Tokens are masked where ``loss_mask`` is False, with ``mask_truncated`` in rows whose ``finish_reason`` is
    ``length``, and where ``stale_N`` is True (`stale_tokens`). `UsageError` for a column whose row has another
    number of values than its response.
    """
    counts = [len(response) for response in columns["response_ids"]]
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    tensors = {
        "offsets_R1": torch.from_numpy(offsets).to(device),
        "mask_N": _mask(columns, counts, algorithm, stale_N).to(device),
    }
    for name, tensor in _PER_TOKEN.items():
        if name in columns:
            tensors[tensor] = _flat(name, columns[name], counts).to(device)
    if "advantages" in columns:
        advantages_R = np.asarray(columns["advantages"], np.float32)
        tensors["advantages_N"] = torch.from_numpy(np.repeat(advantages_R, counts)).to(device)
    if "teacher_logprobs" in columns:
        tensors["teacher_logprobs_NK"] = _flat("teacher_logprobs", columns["teacher_logprobs"], counts).to(device)
    return tensors


def _mask(
    columns: RowColumns, counts: Sequence[int], algorithm: AlgorithmSettings, stale_N: NDArray[np.bool_] | None
) -> Tensor:
    masks = columns.get("loss_mask") or [np.ones(count, bool) for count in counts]
    _check(masks, counts, "loss_mask")
    if algorithm.mask_truncated and "finish_reason" in columns:
        masks = [
            np.asarray(mask) & (why != TRUNCATED) for mask, why in zip(masks, columns["finish_reason"], strict=True)
        ]
    mask_N = np.concatenate([np.asarray(mask, bool) for mask in masks])
    return torch.from_numpy(mask_N if stale_N is None else mask_N & ~stale_N)


def _flat(name: str, column: Sequence[Any], counts: Sequence[int]) -> Tensor:
    _check(column, counts, name)
    return torch.from_numpy(np.concatenate([np.asarray(value, np.float32) for value in column]))


def _check(column: Sequence[Any], counts: Sequence[int], name: str) -> None:
    for row, (value, count) in enumerate(zip(column, counts, strict=True)):
        if len(value) != count:
            raise UsageError(f"{name} of row {row} has {len(value)} values, its response {count} tokens")
