"""Rows that are trained in several steps, in a whole job: it repeats whatever dies, each use is counted, and each step
can be computed again."""

import os
import signal

import pytest

from tests.workflows.job import short_run
from tests.workflows.job.short_run import ROWS, STEPS, final_weights, finished, lines, train, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("transformers", exc_type=ImportError)

WORDS = ("job.toml", "--json", "--set", 'evaluation.path=""')
OF_STEP = ROWS // STEPS
USES = {
    "train": {"trained": ROWS, "dropped": 0},
    "train_use_2": {"trained": ROWS - OF_STEP, "dropped": OF_STEP},
    "train_use_3": {"trained": ROWS - 2 * OF_STEP, "dropped": 2 * OF_STEP},
}
"""Rows of the last step are trained once, and those of the step before twice."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A job that generates ahead with several processes, rows with three uses, and its undisturbed run in ``whole``."""
    place = short_run.make_place(tmp_path_factory.mktemp("job"), "async-uses")
    assert balanced(finished(train(place, *WORDS, "--out", "whole")))
    assert [step["reused_rows"] for step in lines(place / "whole" / "steps.jsonl")] == [0, 8, 16, 16]
    return place


def balanced(summary):
    """Whether all rows were put, and each use has trained and dropped the rows that it must."""
    ended = (summary["rows_put"], summary["rows_done"], summary["rows_dropped"])
    return summary["uses"] == USES and ended == (ROWS, ROWS - 2 * OF_STEP, {"surplus_use": 2 * OF_STEP})


def test_each_step_comes_out_equal_with_the_rows_of_earlier_ones(place):
    from transferqueue.workflows.job.run.replay import replay

    for step in (2, STEPS):
        outcome = replay(place / "whole", step)
        assert outcome.differs is None, outcome.text
        assert {"rows", "advantage", "loss", "gradient", "weights"} <= set(outcome.compared)


@pytest.mark.parametrize(
    "names",
    [
        ("train", "rollout"),
        *(pytest.param(names, marks=pytest.mark.long) for names in (("server",), ("reward", "train"))),
    ],
)
def test_a_run_uses_each_row_as_often_though_its_processes_die(place, tmp_path, names):
    folder = tmp_path / "run"
    process = train(place, *WORDS, "--out", str(folder))
    wait_for(process, folder / "steps.jsonl", 2)
    for name in names:
        os.kill(short_run.pid_of(process.pid, name), signal.SIGKILL)
    assert balanced(finished(process))
    assert final_weights(folder) == final_weights(place / "whole")


def test_a_run_goes_on_with_the_uses_that_its_rows_have_left(place, tmp_path):
    folder = tmp_path / "run"
    process = train(place, *WORDS, "--out", str(folder))
    wait_for(process, folder / "steps.jsonl", 3)
    for pid in [*short_run.descendants(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    resumed = finished(train(place, *WORDS, "--resume", "--out", str(folder)))
    assert (resumed["starts"], resumed["steps"]) == (2, STEPS)
    assert balanced(resumed)
    assert final_weights(folder) == final_weights(place / "whole")
