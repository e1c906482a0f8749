"""The questions that are asked of a million rows, of a few: they stand on the page, and a record answers them."""

from __future__ import annotations

from pathlib import Path

import pytest

import transferqueue as tq
from bench.record_queries import GROUP, PROMPTS, QUESTIONS, record
from tests.markdown import ROOT


def test_the_page_shows_the_questions() -> None:
    page = (ROOT / "docs" / "how-to" / "record.md").read_text()
    for question in QUESTIONS.values():
        assert question in page


def test_a_small_record_answers_them(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    record(tmp_path, 3)
    run = tq.open_run(tmp_path)
    assert run.sql("select count(*) as n from rollouts").to_pylist() == [{"n": 3 * PROMPTS * GROUP}]
    made, over_time, dropped = (run.sql(question.replace("300", "2")).to_pylist() for question in QUESTIONS.values())
    assert [row["put_by"] for row in made] == ["generator-0"] * 4
    assert len(over_time[0]["reward_by_quarter"]) == 1
    assert {row["_reason"]: row["error"] for row in dropped} == {"too_long": None, "attempts": "loss is NaN"}
