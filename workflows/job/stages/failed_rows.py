"""Reports rows that are dropped because their reward or environment failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transferqueue.workflows.flow.stage import Context

FAILED_ROWS: Final = "failed_rows"
"""Kind of the event that names such rows: ``rows``, each with its id (``row``) and the failure (``text``)."""


def report_failed(context: Context, failures: Mapping[int, str]) -> None:
    """Report rows. failures: why, by row id."""
    context.figures(FAILED_ROWS, rows=[{"row": row, "text": text} for row, text in failures.items()])
