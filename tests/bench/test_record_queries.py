"""The questions that the benchmark asks of a million rows, asked of a few thousand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import transferqueue as tq
from bench.record_queries import DROPPED_OF, GROUP, PROMPTS, QUESTIONS, main, record
from tests.markdown import ROOT

STEPS = 3
ROWS = PROMPTS * GROUP


def test_the_page_shows_the_questions() -> None:
    page = (ROOT / "docs" / "how-to" / "record.md").read_text()
    for name, question in QUESTIONS.items():
        assert f"-- {name}: " in page
        assert question in page


def test_a_small_record_answers_them(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    record(tmp_path, STEPS)
    run = tq.open_run(tmp_path)
    assert run.sql("select count(*) as n from rollouts").to_pylist() == [{"n": STEPS * ROWS}]
    asked = [question.replace("_step = 300", "_step = 2") for question in QUESTIONS.values()]
    of_step, over_time, dropped = (run.sql(question).to_pylist() for question in asked)
    assert [(row["put_by"], row["_version"]) for row in of_step] == [("generator-0", 2)] * 4
    assert [len(row["reward_by_quarter"]) for row in over_time] == [1] * 4
    half = STEPS * ROWS // DROPPED_OF // 2
    assert [(row["_reason"], row["rows"], row["error"]) for row in dropped] == [
        ("attempts", half, "loss is NaN"),
        ("too_long", half, None),
    ]


def test_the_command_prints_questions_and_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.setattr(sys, "argv", ["record_queries", "--steps=1", "--runs=1"])
    main()
    said = capsys.readouterr().out
    for name, question in QUESTIONS.items():
        assert f"-- {name}: " in said
        assert question in said
    assert f"attempts  {ROWS // DROPPED_OF // 2:>4}" in said
