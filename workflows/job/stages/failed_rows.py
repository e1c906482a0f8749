"""Reports rows whose reward or environment failed: those that are dropped, and episodes that are tried again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job.reward_terms.environment_call import CAUSES
from transferqueue.workflows.job.reward_terms.scorer import DROPPED

FAILED_ROWS: Final = "failed_rows"
"""Kind of the event that names such rows: ``rows``, each with its id (``row``), the drop reason (``cause``) and the
failure (``text``)."""

FAILURES: Final = frozenset((*CAUSES, DROPPED))
"""Drop reasons of rows whose reward or environment failed; of several environments, a name follows after a slash."""

RETRIED: Final = "retried"
"""Kind of the event that counts episodes that are tried again, by cause."""


def report_failed(context: Context, failures: Mapping[int, str], cause: str) -> None:
    """Report rows. failures: why, by row id. cause: their drop reason."""
    context.figures(FAILED_ROWS, rows=[{"row": row, "cause": cause, "text": text} for row, text in failures.items()])


def report_retried(context: Context, cause: str) -> None:
    """Report an episode that failed, and is tried again."""
    context.figures(RETRIED, **{cause: 1})
