"""Figures of a run's steps: the description, each rule of thumb, when a warning is told, and where it is seen."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

import transferqueue as tq
from tests.figures import RUN_PAGE, run_page
from tests.workflows.job.jobs import job
from tests.workflows.job.short_run import lines as lines_of
from transferqueue.cli.screens.train import Lines
from transferqueue.errors import NotFound
from transferqueue.observe.figure_table import CHARS_MAX, CURVES_MAX, POINTS_MAX, FigureTable
from transferqueue.workflows.dispatch.channels import newest
from transferqueue.workflows.flow.events import RESTART, WORK, Figures, TimeSpan
from transferqueue.workflows.flow.reports.audit import Audit
from transferqueue.workflows.flow.reports.loggers import logged
from transferqueue.workflows.job.names import PREFILLED, REWARD_TERMS
from transferqueue.workflows.job.run.figures import FIGURES, curves, described
from transferqueue.workflows.job.run.preflight import preflight
from transferqueue.workflows.job.run.record import RunRecord
from transferqueue.workflows.job.run.run_page import CHANNEL, RunPage, run_figures
from transferqueue.workflows.job.run.run_warnings import EARLIER_STEPS, NOT_FINITE, PAUSE_STEPS, TOLD_MAX, RunWarnings
from transferqueue.workflows.job.run.summary import summarize
from transferqueue.workflows.job.run_files import STEPS
from transferqueue.workflows.job.stages.failed_rows import FAILED_ROWS, RETRIED
from transferqueue.workflows.job.training.row_figures import row_figures

GOOD = {
    "rows": 64,
    "reward": 0.5,
    "reward_std": 0.5,
    "groups": 8,
    "equal_groups": 0.25,
    "reward/exact": 0.5,
    "reward_std/exact": 0.5,
    "truncated": 0.125,
    "entropy": 1.0,
    "ref_kl": 0.01,
    "rollout_kl": 0.001,
    "clipped_low": 0.01,
    "clipped_high": 0.02,
    "engine_error": 0.005,
    "policy_movement": 0.05,
    "staleness_mean": 0.5,
    "dropped/stale": 2,
}


def step(number, **values):
    return Figures(kind="step", at=float(number), values={"step": number} | GOOD | values)


def watched(*changes, kind="grpo", good=0):
    """The warnings told of after so many good steps and a step with each of these changes, and all of the run."""
    warnings, told = RunWarnings(job(kind)), []
    for number in range(1, good + 1):
        assert warnings.see({"step": number} | GOOD) == []
    for number, change in enumerate(changes, good + 1):
        told += [(number, warning.text) for warning in warnings.see({"step": number} | GOOD | change)]
    return told, warnings


# ---------------------------------------------------------------- the description


def test_each_figure_is_described_once_and_briefly():
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    for figure in FIGURES:
        assert figure.meaning.endswith(".")
        assert max(len(figure.meaning), len(figure.made)) < CHARS_MAX
        assert described(figure.name + ("x" if figure.name.endswith("/") else "")) is figure


def test_the_page_of_figures_is_as_the_description_writes_it():
    text = RUN_PAGE.read_text()
    assert run_page(text) == text, "run python -m tests.figures"


# ---------------------------------------------------------------- rules of thumb


def test_a_good_run_has_no_warning():
    told, warnings = watched(*[{}] * 10)
    assert (told, warnings.all) == ([], [])


@pytest.mark.parametrize(
    ("change", "patience", "words"),
    [
        ({"truncated": 0.95}, 1, "95 % of responses are cut at tokens_max = 16"),
        ({"equal_groups": 61 / 64, "groups": 64}, 3, "all rewards of 61 of 64 groups are equal since step 1"),
        ({"reward/exact": 0.0, "reward_std/exact": 0.0}, 3, "reward term exact is 0 in every row since step 1"),
        ({"ref_kl": 3.0}, 1, "the KL from the reference explodes: 3 nats a token"),
        ({"rollout_kl": 0.75}, 1, "the trained policy and the one that drew the tokens explodes: 0.75 nats"),
        ({"staleness_mean": 3.5}, 3, "rows are stale: the policy that drew them is 3.5 versions old on average"),
        ({"engine_error": 0.3}, 1, "the engine has other weights than the trainer"),
        ({"policy_movement": 0.6}, 3, "log-probs of tokens that older versions drew have moved by 0.6 nats"),
        ({"clipped_low": 0.3, "clipped_high": 0.2}, 3, "50 % of tokens are clipped"),
        ({"critic/explained_variance": -0.5}, 20, "the critic's values are worse than a constant"),
        ({"dropped/stale": 20}, 3, "20 rows were dropped (stale) while 64 were trained"),
        ({"loss": None, "ratio": None}, 1, "figures are not finite, and written as null (loss, ratio)"),
    ],
)
def test_each_rule_that_breaks_is_told_in_words(change, patience, words):
    steps = max(5, patience)
    told, warnings = watched(*[change] * steps)
    ((first, text),) = told
    assert first == patience
    assert words.replace(" since step 1", "") in text.replace(" since step 1", "")
    (warning,) = warnings.all
    assert (warning.first, warning.last, warning.steps) == (1, steps, steps)
    assert warning.text_of_all.startswith(warning.wrong + f" in {steps} steps, 1 to {steps}: ")
    assert (" since step 1: " in warning.text, warnings.recent) == (True, [warning.text])


def test_a_term_without_weight_may_be_the_same_in_every_row():
    dead = {"reward/my:exact": 0.0, "reward_std/my:exact": 0.0}
    terms = 'reward=[{function="my:length"}, {function="my:exact", weight=%d}]'
    for weight, told in ((0, 0), (1, 1)):
        warnings = RunWarnings(job("grpo", terms % weight))
        assert sum(len(warnings.see({"step": number} | GOOD | dead)) for number in range(1, 6)) == told


def test_an_engine_error_of_few_tokens_is_not_judged():
    told, _ = watched({"engine_error": 0.3, "own_tokens": 29}, {"engine_error": 0.3, "own_tokens": 1234})
    assert [(step, "log-probs of 1,234 tokens" in text) for step, text in told] == [(2, True)]


def test_equal_rewards_are_told_of_rows_without_groups():
    (_, text), *others = watched(*[{"reward_std": 0.0, "reward": 0.25, "equal_groups": None}] * 3)[0]
    assert not others or "not finite" in others[0][1]
    warnings = RunWarnings(job("reinforce_pp"))
    for number in (1, 2, 3):
        told = warnings.see({"step": number, "rows": 8, "reward": 0.25, "reward_std": 0.0})
    assert told[0].text.startswith("the rewards of all rows are 0.25 since step 1")
    assert "null" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ref_kl": 0.25}, "the KL from the reference explodes: 0.25 nats a token, from 0.01"),
        ({"entropy": 0.01}, "the entropy fell from 1 to 0.01 nats a token"),
    ],
)
def test_a_change_is_judged_by_the_steps_before(change, words):
    told, _ = watched(*[change] * 3, good=5)
    assert words in told[0][1]
    assert watched(*[change] * 3, good=2)[0] == []


def test_the_steps_before_are_bounded():
    _, warnings = watched(*[{}] * (EARLIER_STEPS + 5))
    assert len(warnings._earlier) == EARLIER_STEPS


# ---------------------------------------------------------------- when it is told


def test_a_warning_is_told_once_and_again_only_after_a_pause():
    changes = [{"truncated": 0.9}] * (2 * PAUSE_STEPS + 1)
    told, warnings = watched(*changes)
    assert [number for number, _ in told] == [1, PAUSE_STEPS + 1, 2 * PAUSE_STEPS + 1]
    assert warnings.all[0].steps == len(changes)


def test_a_warning_ends_and_one_that_comes_and_goes_is_not_told_each_time():
    bad = {"truncated": 0.9}
    told, warnings = watched(bad, {}, bad, {}, bad, bad, {})
    assert [number for number, _ in told] == [1]
    (warning,) = warnings.all
    assert warnings.recent == [warning.text_of_all]
    assert (warning.since, warning.first, warning.last, warning.steps) == (5, 1, 6, 4)
    equal = {"equal_groups": 1.0}
    assert watched(equal, equal, {}, equal, equal)[0] == []


# ---------------------------------------------------------------- where it is seen


def recorded(folder, *changes):
    heard = []
    with RunRecord(folder, job("grpo")) as record:
        for number, change in enumerate(changes, 1):
            heard += record.add("train-0", step(number, **change))
    return record, heard


def test_an_evaluation_that_comes_late_says_whose_weights_it_has():
    output = io.StringIO()
    lines = Lines(Console(file=output, width=200), steps=8)
    values = {"when": "during", "step": 4, "version": 8, "asked_version": 4, "rows": 8, "loss": 2.0}
    lines("evaluate-0", Figures(kind="evaluation", at=1.0, values=values))
    assert output.getvalue() == "held-out, after step 4 (late: of version 8, not 4): loss 2.000, 8 rows\n"


def test_warnings_are_in_the_output_the_page_and_the_summary(tmp_path):
    record, heard = recorded(tmp_path, {}, {"truncated": 0.95}, {"truncated": 0.95})
    output = io.StringIO()
    lines = Lines(Console(file=output, width=40), steps=3)
    for event in heard:
        lines("train-0", event)
    words = "95 % of responses are cut at tokens_max = 16"
    assert f"warning, step 2: {words}: raise it" in output.getvalue()
    assert output.getvalue().count(words) == 1
    assert [line["figure"] for line in lines_of(tmp_path / "warnings.jsonl")] == ["truncated"]
    (shown,) = run_figures(record).warnings
    assert shown.startswith(f"{words} since step 2")
    summary = summarize(record, job("grpo"), Audit(put=8, live=0, done=8, dropped={}), starts=1, seconds=9.0)
    assert f"{words} in 2 steps, 2 to 3: raise it" in summary.text()
    with RunRecord(tmp_path, job("grpo")) as resumed:
        assert resumed.warnings.all == record.warnings.all
        (event,) = resumed.add("train-0", step(4, truncated=0.95))  # told before: the pause goes on
        assert event.kind == "step"


def test_rows_that_fail_and_processes_that_die_are_in_the_output_a_file_the_page_and_the_summary(tmp_path):
    hangs = "reward my:score did not return within reward.0.timeout_s=1 s; row 7, prompt '2+2?', completion '4'"
    raises = "reward my:score raised ValueError: bad; row 9, prompt '3+3?', completion '6'"
    died = "rollout-0 ended with exit code 1; its first exception was OSError: no offset"
    output = io.StringIO()
    lines = Lines(Console(file=output, width=40), steps=3)
    with RunRecord(tmp_path, job("grpo")) as record:
        heard = record.add("train-0", step(1))
        rows = [{"row": 7, "cause": "hangs", "text": hangs}, {"row": 9, "cause": "raises", "text": raises}]
        heard += record.add("reward-0", Figures(kind=FAILED_ROWS, at=1.0, values={"rows": rows}))
        heard += record.add("rollout-0", Figures(kind=RESTART, at=1.0, values={"text": died, "next": "started again"}))
    for event in heard:
        lines("train-0", event)
    summary = summarize(record, job("grpo"), Audit(put=8, live=0, done=8, dropped={}), starts=1, seconds=9.0).text()
    on_page = run_figures(record).warnings
    for words in (f"{hangs}: the row is dropped", f"{raises}: the row is dropped", f"{died}: started again"):
        assert f"warning, step 2: {words}\n" in output.getvalue()
        assert words in on_page
        assert (
            words.replace(": the row", ", in step 2: the row").replace(": started", ", in step 2: started") in summary
        )
    assert lines_of(tmp_path / "failed_rows.jsonl") == [{"step": 2, **row} for row in rows]
    with RunRecord(tmp_path, job("grpo")) as resumed:
        assert resumed.warnings.all == record.warnings.all
        for row in range(TOLD_MAX + 5):
            told = resumed.add("reward-0", failed_row(row))
        assert (len(told), len(lines_of(tmp_path / "failed_rows.jsonl"))) == (1, TOLD_MAX + 7)
    assert resumed.warnings.all[-1].wrong == (
        f"7 more (of all: 1 hangs, {TOLD_MAX + 6} raises), the last: row {TOLD_MAX + 4}"
    )


def failed_row(row):
    failed = {"row": row, "cause": "raises", "text": f"row {row}"}
    return Figures(kind=FAILED_ROWS, at=1.0, values={"rows": [failed]})


def test_episodes_that_are_tried_again_are_counted_by_cause_in_their_step_and_the_summary(tmp_path):
    with RunRecord(tmp_path, job("grpo")) as record:
        for number, causes in enumerate([["environment_died", "environment_error"], [], ["environment_error"]], 1):
            for cause in causes:
                record.add("play-0", Figures(kind=RETRIED, at=1.0, values={cause: 1}))
            record.add("train-0", step(number))
        summary = summarize(record, job("grpo"), Audit(put=8, live=0, done=8, dropped={}), starts=1, seconds=9.0)
    told = [{name: count for name, count in each.items() if "retried/" in name} for each in lines_of(tmp_path / STEPS)]
    both = {"retried/environment_died": 1, "retried/environment_error": 1}
    assert told == [both, {}, {"retried/environment_error": 1}]
    rates = [each.get("failure_rate/environment_error") for each in lines_of(tmp_path / STEPS)]
    rows = step(1).values["rows"]
    assert rates == [pytest.approx(1 / (rows + 2), abs=1e-6), None, pytest.approx(1 / (rows + 1), abs=1e-6)]
    assert summary.retried == {"environment_died": 1, "environment_error": 2}
    assert "1 environment_died, 2 environment_error" in summary.text()


def test_numbers_that_are_not_finite_are_null_in_the_file_and_told(tmp_path):
    record, heard = recorded(tmp_path, {"loss": math.nan, "gradient_norm": math.inf, "ref_kl": None})
    (line,) = lines_of(tmp_path / "steps.jsonl")
    assert (line["loss"], line["gradient_norm"], line["ref_kl"]) == (None, None, None)
    assert "(ref_kl, loss, gradient_norm)" in heard[1].values["text"]
    assert record.warnings.all[0].figure == NOT_FINITE
    told = []
    logged(lambda number, figures: told.append(figures))("train-0", heard[0])
    assert not {"loss", "gradient_norm", "ref_kl"} & set(told[0])


def test_a_queue_without_a_waiting_row_is_no_trouble(tmp_path):
    _, heard = recorded(tmp_path, {"queue_age_s": {"train": None}})
    assert [event.kind for event in heard] == ["step"]


def test_the_speed_of_generation_is_of_the_time_that_generators_worked(tmp_path):
    with RunRecord(tmp_path, job("grpo")) as record:
        for number in (0, 1):
            record.add(f"rollout-{number}", TimeSpan(name=WORK, start=1.0, end=3.0 + number, rows=8))
        record.add("reward-0", TimeSpan(name=WORK, start=1.0, end=99.0, rows=8))
        for _ in (1, 2):
            record.add("train-0", step(1, length_mean=10.0))
            assert record.steps[1].get("generation_tokens_per_s") == (640 / 2.5 if _ == 1 else None)


def test_the_page_has_a_curve_and_the_meaning_of_each_figure(tmp_path):
    steps = [{"truncated": number / 1000, "lr": 1.0} for number in range(300)]
    table = run_figures(recorded(tmp_path, *steps)[0])
    drawn = {curve.name: curve for curve in table.curves}
    assert "lr" not in drawn
    assert drawn["truncated"].unit == "share"
    assert len(drawn["truncated"].at) <= POINTS_MAX
    assert (drawn["truncated"].at[-1], drawn["truncated"].values[0]) == (300, 0.001)
    assert [line[0] for line in table.lines] == list(drawn)
    assert table.lines[list(drawn).index("truncated")][:3] == ("truncated", "share", "0.299")
    assert len(curves([{name.rstrip("/") + "/x": 1.0 for name in (figure.name for figure in FIGURES)}])) < CURVES_MAX


def test_the_page_is_told_once_a_period_and_at_the_end(tmp_path):
    now = [0.0]
    with tq.connect("embedded") as queue, RunRecord(tmp_path, job("grpo")) as record:
        page = RunPage(queue, clock=lambda: now[0])
        page.show(record)
        for number, at in ((1, 0.0), (2, 0.5), (3, 2.0), (4, 2.5)):
            now[0] = at
            record.add("train-0", step(number))
            page.show(record)
        version, table = newest(queue, CHANNEL, FigureTable)
        assert (version, table.curves[0].at) == (1, (1, 2, 3))
        page.show(record, at_once=True)
        page.show(record, at_once=True)
        assert newest(queue, CHANNEL, FigureTable)[0] == 2


def test_a_page_that_takes_long_is_made_less_often(tmp_path, monkeypatch):
    now, made = [0.0], []

    def publish(queue, channel, table):
        now[0] += 0.5
        made.append(now[0])

    monkeypatch.setattr("transferqueue.workflows.job.run.run_page.publish", publish)
    with RunRecord(tmp_path, job("grpo")) as record:
        page = RunPage(None, clock=lambda: now[0])
        for number in range(1, 31):
            record.add("train-0", step(number))
            page.show(record)
            now[0] += 1.0
    assert len(made) == 3  # of 0.5 s each, in 30 s


def test_a_logger_of_ones_own_is_found_before_the_run_starts(tmp_path, monkeypatch):
    (tmp_path / "own_logs.py").write_text("def log(step, figures):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotFound, match=r"log\.to\.1 own_logs:gone: the module has no gone; it has log"):
        preflight(job("grpo", 'log.to=["own_logs:log", "own_logs:gone"]'))
    with pytest.raises(NotFound, match=r"my_rewards|models/tiny"):  # what it lacks besides
        preflight(job("grpo", 'log.to=["own_logs:log"]'))


# ---------------------------------------------------------------- figures of rows


def test_figures_of_rows_are_those_of_their_columns():
    columns = {
        "response_ids": [np.zeros(size, np.int32) for size in (2, 4, 6, 8)],
        "finish_reason": ["stop", "stop", "length", "length"],
        "rewards": np.array([0.1, 0.1, 0.0, 1.0], np.float32),
        REWARD_TERMS: [np.array([value, 0.0], np.float32) for value in (np.nan, 1.0, 2.0, 3.0)],
    }
    fields = [
        tq.Field("response_ids", "int32", (None,)),
        tq.Field("finish_reason", "str"),
        tq.Field("rewards", "float32"),
        tq.Field(REWARD_TERMS, "float32", (None,)),
    ]
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", fields=fields, tasks=[tq.Task("train", needs=list(columns))])
        table.put(group_id=[0, 0, 1, 1], group_size=2, policy_version=0, **columns)
        with table.lease("train", rows=4) as batch:
            found = row_figures([batch], ("exact", "dead"))
    assert (found["rows"], found["groups"], found["equal_groups"], found["group_std"]) == (4, 2, 0.5, 0.25)
    assert (found["length_mean"], found["length_p50"], found["length_max"]) == (5.0, 5.0, 8)
    assert (found["truncated"], found["staleness"]) == (0.5, {"0": 4})
    assert (found["reward/exact"], found["reward/dead"], found["reward_std/dead"]) == (2.0, 0.0, 0.0)
    assert found["reward"] == pytest.approx(0.3)
    assert "token_staleness" not in found
    assert all(described(name) for name in found)


def test_tokens_by_staleness_are_those_that_weights_drew_and_are_described():
    """Rows that changed weights in flight; tokens of an environment (-1) are not counted."""
    versions = [[0, 0, 1], [-1, 2], [0, -1, 3, 3]]
    fields = [tq.Field("response_ids", "int32", (None,)), tq.Field("token_versions", "int32", (None,))]
    columns = {field.name: [np.array(row, np.int32) for row in versions] for field in fields}
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", fields=fields, tasks=[tq.Task("train", needs=list(columns))])
        table.put(policy_version=[0, 2, 0], **columns)
        table.advance(2)
        with table.lease("train", rows=3) as batch:
            found = row_figures([batch], ())
    assert found["staleness"] == {"0": 1, "2": 2}
    assert found["token_staleness"] == {"0": 3, "1": 1, "2": 3}
    assert described("token_staleness").by_value


def test_tokens_that_updates_have_read_again_are_a_figure_with_its_rule(tmp_path):
    with RunRecord(tmp_path, job("grpo")) as record:
        for number, reports in enumerate(((30, 40), (), (5,)), 1):
            for tokens in reports:
                record.add("rollout-0", Figures(kind=PREFILLED, at=1.0, values={"tokens": tokens}))
            record.add("train-0", step(number, tokens=80.0))
        summary = summarize(record, job("grpo"), Audit(put=8, live=0, done=8, dropped={}), starts=1, seconds=9.0)
    assert [line["prefilled_again"] for line in lines_of(tmp_path / STEPS)] == [70, 0, 5]
    assert summary.prefilled_again == 75
    assert "75 tokens of running rows" in summary.text()
    many = {"prefilled_again": 100, "length_mean": 10.0}
    told, _ = watched(many, many, many | {"prefilled_again": 60}, many, many, many)
    words = (
        "engines read 100 tokens again because weights changed, while 640 were trained since step 4: set "
        'weights.kv = "salt", which keeps their caches, or raise weights.every'
    )
    assert told == [(6, words)]
