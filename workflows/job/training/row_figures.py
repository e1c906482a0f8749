"""Figures of the rows of a step: rewards and their spread, each reward term, lengths, cut responses, staleness.

`transferqueue.workflows.job.run.figures` describes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.workflows.job.names import REWARD_TERMS
from transferqueue.workflows.job.training.columns import TRUNCATED

Floats = npt.NDArray[np.float64]


def row_figures(batches: Sequence[tq.Batch], terms: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the rows of these batches; only those whose columns they have. terms: names of the rewards,
    in the order of the column `REWARD_TERMS`."""
    fields = set(batches[0].fields)
    lengths_B = np.array([len(ids) for ids in _column(batches, "response_ids")])
    figures: dict[str, Any] = {
        "rows": len(lengths_B),
        **_staleness(batches),
        "length_mean": float(lengths_B.mean()),
        "length_p50": float(np.percentile(lengths_B, 50)),
        "length_p95": float(np.percentile(lengths_B, 95)),
        "length_max": int(lengths_B.max()),
    }
    if "finish_reason" in fields:
        figures["truncated"] = float(np.mean([why == TRUNCATED for why in _column(batches, "finish_reason")]))
    if "rewards" in fields:
        rewards_B = np.concatenate([batch["rewards"].numpy() for batch in batches]).astype(np.float64)
        figures |= _spread("reward", "", rewards_B)
        figures |= _group_figures(rewards_B, np.concatenate([batch.group_id for batch in batches]))
    if REWARD_TERMS in fields and terms:
        for name, scores_B in zip(terms, np.stack(list(_column(batches, REWARD_TERMS)), axis=1), strict=True):
            applies_B = ~np.isnan(scores_B)
            figures |= _spread("reward", f"/{name}", scores_B[applies_B].astype(np.float64))
            if not applies_B.all():
                figures[f"reward_share/{name}"] = float(applies_B.mean())
    return figures


def again_figures(batches: Sequence[tq.Batch]) -> dict[str, Any]:
    """Return how many rows of a step earlier steps have trained, and their staleness."""
    behind_B = _behind((batch.version, batch.policy_version) for batch in batches) if batches else np.empty(0, np.int64)
    return {"reused_rows": sum(map(len, batches)), "reused_staleness": _counts(behind_B)}


def _column(batches: Sequence[tq.Batch], name: str) -> Iterator[Any]:
    return (value for batch in batches for value in batch[name])


def _staleness(batches: Sequence[tq.Batch]) -> dict[str, Any]:
    """Versions behind the table's clock, by rows and by tokens; nothing of rows and tokens that no policy drew."""
    behind_B = _behind((batch.version, batch.policy_version) for batch in batches)
    if not behind_B.size:
        return {}
    figures: dict[str, Any] = {"staleness": _counts(behind_B), "staleness_mean": float(behind_B.mean())}
    if "token_versions" in batches[0].fields:
        behind_N = _behind((batch.version, row_T) for batch in batches for row_T in batch["token_versions"])
        figures["token_staleness"] = _counts(behind_N)
    return figures


def _behind(versions: Iterable[tuple[int, Any]]) -> npt.NDArray[np.int64]:
    """How far each drawn version is behind its clock. versions: a clock, and versions (-1: not drawn)."""
    pairs = [(clock, np.asarray(drawn)) for clock, drawn in versions]
    return np.concatenate([np.maximum(0, clock - drawn[drawn >= 0]) for clock, drawn in pairs])


def _counts(behind: npt.NDArray[np.int64]) -> dict[str, int]:
    return {str(versions): count for versions, count in sorted(Counter(behind.tolist()).items())}


def _spread(name: str, part: str, values: Floats) -> dict[str, float]:
    """Mean and deviation; nothing of no values. The deviation of equal values is 0, without rounding."""
    if not values.size:
        return {}
    equal = values.min() == values.max()
    return {f"{name}{part}": float(values.mean()), f"{name}_std{part}": 0.0 if equal else float(values.std())}


def _group_figures(rewards_B: Floats, group_B: npt.NDArray[np.int64]) -> dict[str, float]:
    """The spread within groups of several rows; nothing where there are none."""
    order = np.argsort(group_B, kind="stable")
    _, starts, sizes = np.unique(group_B[order], return_index=True, return_counts=True)
    groups = [rewards_B[order[start : start + size]] for start, size in zip(starts, sizes, strict=True) if size > 1]
    if not groups:
        return {}
    return {
        "groups": len(groups),
        "group_std": float(np.mean([group.std() for group in groups])),
        "equal_groups": float(np.mean([group.min() == group.max() for group in groups])),
    }
