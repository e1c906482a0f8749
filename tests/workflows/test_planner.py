"""The planner: refused profiles, bounds that hold, the choice, and calibration from a timeline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from transferqueue.cli import main
from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.chrome_trace import write_chrome_trace
from transferqueue.workflows.flow.events import WAIT, WORK, TimeSpan
from transferqueue.workflows.sim.planner import plan, plans
from transferqueue.workflows.sim.profile import GenerationProfile, Profile, StageProfile, calibrated, check, load

PROFILE = Profile(
    batch_rows=16,
    devices=4,
    generation=GenerationProfile(devices=1, slots=4, token_ms=[(1, 10.0), (4, 12.0)], lengths=[10, 20, 30, 90]),
    train=StageProfile(row_s=0.1, devices=1, update_s=0.1),
    stages=[StageProfile(name="reward", row_s=0.02)],
)
TOML = """
batch_rows = 16
devices = 4
[generation]
devices = 1
slots = 4
token_ms = [[1, 10.0], [4, 12.0]]
lengths = [10, 20, 30, 90]
[train]
row_s = 0.1
devices = 1
update_s = 0.1
[[stages]]
name = "reward"
row_s = 0.02
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 1}, "devices=1 is not at least 2"),
        ({"batch_rows": 0}, "batch_rows=0 is not a positive number"),
        ({"depths": ()}, r"depths=\[\] is not numbers from 0 on"),
        ({"train": StageProfile(row_s=0.0, devices=1)}, r"train.row_s=0.0 is not positive"),
    ],
)
def test_a_profile_without_a_plan_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(msgspec.structs.replace(PROFILE, **change))


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        load(tmp_path / "none.toml")
    (tmp_path / "p.toml").write_text("batch_rows = 'many'")
    with pytest.raises(UsageError, match="is not one: "):
        load(tmp_path / "p.toml")


@pytest.mark.slow
def test_no_plan_is_over_the_budget_and_none_beats_its_bound() -> None:
    assert all(one.devices <= PROFILE.devices for one in plans(PROFILE))
    found = plan(PROFILE)
    assert all(one.step_s >= one.bound_s * (1 - 1e-9) for one in found)
    assert all(-1e-9 <= share <= 1 for one in found for share in one.idle.values())


@pytest.mark.slow
def test_the_first_is_among_the_fastest_and_more_devices_never_make_it_slower() -> None:
    best = plan(PROFILE)
    assert best[0].step_s <= 1.01 * min(one.step_s for one in best)
    assert best[0].step_s <= 1.05 * plan(msgspec.structs.replace(PROFILE, devices=2))[0].step_s


def test_a_timeline_calibrates_the_stages_it_shows(tmp_path: Path) -> None:
    spans = [TimeSpan(name=WORK, start=0.0, end=2.0, rows=4), TimeSpan(name=WAIT, start=2.0, end=9.0)]
    write_chrome_trace(tmp_path / "t.json", {"train": spans, "reward-0": spans, "reward-1": spans})
    job, found = calibrated(PROFILE, tmp_path / "t.json")
    assert found == {"train": 0.5, "reward": 0.5}
    assert (job.train.row_s, job.stages[0].row_s) == (0.5, 0.5)
    write_chrome_trace(tmp_path / "o.json", {"other": spans})
    with pytest.raises(UsageError, match=r"shows \['other'\] at work, but none of"):
        calibrated(PROFILE, tmp_path / "o.json")


@pytest.mark.slow
def test_the_command_prints_plans_and_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.toml").write_text(TOML)
    assert load(tmp_path / "p.toml") == PROFILE
    assert main(["plan", str(tmp_path / "p.toml"), "--picture", str(tmp_path / "p.png")]) == 0
    assert "assumed: lengths are drawn" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 1000
