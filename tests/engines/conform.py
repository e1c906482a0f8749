"""Checks of a kit as tests, their outcomes kept: ``--conformance DIR`` writes them as records of the matrix."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.engines.matrix import MatrixRecord, save
from transferqueue.testing.conformance.report import CheckOutcome, Verdict, judge

FOUND: dict[tuple[str, str, str], list[CheckOutcome]] = {}


def against(*distributions: str) -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in distributions)


def conform(kind: str, adapter: str, engine: str, check: Callable[[Any], None], subject: Any) -> None:
    """Fail or skip as the check says, and keep what it found."""
    outcome = judge(check, subject)
    FOUND.setdefault((kind, adapter, engine), []).append(outcome)
    if outcome.verdict is Verdict.UNSUPPORTED:
        pytest.skip(outcome.text)
    if outcome.verdict is Verdict.FAILED:
        pytest.fail(outcome.text, pytrace=False)


def write(directory: Path) -> None:
    on = dt.datetime.now(dt.UTC).date().isoformat()
    for (kind, adapter, engine), outcomes in FOUND.items():
        save(MatrixRecord(adapter=adapter, kind=kind, against=engine, on=on, outcomes=tuple(outcomes)), directory)
