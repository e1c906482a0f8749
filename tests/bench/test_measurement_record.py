"""Records of measurements: what their results hold, what is refused, and how they look in a file."""

import json
from pathlib import Path

import pytest

from bench.measurement_record import (
    RECORD_BYTES_MAX,
    MeasuredResult,
    Measurement,
    load_record,
    single,
    summarize,
)


def test_a_result_has_median_and_percentiles_with_three_digits() -> None:
    samples = [float(number) for number in range(1, 102)]
    assert summarize("put", "s", [sample / 81 for sample in samples]) == MeasuredResult(
        "put", "s", 101, 0.63, 0.136, 1.12
    )
    assert summarize("rows", "count", [10_176]) == MeasuredResult("rows", "count", 1, 10_176, 10_176, 10_176)
    assert single("share", "ratio", 2 / 3) == MeasuredResult("share", "ratio", 1, 0.667, 0.667, 0.667)
    with pytest.raises(ValueError, match="put: there are no samples"):
        summarize("put", "s", [])


def test_a_record_comes_back_as_it_was_and_says_where_it_was_made(tmp_path: Path) -> None:
    record = Measurement().record("kind", [single("put", "s", 0.25)], details={"assumed": ["“nothing”"]})
    record.save(tmp_path / "folder" / "a.json")
    assert load_record(tmp_path / "folder" / "a.json") == record
    assert record.machine["cores"]
    assert record.versions["numpy"]
    assert set(record.load) == {"start", "end"}


def test_a_result_is_one_line(tmp_path: Path) -> None:
    Measurement().record("kind", [single("put", "s", 0.25), single("rows", "count", 3)]).save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert '\n  ["put", "s", 1, 0.25, 0.25, 0.25],\n  ["rows", "count", 1, 3, 3, 3]\n ]\n}\n' in text
    assert list(json.loads(text)) == ["kind", "commit", "command", "start", "load", "machine", "versions", "results"]


def test_a_record_that_is_too_large_is_refused_and_not_written(tmp_path: Path) -> None:
    record = Measurement().record("kind", [single("x" * RECORD_BYTES_MAX, "s", 1)])
    with pytest.raises(ValueError, match="raw samples belong in another file"):
        record.save(tmp_path / "a.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1, "results": [], "quick": true}'])
def test_a_file_that_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="is not a measurement record"):
        load_record(tmp_path / "a.json")
