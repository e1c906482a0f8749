"""The comparison of losses sees a wrong clip, a wrong denominator and a wrong gradient, and keeps rows of libraries
that are not here."""

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from bench.agreement.__main__ import BEGIN, END, HEAD, written
from bench.agreement.batches import Case, policy_mean, worst_of_losses
from transferqueue.workflows.job.settings.job import AlgorithmSettings


def mean_of(**settings):
    return lambda drawn: policy_mean(drawn, AlgorithmSettings(kind="dapo", **settings))


def test_differences_are_seen():
    same = Case("same", mean_of(), mean_of(clip_high=0.28))
    assert worst_of_losses(same, batches=3) == (0, 0)
    for other in (mean_of(clip_high=0.3), mean_of(aggregate="rows")):
        loss, gradient = worst_of_losses(Case("other", mean_of(), other), batches=3)
        assert loss > 1e-4
        assert gradient > 1e-3
    loss, gradient = worst_of_losses(Case("detached", mean_of(), lambda drawn: drawn.now_BT.sum() * 0 + 1), batches=1)
    assert gradient > 1e-3


def test_rows_of_other_libraries_stay():
    page = f"top\n{BEGIN}{HEAD}| grpo | trl 1 | 1 | 1 |\n| grpo | verl 1 | 1 | 1 |\n{END}\nend\n"
    row = "| grpo | trl 2 | 2 | 2 |\n"
    assert written(page, {"trl": [row]}) == page.replace("| grpo | trl 1 | 1 | 1 |\n", row)
