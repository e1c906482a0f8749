"""What a run writes while it goes on, what a resumed run reads back, and what the summary says of both."""

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.observe.snapshots import table
from tests.workflows.job.jobs import job
from transferqueue.errors import AddressInUse, InternalError, NotFound, UsageError
from transferqueue.workflows.flow.events import PUBLISH, SWAP, WAIT, WORK, Failure, Figures, TimeSpan
from transferqueue.workflows.flow.reports.audit import Audit
from transferqueue.workflows.job.run import folder as folders
from transferqueue.workflows.job.run.folder import RunFolder, new_folder, unfinished_folder
from transferqueue.workflows.job.run.plot import draw
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.summary import evaluated, summarize
from transferqueue.workflows.job.run_files import first_prompt, json_lines

AUDIT = Audit(put=32, live=0, done=30, dropped={"equal": 2})


def step(number, at, **values):
    figures = {"step": number, "rows": 8, "tokens": 80, "reward": number / 10, "loss": 0.5, "idle_s": 0.25} | values
    behind = {"staleness": {"0": 6, "1": 2}, "token_staleness": {"0": 70, "2": 10}}
    return Figures(kind="step", at=at, values=behind | figures)


def evaluation(when, reward, number=0):
    return Figures(kind="evaluation", at=0.0, values={"when": when, "step": number, "reward": reward, "rows": 64})


def record_in(folder, kind="grpo"):
    return RunRecord(folder, job(kind))


def filled(folder, steps):
    with record_in(folder) as record:
        record.add("evaluate-0", evaluation("before", 0.25))
        record.add("train-0", TimeSpan(name=WAIT, start=10.0, end=10.5))
        for number in steps:
            record.add("rollout-0", TimeSpan(name=WORK, start=9.0 + number, end=9.5 + number, rows=8))
            record.add("train-0", TimeSpan(name=PUBLISH, start=10.0, end=10.125))
            record.add("train-0", step(number, 10.0 + number))
        record.add("reward-0", Failure(text="Traceback", rows=4))
        record.add("reward-0", Figures(kind="samples", at=0.0, values={"samples": [{"prompt": "1+1", "reward": 1.0}]}))
    return record


def test_a_step_has_the_figures_of_the_critic(tmp_path):
    critic = {"step": 1, "value": 0.5, "return": 0.25, "return_squared": 0.5, "value_error": 0.25, "gradient_norm": 2.0}
    with record_in(tmp_path, "ppo") as record:
        record.add("train_critic-0", Figures(kind="critic_step", at=0.0, values=critic | {"loss": 0.125}))
        record.add("train-0", step(1, 10.0))
    (recorded,) = json_lines(tmp_path / "steps.jsonl")
    found = {name: value for name, value in recorded.items() if name.startswith("critic/")}
    assert found.pop("critic/explained_variance") == pytest.approx(1 - 0.1875 / 0.4375)
    assert found == {"critic/loss": 0.125, "critic/value_error": 0.25, "critic/gradient_norm": 2.0}


def test_figures_of_a_run_add_up_to_its_summary(tmp_path):
    record = filled(tmp_path, [1, 2, 3, 4])
    record.add("evaluate-0", evaluation("after", 0.75, 4))
    summary = summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0)
    assert (summary.measure, summary.before, summary.after) == ("reward", 0.25, 0.75)
    assert summary.figures["reward"] == (0.1, 0.4)
    assert (summary.steps, summary.trained_s, summary.samples_per_s, summary.tokens_per_s) == (4, 4.0, 8.0, 80.0)
    assert (summary.trainer_idle, summary.busy, summary.publish_s) == (0.25, {"rollout": 0.5}, 0.125)
    assert (summary.staleness, summary.token_staleness) == ({"0": 24, "1": 8}, {"0": 280, "2": 40})
    assert msgspec.json.decode(msgspec.json.encode(summary))["token_staleness"] == {"0": 280, "2": 40}
    assert (summary.rows_put, summary.rows_done, summary.rows_dropped) == (32, 30, {"equal": 2})
    assert summary.failures == {"reward-0": 1}
    text = summary.text()
    for words in ("0.250 → 0.750  (+0.500)", "trainer idle", "25%", "32 / 30 / 2 equal", "grpo, async, seed 0"):
        assert words in text
    assert re.search(r"rows by staleness +0: 24, 1: 8\n", text)
    assert re.search(r"tokens by staleness +0: 280, 2: 40\n", text)


def test_a_summary_says_where_staleness_comes_from_and_how_long_generation_stood_still(tmp_path):
    record = filled(tmp_path, [1])
    record.add("train-0", TimeSpan(name=PUBLISH, start=11.0, end=11.5, version=1))
    record.add("rollout-0", TimeSpan(name=SWAP, start=11.5, end=11.75, version=1))
    parts = {"staleness_in_flight": {"0": 8}, "staleness_in_queue": {"0": 6, "1": 2}}
    summary = summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0, table=table(**parts))
    assert (summary.staleness_in_flight, summary.staleness_in_queue) == tuple(parts.values())
    assert (summary.publish_lag_s, summary.swaps.count, summary.swaps.swap_s_max) == (0.25, 1, 0.25)
    assert "250.0 ms at most to take weights" in summary.text()


@pytest.mark.parametrize("change", [{"live": 8}, {"done": 15}, {"dropped": {"equal": 1}}, {"put": 25}], ids=str)
def test_rows_that_do_not_balance_are_an_error(change):
    AUDIT.check_finished("t")
    with pytest.raises(InternalError, match="does not balance"):
        replace(AUDIT, **change).check_finished("t")


def test_each_figure_has_its_mean_at_both_ends_of_the_run(tmp_path):
    with record_in(tmp_path) as record:
        for number in range(1, 21):
            terms = {"reward/exact": number / 10} | ({"reward/matches": 0.5} if number < 3 else {})
            record.add("train-0", step(number, float(number), engine_error=0.01, **terms))
    summary = summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0)
    assert summary.figures["reward/exact"] == (0.15, 1.95)
    assert summary.figures["reward/matches"] == (0.5, 0.5)
    for line in ("reward/exact", "0.15 → 1.95", "engine_error", "0.01 → 0.01 nats"):
        assert line in summary.text()


def test_dispatch_by_length_is_in_the_summary_and_in_a_file(tmp_path):
    figures = {
        "step": 3,
        "judged_rows": 96,
        "recall_20": 0.75,
        "recall_10": 0.5,
        "recall_5": 0.25,
        "plans": 4,
        "plans_in_order": 2,
        "why": "longest first",
    }
    with record_in(tmp_path) as record:
        record.add("rank-0", Figures(kind="dispatch", at=5.0, values=figures | {"plans": 3}))
        record.add("rank-0", Figures(kind="dispatch", at=6.0, values=figures))
    summary = summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0)
    assert summary.dispatch == figures | {"at": 6.0}
    words = (
        "recall 0.75 / 0.50 / 0.25 at 20 / 10 / 5 % of 96 rows; 2 of 4 batches in order of length; last: longest first"
    )
    assert words in summary.text()
    assert len((tmp_path / "dispatch.jsonl").read_text().splitlines()) == 2
    assert len(record_in(tmp_path).plans) == 2
    first = record.plans[0] | {"judged_rows": 0}
    del first["recall_20"], first["recall_10"], first["recall_5"]
    record.plans.append(first)
    assert "recall not reported at" in summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0).text()


def test_recall_over_time_is_in_the_summary_and_in_a_file(tmp_path):
    shares = {"recall_20": 0.25, "recall_10": 0.5, "recall_5": 0.0}
    refits = [{"ranker_version": 1, "rows": 32, "judged_rows": 0}]
    refits += [{"ranker_version": 2, "rows": 64, "judged_rows": 32} | shares] * 3
    refits += [{"ranker_version": 9, "rows": 288, "judged_rows": 32} | shares | {"recall_20": 0.75}]
    with record_in(tmp_path) as record:
        for refit in refits:
            record.add("rank-0", Figures(kind="ranker", at=5.0, values=refit))
    summary = summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0)
    assert summary.ranker == [refit | {"at": 5.0} for refit in refits]
    assert "0.25 / 0.50 / 0.00 → 0.75 / 0.50 / 0.00 at 20 / 10 / 5 %, first and last 1 of 4 refits" in summary.text()
    assert len(record_in(tmp_path).refits) == len((tmp_path / "ranker.jsonl").read_text().splitlines()) == 5
    (tmp_path / "other").mkdir()
    untaught = summarize(filled(tmp_path / "other", [1]), job("grpo"), AUDIT, starts=1, seconds=9.0)
    assert "recall by refit" not in untaught.text()


def test_what_nobody_reported_is_not_made_up(tmp_path):
    with record_in(tmp_path) as record:
        record.add("train-0", Figures(kind="step", at=5.0, values={"step": 1, "rows": 8, "step_s": 2.0}))
    summary = summarize(record, job("distill"), AUDIT, starts=1, seconds=9.0)
    assert (summary.before, summary.after, summary.trainer_idle, summary.publish_s) == (None, None, None, None)
    assert (summary.figures, summary.warnings, summary.busy) == ({"rows": (8.0, 8.0), "step_s": (2.0, 2.0)}, [], {})
    assert (summary.trained_s, summary.samples_per_s) == (2.0, 4.0)
    assert "not evaluated" in summary.text()


def test_a_resumed_run_goes_on_with_what_was_written(tmp_path):
    filled(tmp_path, [1, 2, 3])
    with (tmp_path / "steps.jsonl").open("a") as torn:
        torn.write('{"step": 4, "rew')
    with record_in(tmp_path) as record:
        record.add("train-0", step(3, 20.0, reward=0.9))
        record.add("train-0", step(4, 21.0))
    assert sorted(record.steps) == [1, 2, 3, 4]
    assert record.steps[3]["reward"] == 0.9
    assert list(record.each("reward")) == [0.9, 0.4]
    assert evaluated(record.evaluations)[1] == 0.25
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"prompt": "1+1", "reward": 1.0}
    assert [line["reward"] for line in json_lines(tmp_path / "steps.jsonl")] == [0.1, 0.2, 0.9, 0.4]


@pytest.mark.parametrize("torn", ['{"prompt": "1+', '{"prompt": "gr\u00fc\u2028'])
def test_a_line_that_a_killed_process_left_unfinished_costs_no_other(tmp_path, torn):
    """Of the files that are not written again at a resume; the line may end in the middle of a character."""
    for number in range(2):
        filled(tmp_path, [number + 1])
        if not number:
            with (tmp_path / "samples.jsonl").open("ab") as file:
                file.write(torn.encode()[:-1])
    assert [line["prompt"] for line in json_lines(tmp_path / "samples.jsonl")] == ["1+1", "1+1"]


def test_a_line_may_have_any_character(tmp_path):
    with record_in(tmp_path) as record:
        record.add("reward-0", Figures(kind="samples", at=0.0, values={"samples": [{"prompt": "a\u2028b\x85c"}]}))
    assert [line["prompt"] for line in json_lines(tmp_path / "samples.jsonl")] == ["a\u2028b\x85c"]


def test_each_step_and_evaluation_is_once_in_its_file_whatever_the_trainer_took_back(tmp_path):
    filled(tmp_path, [1, 2, 3, 4])
    with RunRecord(tmp_path, job("grpo")) as record:
        for at, number in enumerate([3, 4, 5, 4, 5, 6]):  # a resume, then the death of the trainer
            record.add("train-0", step(number, 20.0 + at, reward=at))
            record.add("evaluate-0", evaluation("during", at, number))
        assert [line["step"] for line in json_lines(tmp_path / "steps.jsonl")] == [1, 2, 3, 4, 5, 6]
    for name in ("steps.jsonl", "evaluations.jsonl"):
        found = {line["step"]: line["reward"] for line in json_lines(tmp_path / name) if line["step"] > 2}
        assert found == {3: 0, 4: 3, 5: 4, 6: 5}
    assert len(list(json_lines(tmp_path / "evaluations.jsonl"))) == 5
    assert record.new_steps == [3, 4, 5, 6]
    assert not list(tmp_path.glob("*.partial"))


def test_the_first_evaluation_before_and_the_last_one_after_count():
    found = [
        {"when": "before", "kl": 0.5},
        {"when": "before", "kl": 0.1},
        {"when": "after", "kl": 0.3},
        {"when": "after", "kl": 0.2},
    ]
    assert evaluated(found) == ("kl", 0.5, 0.2)
    assert evaluated([]) == ("reward", None, None)


@pytest.mark.slow
def test_timeline_and_picture_are_written(tmp_path):
    record = filled(tmp_path, [1, 2, 3])
    record.write_timeline(tmp_path / "timeline.json")
    draw(tmp_path / "learning.png", record, summarize(record, job("grpo"), AUDIT, starts=1, seconds=9.0))
    names = {event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    assert {"wait", "work", "publish", "reward"} <= names
    assert (tmp_path / "learning.png").stat().st_size > 10_000


# ---------------------------------------------------------------- the folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


def test_a_folder_keeps_the_job_and_each_start(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(job("ppo"), tmp_path)
    folder.begin(job("ppo"), None)
    assert folder.job() == job("ppo")
    assert folder.job(["steps=7"]).steps == 7
    first, second = folder.starts()
    assert (first.code, second.code) == (str(tmp_path), "")
    assert first.place == str(Path.cwd())
    assert "torch" in first.packages
    assert not folder.finished


def test_an_unfinished_run_is_found_by_the_name_of_its_job(runs):
    settings = job("grpo", "name=mine")
    for name in ("mine-1", "mine-2", "mine-3"):
        RunFolder(runs / name).begin(settings, None)
    (runs / "mine-3" / "summary.json").write_text("{}")
    (runs / "other").mkdir()
    assert unfinished_folder("mine").path == runs / "mine-2"
    with pytest.raises(NotFound, match="no unfinished run of job 'yours'"):
        unfinished_folder("yours")
    with pytest.raises(UsageError, match="is finished"):
        unfinished_folder("mine", runs / "mine-3")
    with pytest.raises(NotFound, match=r"has no job\.toml"):
        unfinished_folder("mine", runs / "other")
    with pytest.raises(UsageError, match="has a run already"):
        new_folder(settings, runs / "mine-1")
    assert new_folder(settings).path.name.startswith("mine-")


def test_a_folder_is_run_by_one_process_at_a_time(tmp_path):
    first, second = RunFolder(tmp_path).locked(), RunFolder(tmp_path).locked()
    with first, pytest.raises(AddressInUse, match="is going on in another process"), second:
        pass
    with RunFolder(tmp_path).locked():
        pass


def checkpoint(folder, step, position=(0, [])):
    place = folder / "checkpoints" / "train" / f"step-{step:08}"
    place.mkdir(parents=True)
    (place / "state.json").write_text(json.dumps({"step": step, "version": step, "position": position}))


def test_a_run_says_where_it_goes_on_and_why(tmp_path):
    folder, settings = RunFolder(tmp_path), job("grpo", "steps=9", "checkpoint.every=4")
    folder.begin(settings, None)
    assert folder.goes_on(settings) == "at step 0: it ended before its first checkpoint (checkpoint.every=4)"
    filled(tmp_path, [1, 2, 3])
    assert folder.goes_on(settings).endswith("(checkpoint.every=4), and 3 trained steps come again")
    assert folder.goes_on(job("grpo", "checkpoint.resume=old")).startswith("with old: it ended before its first")
    assert "writes no checkpoint" in folder.goes_on(job("grpo", "checkpoint.every=0"))
    checkpoint(tmp_path, 2)
    assert folder.goes_on(settings) == ("after step 2 of 9, that of its newest checkpoint; step 3 is trained again")
    checkpoint(tmp_path, 3)
    assert folder.goes_on(settings) == "after step 3 of 9, that of its newest checkpoint"


def contents(path):
    return {file: file.is_dir() or file.read_bytes() for file in path.rglob("*")}


def test_a_finished_run_is_lengthened_by_more_steps_alone(runs):
    settings, path = job("grpo", "name=mine", "steps=9"), runs / "mine-1"
    RunFolder(path).begin(settings, None)
    (path / "summary.json").write_text("{}")
    (path / "model").mkdir()
    for changes in ([], ["steps=9"], ["steps=3"]):
        with pytest.raises(
            UsageError, match=r"is finished: .*; .* lengthen this one by --set steps=N, more than its 9"
        ):
            unfinished_folder("mine", path, changes)
    folder, longer = unfinished_folder("mine", path, ["steps=12"]), job("grpo", "name=mine", "steps=12")
    with pytest.raises(NotFound, match="has no checkpoint"):
        folder.begin(longer, None)
    assert folder.finished
    checkpoint(path, 9, (36, [38, 41]))
    repeats, before = job("grpo", "steps=12", "reproducible=true", "pacing.uses=2"), contents(path)
    with pytest.raises(UsageError, match=r"a new table, without the rows that its next step is to train again .*=2"):
        folder.begin(repeats, None)
    assert contents(path) == before
    folder.begin(longer, None)
    with pytest.raises(UsageError, match=r"a new table, without the rows that its next step is to train again .*=2"):
        folder.begin_table(repeats)
    folder.begin_table(longer)
    assert (folder.finished, folder.job().steps, first_prompt(path)) == (False, 12, 42)
    assert not (path / "model").exists()
    (path / "summary.json").write_text("{}")
    (path / "job.toml").write_text((path / "job.toml").read_text().replace('address = ""', 'address = "tcp://h:1"'))
    with pytest.raises(UsageError, match=r"its table on queue.address='tcp://h:1' has ended; start a new run"):
        unfinished_folder("mine", path, ["steps=20"])


@pytest.mark.parametrize(("file", "why"), [("summary.json", "is finished"), ("discarded", "was discarded")])
def test_a_run_that_ended_after_it_was_chosen_is_not_gone_on_with(runs, file, why):
    """Another process ends the run between the choice of its folder and the lock."""
    settings = job("grpo", "name=mine")
    RunFolder(runs / "mine-1").begin(settings, None)
    chosen = unfinished_folder("mine")
    with RunFolder(runs / "mine-1").locked():
        (runs / "mine-1" / file).write_text("{}")
    with chosen.locked(), pytest.raises(UsageError, match=why):
        chosen.begin(settings, None)
    assert len(chosen.starts()) == 1


def test_a_new_folder_that_another_run_has_taken_is_refused_under_the_lock(runs):
    settings = job("grpo", "name=mine")
    first, second = (new_folder(settings, runs / "mine-1") for _ in range(2))
    with first.locked():
        first.begin(settings, None)
        first.begin(settings, None)  # the same run once more
    with second.locked(), pytest.raises(UsageError, match="has a run already"):
        second.begin(settings, None)


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with (
            pytest.raises(UsageError, match=r"cannot be written to: .*; give another to --out$"),
            RunFolder(path).locked(),
        ):
            pass


@pytest.mark.parametrize("text", ["{", "[{}]", "\x00"])
def test_a_damaged_list_of_starts_is_refused_by_name(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match=r"run.json cannot be read: .*; remove it"):
        RunFolder(tmp_path).starts()
