"""Runs: their records, how two of them compare, and the table they make."""

import pytest

from bench.compare import changes, main
from bench.figures import FIGURES, figures
from bench.harness import Result, percentile
from bench.measurement_record import Measurement, load_record, summarize
from bench.run_record import details, load_run, measured, save_job, save_record, summaries
from bench.table import BEGIN, END, insert, markdown
from bench.workloads import DENSE


def timed(scenario, contender, workload, metric, seconds, nbytes=DENSE):
    return Result(scenario, contender, workload, metric, "s", [seconds] * 3, nbytes, checked=True)


def results(put=0.004, memcpy=0.003, trip=50e-6, lease=400e-6, machine=1.0):
    """Results of a machine `machine` times slower than the first."""
    return [
        timed("limits", "memcpy", "32768KiB", "copy", memcpy * machine),
        timed("limits", "zmq", "64B", "round_trip", trip * machine, 64),
        timed("transfer", "transferqueue", "dense_1", "put", put * machine),
        timed("lease_cost", "transferqueue", "resident_1000", "lease_64", lease * machine, 0),
        Result("transfer", "incumbent", "dense_1", "put", "s", [], skipped="not here"),
    ]


@pytest.fixture
def saved(tmp_path):
    """Writes a run, as `bench.run` does; returns its folder."""

    def save(name, made):
        jobs = dict.fromkeys((result.scenario, result.contender) for result in made)
        for scenario, contender in jobs:
            mine = [result for result in made if (result.scenario, result.contender) == (scenario, contender)]
            save_job(tmp_path / name, contender, Measurement(), {}, mine)
        return str(tmp_path / name)

    return save


@pytest.fixture
def run(saved, tmp_path):
    """A run as it is read back."""

    def read(**speeds):
        return load_run(tmp_path / saved("run-" + "-".join(map(str, speeds.values())), results(**speeds)))

    return read


def test_a_run_has_a_record_for_each_scenario_of_each_contender(saved, tmp_path):
    folder = tmp_path / saved("a", results())
    assert sorted(path.name for path in folder.iterdir()) == [
        "lease_cost-transferqueue.json",
        "limits-memcpy.json",
        "limits-zmq.json",
        "transfer-incumbent.json",
        "transfer-transferqueue.json",
    ]
    put = load_run(folder).find("transfer", "transferqueue", "dense_1", "put")
    assert (put.unit, put.n, put.median, put.nbytes) == ("s", 3, 0.004, DENSE)


def test_a_benchmark_run_by_hand_writes_a_record_into_the_folder_it_is_given(tmp_path, capsys):
    lines = [summarize("step", "s", [1.0, 2.0, 3.0])]
    save_record(Measurement(), None, "streaming", lines, {})
    assert not [*tmp_path.iterdir()]
    assert not capsys.readouterr().out
    for name in ("", "streaming-ray"):
        save_record(began := Measurement(), tmp_path, "streaming", lines, {"rows": 3}, name=name)
        path = tmp_path / f"{name or 'streaming'}-{began.start:%Y%m%d-%H%M%S}.json"
        record = load_record(path)
        assert (record.kind, record.results, record.details) == ("streaming", lines, {"rows": 3})
        assert capsys.readouterr().out == f"wrote {path}\n"


def test_a_record_says_why_something_was_not_measured(saved, tmp_path):
    (record,) = load_run(tmp_path / saved("a", results()) / "transfer-incumbent.json").records
    assert record.results == []
    assert record.details == {"skipped": {"incumbent/dense_1/put": "not here"}}


def test_bytes_are_kept_by_workload_and_by_metric_where_they_differ():
    made = [
        timed("transfer", "us", "part", metric, 1.0, size) for metric, size in (("put", 8), ("read", 8), ("get", 2))
    ]
    record = Measurement().record("transfer", measured(made), versions={}, details=details(made))
    assert record.details == {"bytes": {"part": 8, "part/get": 2}}
    assert [summary.nbytes for summary in summaries(record)] == [8, 8, 2]


def test_percentile_of_few_values():
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_what_is_no_record_is_refused(saved, tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"format": 1, "results": [], "quick": true}')
    assert main([saved("a", results()), str(tmp_path / "old.json")]) == 2
    assert "is not a measurement record" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([saved("a", results()), str(tmp_path / "empty")]) == 2
    assert "has no records" in capsys.readouterr().err


def test_equal_runs_pass(saved):
    assert main([saved("a", results()), saved("b", results())]) == 0


def test_a_slower_machine_is_no_regression(saved):
    assert main([saved("a", results()), saved("b", results(machine=3.0))]) == 0


def test_a_slower_put_fails_past_the_tolerance(saved, capsys):
    old, new = saved("a", results()), saved("b", results(put=0.0048))
    assert main([old, new, "--tolerance", "0.25"]) == 0
    assert main([old, new, "--tolerance", "0.1"]) == 1
    assert "dense_1 put" in capsys.readouterr().out


def test_a_faster_put_passes(saved):
    assert main([saved("a", results()), saved("b", results(put=0.002))]) == 0


def test_a_value_that_is_no_longer_measured_fails(saved, capsys):
    less = results()
    less.pop(3)
    assert main([saved("a", results()), saved("b", less)]) == 1
    assert "not measured" in capsys.readouterr().out


def test_changes_know_which_way_is_better(run):
    factors = {change.name: change.factor for change in changes(run(), run(put=0.008), "transferqueue")}
    assert factors["put, one dense 32 MiB field against memcpy"] == pytest.approx(2.0)
    assert factors["transfer transferqueue dense_1 put"] == pytest.approx(2.0)
    assert factors["lease_cost transferqueue resident_1000 lease_64"] == pytest.approx(1.0)


def test_every_required_figure_has_a_row_measured_or_not(run):
    found = figures(run())
    assert len(found) == len(FIGURES)
    assert found[0].value == pytest.approx(0.75)
    assert found[0].met is True
    assert found[1].met is None
    assert markdown(run()).count("\n| ") == len(FIGURES)


def test_the_table_replaces_only_what_is_between_its_marks():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert insert(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="put both on lines"):
        insert("no marks", "new")
