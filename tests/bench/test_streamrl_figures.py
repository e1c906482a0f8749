"""StreamRL's figures in simulation: synthetic prompts, dispatch by each prediction, pipelining, elasticity."""

from __future__ import annotations

import numpy as np
import pytest

from bench.published.prompts import as_lengths, by_history, draw_prompts
from bench.published.streamrl import dispatch, elasticity, pipelining
from transferqueue.workflows.dispatch.ranker_accuracy import recall


def test_synthetic_prompts_have_answers_as_long_as_published_and_a_seed_gives_the_same() -> None:
    prompts = draw_prompts(8192, np.random.default_rng(0))
    lengths = prompts.answers(np.random.default_rng(1))
    assert lengths.mean() == pytest.approx(4928, rel=0.03)
    assert lengths.tolist() == prompts.answers(np.random.default_rng(1)).tolist()
    known = as_lengths(prompts.difficulty, lengths)
    for share, published in ((0.2, 0.87), (0.1, 0.82), (0.05, 0.76)):
        assert recall(lengths, known, share) == pytest.approx(published, abs=0.05)
    assert recall(lengths, by_history(prompts, lengths, np.random.default_rng(2)), 0.2) > 0.8


@pytest.mark.slow
def test_the_table_has_every_way_to_predict_and_none_is_later_than_random_order() -> None:
    lines = {line.setting: line.ours for line in dispatch(rows=128, seeds=1, slots=(8,)) if "FIFO" in line.figure}
    assert list(lines) == ["random-FIFO, 8 slots", "ranker, 8 slots", "history, 8 slots", "oracle, 8 slots"]
    assert lines["random-FIFO, 8 slots"] == 1.0
    assert max(lines.values()) == 1.0
    assert lines["oracle, 8 slots"] <= lines["ranker, 8 slots"] + 0.05


@pytest.mark.slow
def test_instances_that_the_controller_adds_keep_steps_short() -> None:
    (line,) = elasticity(rows=128, slots=8)
    assert line.ours > 1.05
    assert line.setting != "4 to 4 instances"


@pytest.mark.slow
def test_pipelining_of_streamrl_gains_in_the_published_order() -> None:
    ours = [line.ours for line in pipelining(rows=64, iterations=2)]
    assert 1 <= ours[0] < ours[1] < ours[2]
