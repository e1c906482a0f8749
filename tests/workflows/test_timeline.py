"""The trace file has what its readers need, and busy shares are shares."""

import json
from pathlib import Path

from transferqueue.workflows.flow.events import Figures, TimeSpan
from transferqueue.workflows.flow.reports.chrome_trace import write_chrome_trace

SPANS = {
    "rollout-0": [
        TimeSpan(name="wait", start=10.0, end=10.5),
        TimeSpan(name="work", start=10.5, end=12.5, rows=64, version=2),
    ],
    "train-0": [TimeSpan(name="warm-up", start=9.0, end=10.0)],
}


def test_a_trace_has_a_process_for_each_stage_and_times_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_chrome_trace(path, SPANS, [Figures(kind="step", at=11.0, values={"reward": 0.5, "note": "x"})])
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"rollout-0", "train-0"}
    work = next(event for event in events if event["name"] == "work")
    assert (work["ph"], work["pid"], work["ts"], work["dur"]) == ("X", names["rollout-0"], 1_500_000, 2_000_000)
    assert work["args"] == {"rows": 64, "version": 2}
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"reward": 0.5}]


def test_busy_and_waiting_time_are_on_tracks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_chrome_trace(path, SPANS)
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert len(set(tracks.values())) == 3


def test_a_trace_of_nothing_is_a_trace(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "empty.json", {})
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []
