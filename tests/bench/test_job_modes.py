"""The comparison of a job's modes with a plain loop: ratios are of runs of the same turn."""

from __future__ import annotations

from bench.job_modes import PLAIN, ROWS, CaseRun, results


def test_ratios_are_of_the_same_turn() -> None:
    plain = [CaseRun([1.0, 1.0, 4.0], 9.0), CaseRun([2.0, 2.0, 2.0], 12.0)]
    found = {result.name: result for result in results({PLAIN: plain, "async": [CaseRun([0.5], 5.0)] * 2})}
    assert found["plain loop: samples a second"].median == ROWS * 0.75
    ratio = found["async: over the plain loop"]
    assert (ratio.n, ratio.median) == (2, 3.0)
    assert "plain loop: over the plain loop" not in found
