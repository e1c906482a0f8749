"""Trainers of other projects, whole: verl 0.9.1 over Ray workers on a CPU, on the original and on the drop-in.
`make test-stacks` runs it.

What a user of them would patch is patched: `examples/stacks/verl.patch` is applied to the verl that runs on the
drop-in.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("torchdata") is None:
    pytest.skip("make test-stacks installs verl and its trainer", allow_module_level=True)

from bench.stacks import report
from bench.stacks.verl_job import Outcome, Package, VerlJob, prepare, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 2
OURS = "transferqueue.adapters.transfer_queue"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, VerlJob.warm_up_steps)
    return folder


def trained(job: VerlJob, package: Package, folder: Path, prepared: Path) -> Outcome:
    outcome = run(job, package, folder / package, prepared)
    told = "\n".join((*report.lines(outcome), *outcome.log.read_text(errors="replace").splitlines()[-60:]))
    assert outcome.exit_code == 0, told
    assert len(outcome.steps) == job.steps, told
    return outcome


def test_the_drop_in_and_the_original_train_the_same(prepared: Path, tmp_path: Path) -> None:
    """Two steps of GRPO with two FSDP2 workers and a reference model: every process on the right package, and equal
    results."""
    job = VerlJob(steps=STEPS)
    original, ours = (trained(job, package, tmp_path, prepared) for package in ("original", "ours"))
    assert {each.package for each in original.recordings if each.calls} == {"transfer_queue"}
    assert {each.package for each in ours.recordings if each.calls} == {OURS}
    for step in ours.steps:
        assert step["actor/grad_norm"] > 0, "the rewards of no group differ, so nothing was learned"
        assert step["training/rollout_probs_diff_max"] < 1e-4, "the rollout has the trainer's weights"
    assert report.difference(original, ours) < 1e-3
