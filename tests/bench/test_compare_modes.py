"""The comparison of modes: seeds as text, speeds against the synchronous run of the same seed, a picture."""

from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("matplotlib")

from bench.compare_modes import MODES, ComparisonRun, draw, means, parse_seeds, results, show
from tests.workflows.job.jobs import job
from transferqueue.errors import UsageError
from transferqueue.workflows.flow.reports.audit import Audit
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.summary import summarize

SPEEDS = {"sync": (100.0, 200.0), "delayed": (150.0, 200.0), "async": (200.0, 500.0)}
EMPTY = summarize(
    RunRecord(Path(), job("grpo")), job("grpo"), Audit(put=8, live=0, done=8, dropped={}), starts=1, seconds=1.0
)
RUNS = [
    ComparisonRun(mode, seed, replace(EMPTY, samples_per_s=SPEEDS[mode][seed], after=0.5 + seed / 10))
    for seed in (0, 1)
    for mode in MODES
]


def test_speed_is_against_the_synchronous_run_of_the_same_seed() -> None:
    found = {result.name: result.median for result in results(RUNS)}
    assert found["async/speed_over_sync"] == 2.25
    assert found["sync/speed_over_sync"] == 1.0


def test_means_and_their_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = means(RUNS)
    assert figures["async"]["samples_per_s"] == 350
    assert figures["async"]["heldout_reward_after"] == 0.55
    show(figures)
    assert "async" in capsys.readouterr().out
    draw(tmp_path / "modes.png", figures, RUNS)
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_as_text() -> None:
    assert parse_seeds("0, 1 2") == [0, 1, 2]
    for text in ("", "1,x", "-1", "1,1"):
        with pytest.raises(UsageError, match="seeds"):
            parse_seeds(text)
