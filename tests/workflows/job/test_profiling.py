"""Profile, plan, run: what is measured of a real job, what a plan changes, and the prediction in the summary of its
run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.workflows.job.jobs import job
from tests.workflows.job.short_run import finished, make_place, train
from transferqueue.errors import Impossible, NotFound, UsageError
from transferqueue.workflows.job.profiling import trial
from transferqueue.workflows.job.run.summary import RunSummary
from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.plan_file import PlanFile, Predicted, changes_of, plan_file, read_plan
from transferqueue.workflows.job.settings.read import job_from_file, job_from_values
from transferqueue.workflows.job.settings.write import as_toml
from transferqueue.workflows.planner.job_plan import DevicePlan, draw_lengths, plans, predict
from transferqueue.workflows.planner.profile import (
    DeviceKind,
    GenerationProfile,
    Profile,
    StageProfile,
    TrialFactors,
    check,
    load,
)

PROFILE = Profile(
    batch_rows=8,
    devices=4,
    group_rows=2,
    generation=GenerationProfile(devices=1, slots=8, token_ms=[(1, 2.0), (8, 3.0)], lengths=[4, 6, 8]),
    train=StageProfile(row_s=0.01, devices=1, step_s=0.01, update_s=0.02, instances_max=1),
    stages=[StageProfile(name="reward", row_s=0.001)],
)


def test_every_plan_is_a_job_that_passes_all_rules(tmp_path: Path) -> None:
    from tests.workflows.job.jobs import GRPO

    for each in plans(PROFILE):
        plan_file(PROFILE, each).write(tmp_path / "plan.toml")
        read = read_plan(tmp_path / "plan.toml")
        values = {name: dict(value) if isinstance(value, dict) else value for name, value in GRPO.items()}
        values["engine"] = [dict(engine) for engine in GRPO["engine"]]  # type: ignore[attr-defined]
        for change in read.sets():
            apply(values, change)
        planned = job_from_values(values)
        assert planned.engine[0].count == each.instances["generate"]
        assert planned.engine[0].slots == each.slots
        assert (planned.pacing.mode, planned.pacing.depth) == ("async" if each.depth else "sync", each.depth)
        assert planned.trainer.at_least == max(1, each.micro_rows // 2)
        assert read.predicted.samples_per_s == pytest.approx(8 / read.predicted.step_s, rel=0.01)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist; transferqueue plan"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "p.toml").write_text("predicted = 3")
    with pytest.raises(UsageError, match="is not one: "):
        read_plan(tmp_path / "p.toml")
    kinds = Profile(
        batch_rows=8,
        generation=PROFILE.generation,
        train=PROFILE.train,
        kinds=[DeviceKind(name="a", devices=1), DeviceKind(name="b", devices=1)],
    )
    with pytest.raises(Impossible, match="2 kinds of devices is no change of a job file"):
        plan_file(kinds, next(iter(plans(kinds))))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sft", (), "it generates nothing"),
        ("play", (), "a job of episodes"),
        ("grpo", ('engine=[{kind="transformers"},{kind="transformers"}]',), "2 entries of engine"),
    ],
)
def test_jobs_that_have_nothing_to_divide_are_refused(kind: str, changes: tuple[str, ...], message: str) -> None:
    pytest.importorskip("torch")
    from transferqueue.workflows.job.profiling.job import profile_job

    with pytest.raises(Impossible, match=message):
        profile_job(job(kind, *changes))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_is_profiled_planned_and_run_with_its_prediction(tmp_path: Path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    from transferqueue.workflows.job.profiling.job import profile_job

    place = make_place(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        changes = ["reproducible=false", "evaluation.path=''"]
        profile = profile_job(job_from_file(place / "job.toml", set=changes), code=place, devices=2, trial_steps=3)
    (place / "profile.toml").write_text(as_toml(profile))
    assert load(place / "profile.toml") == profile
    generation, trained = profile.generation, profile.train
    assert [rows for rows, _ in generation.token_ms] == [1, 2, 4, 8, 16]
    assert max(generation.lengths) <= 6
    assert [each.depth for each in profile.trials] == [0, 1]
    assert min(each.generation for each in profile.trials) > 0
    assert min(trained.row_s, trained.step_s, trained.update_s, profile.stages[0].row_s) > 0
    chosen = plan_file(profile, next(each for each in plans(profile) if each.depth == 0))
    chosen.write(place / "plan.toml")
    words = [word for change in changes for word in ("--set", change)]
    summary = finished(train(place, "job.toml", "--plan", "plan.toml", "--out", "run", "--json", *words))
    assert summary["predicted"]["step_s"] == chosen.predicted.step_s
    assert summary["step_s"] > 0
    assert "step, predicted" in (place / "run" / "summary.txt").read_text()
    job_file = tomllib.loads((place / "run" / "job.toml").read_text())
    assert job_file["engine"][0]["slots"] == chosen.changes["engine.0.slots"]
    assert read_plan(place / "run" / "plan.toml") == chosen


@pytest.mark.parametrize("depth", [0, 1])
def test_a_trial_that_runs_as_predicted_has_no_factor(depth: int) -> None:
    factors = trial.factors(PROFILE, plan_at(depth), summary_of(PROFILE, depth))
    assert (factors.depth, factors.generation, factors.train) == (depth, pytest.approx(1.0), pytest.approx(1.0))
    assert factors.wait_s == pytest.approx(0.0, abs=0.005)


def test_a_plan_predicts_a_trial_that_took_longer_than_its_parts() -> None:
    slow = TrialFactors(depth=0, generation=1.5, train=1.2, wait_s=0.03)
    found = trial.factors(PROFILE, plan_at(0), summary_of(replace(PROFILE, trials=[slow]), 0))
    assert (found.generation, found.train) == (pytest.approx(1.5, rel=0.01), pytest.approx(1.2, rel=0.01))
    assert found.wait_s == pytest.approx(0.03, abs=0.003)
    alone, together = (
        plan_file(profile, plan_at(0)).predicted.step_s for profile in (PROFILE, replace(PROFILE, trials=[found]))
    )
    assert together > 1.3 * alone
    assert replace(PROFILE, trials=[found]).factors(1) == found, "the nearest depth counts"


def test_a_trial_leaves_nothing_behind_and_has_the_plan_of_its_depth() -> None:
    described = trial.trial_job(
        job("grpo", "evaluation.path='held'", "elastic.max=3"), changes_of(PROFILE, plan_at(1)), 5
    )
    assert (described.steps, described.evaluation.path, described.elastic.max) == (5, "", 0)
    assert (described.checkpoint.every, described.log.samples) == (0, 0)
    assert (described.pacing.mode, described.pacing.depth, described.engine[0].slots) == ("async", 1, 8)


@pytest.mark.parametrize(
    "changes",
    [
        "reproducible=true",
        "weights.kv=salt ; engine.0.kind=vllm ; pacing.mode=async",
        "algorithm.token_staleness.mask=1 ; pacing={mode='async', depth=2}",
        "weights.every=2 ; pacing={mode='async', depth=2}",
        "pacing={mode='sync', over_sample=1.5}",
        "trainer.warmup=10 ; steps=100",
        "evaluation={path='x', sets=[{name='a', path='y'}]}",
        "evaluation={path='x', every=5, patience=2, figure='pass@2', samples=2, pass_at=[2], temperature=1.0}",
        "evaluation={path='x', every=20} ; checkpoint={every=20, best='evaluation'}",
        "engine.0.site=b ; queue.address='tcp://host:1'",
        "elastic={min=1, max=2}",
        "dispatch.kind=length",
        "pacing.mode=colocated",
        "queue.record=on",
    ],
)
def test_every_job_has_trials_of_three_steps_at_each_depth(changes: str) -> None:
    trial.check_trials(job("grpo", *changes.split(" ; ")), (0, 1), 3)


def test_a_trial_of_too_few_steps_is_refused() -> None:
    pytest.importorskip("torch")
    from transferqueue.workflows.job.profiling.job import profile_job

    with pytest.raises(UsageError, match="trial_steps=2: a trial needs at least 3 steps; 0 runs none"):
        profile_job(job("grpo"), trial_steps=2)


@pytest.mark.parametrize("values", [{"generation": 0.0}, {"train": float("nan")}, {"wait_s": -1.0}])
def test_a_profile_with_impossible_factors_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="profile: trials"):
        check(replace(PROFILE, trials=[TrialFactors(depth=0, **values)]))


def plan_at(depth: int) -> DevicePlan:
    return next(plan for plan in trial.trial_plans(PROFILE) if plan.depth == depth)


def summary_of(profile: Profile, depth: int) -> RunSummary:
    """The summary of a run that goes exactly as `profile` predicts."""
    planned = predict(profile, plan_at(depth), 0.0, draw_lengths(profile, 8))
    values = dict.fromkeys(RunSummary.__struct_fields__) | {
        "steps": 8,
        "trained_s": planned.simulated.total_s,
        "step_s": planned.later_step_s,
        "trainer_idle": planned.idle["train"],
        "busy": {"rollout": 1 - planned.idle["generate"]},
    }
    return RunSummary(**values)  # type: ignore[arg-type]


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = PlanFile(
        changes={"pacing.mode": "sync", "engine.0.count": 2}, predicted=Predicted(step_s=1.5, samples_per_s=2.0)
    )
    plan.write(tmp_path / "p.toml")
    assert read_plan(tmp_path / "p.toml") == plan
