"""Records: what they hold, how two of them compare, and the table they make."""

import json
from dataclasses import asdict

import pytest

from bench.compare import changes, main
from bench.figures import FIGURES, figures
from bench.harness import Record, Result, load_record, percentile, spread
from bench.table import BEGIN, END, insert, markdown
from bench.workloads import DENSE


def timed(scenario, contender, workload, metric, seconds, nbytes=DENSE):
    return Result(scenario, contender, workload, metric, "s", [seconds] * 3, nbytes, checked=True)


def record(put=0.004, memcpy=0.003, trip=50e-6, lease=400e-6, machine=1.0):
    """A record of a machine `machine` times slower than the first."""
    results = [
        timed("limits", "memcpy", "32768KiB", "copy", memcpy * machine),
        timed("limits", "zmq", "64B", "round_trip", trip * machine, 64),
        timed("transfer", "transferqueue", "dense_1", "put", put * machine),
        timed("lease_cost", "transferqueue", "resident_1000", "lease_64", lease * machine, 0),
        Result("transfer", "incumbent", "dense_1", "put", "s", [], skipped="not here"),
    ]
    where = {"processor": "p", "cores": 2, "memory_bytes": 1 << 30, "python": "3.11"}
    commit = {"id": "0" * 40, "modified": False}
    load = {"before": [0.1, 0.1, 0.1], "after": [0.1, 0.1, 0.1]}
    return Record(results, commit, where, {}, "2026-01-01T00:00:00+00:00", 1.0, load, quick=True)


@pytest.fixture
def saved(tmp_path):
    def save(name, made):
        made.save(tmp_path / name)
        return str(tmp_path / name)

    return save


def test_a_record_comes_back_from_its_file_as_it_was(tmp_path):
    record().save(tmp_path / "a.json")
    assert load_record(tmp_path / "a.json") == record()


def test_a_result_carries_median_and_spread_of_its_repetitions():
    result = Result("s", "c", "w", "m", "s", [1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.median == 3.0
    assert result.spread == pytest.approx(2 / 3)


def test_a_skipped_result_has_a_reason_and_no_number():
    found = asdict(Result("s", "c", "w", "m", "s", [], skipped="no server"))
    assert found["median"] is None
    assert json.loads(json.dumps(found))["skipped"] == "no server"


def test_percentile_and_spread_of_few_values():
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert spread([1.0]) == 0.0


def test_a_file_that_is_no_record_is_refused(saved, tmp_path, capsys):
    (tmp_path / "not.json").write_text('{"format": 99}')
    assert main([saved("a.json", record()), str(tmp_path / "not.json")]) == 2
    assert "is not a benchmark record" in capsys.readouterr().err


def test_equal_records_pass(saved):
    assert main([saved("a.json", record()), saved("b.json", record())]) == 0


def test_a_slower_machine_is_no_regression(saved):
    assert main([saved("a.json", record()), saved("b.json", record(machine=3.0))]) == 0


def test_a_slower_put_fails_past_the_tolerance(saved, capsys):
    old, new = saved("a.json", record()), saved("b.json", record(put=0.0048))
    assert main([old, new, "--tolerance", "0.25"]) == 0
    assert main([old, new, "--tolerance", "0.1"]) == 1
    assert "dense_1 put" in capsys.readouterr().out


def test_a_faster_put_passes(saved):
    assert main([saved("a.json", record()), saved("b.json", record(put=0.002))]) == 0


def test_a_value_that_is_no_longer_measured_fails(saved, capsys):
    less = record()
    less.results.pop(3)
    assert main([saved("a.json", record()), saved("b.json", less)]) == 1
    assert "not measured" in capsys.readouterr().out


def test_changes_know_which_way_is_better():
    factors = {change.name: change.factor for change in changes(record(), record(put=0.008), "transferqueue")}
    assert factors["put, one dense 32 MiB field against memcpy"] == pytest.approx(2.0)
    assert factors["transfer transferqueue dense_1 put"] == pytest.approx(2.0)
    assert factors["lease_cost transferqueue resident_1000 lease_64"] == pytest.approx(1.0)


def test_every_required_figure_has_a_row_measured_or_not():
    found = figures(record())
    assert len(found) == len(FIGURES)
    assert found[0].value == pytest.approx(0.75)
    assert found[0].met is True
    assert found[1].met is None
    assert markdown(record()).count("\n| ") == len(FIGURES)


def test_the_table_replaces_only_what_is_between_its_marks():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert insert(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="put both on lines"):
        insert("no marks", "new")
