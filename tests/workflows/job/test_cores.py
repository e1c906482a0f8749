"""Threads of the processes of a job that compute on the CPU."""

from __future__ import annotations

import pytest

from tests.workflows.job import jobs
from transferqueue.workflows.job.devices.cores import threads
from transferqueue.workflows.job.devices.model_sizes import ModelSizes
from transferqueue.workflows.job.devices.placement import FoundDevice, device_map
from transferqueue.workflows.job.graph import stage_jobs
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import GIB

WHOLE, KL = "trainer.stream=off", "algorithm.kl=0.1"
TWO = 'engine=[{kind="transformers", count=2}]'


def variables_of(job: Job, cores: int, *devices: FoundDevice) -> dict[str, dict[str, str]]:
    placement = device_map(job, stage_jobs(job), devices, {job.model.path: ModelSizes(parameters=1000)})
    return threads(placement.processes, job, cores)


def of(job: Job, cores: int, *devices: FoundDevice) -> dict[str, int]:
    found = variables_of(job, cores, *devices)
    return {label: int(variables["OMP_NUM_THREADS"]) for label, variables in found.items()}


@pytest.mark.parametrize(
    ("changes", "cores", "wanted"),
    [
        (["pacing.mode=colocated"], 8, {"train-0": 8}),
        (["pacing.mode=sync", WHOLE], 8, {"rollout-0": 8, "train-0": 8}),
        (["pacing.mode=sync", WHOLE, TWO], 8, {"rollout-0": 4, "rollout-1": 4, "train-0": 8}),
        (["pacing.mode=sync", WHOLE, KL], 8, {"rollout-0": 4, "reference-0": 4, "train-0": 8}),
        (["pacing.mode=colocated", KL], 8, {"reference-0": 4, "train-0": 4}),
        (["pacing.mode=sync"], 8, {"rollout-0": 4, "train-0": 8}),
        (["pacing.mode=async", TWO], 8, {"rollout-0": 2, "rollout-1": 2, "train-0": 8}),
        (["pacing.mode=async", TWO], 2, {"rollout-0": 1, "rollout-1": 1, "train-0": 2}),
        (
            ["pacing.mode=async", "trainer.ranks=4", "trainer.parallel=ddp"],
            8,
            {"rollout-0": 1, **{f"train-{rank}": 2 for rank in range(4)}},
        ),
        (["pacing.mode=delayed", 'evaluation.path="held"'], 8, {"rollout-0": 4, "train-0": 8, "evaluate-0": 4}),
    ],
)
def test_trainers_divide_the_cores_and_so_do_those_that_work_at_once(
    changes: list[str], cores: int, wanted: dict[str, int]
) -> None:
    assert of(jobs.job("grpo", *changes), cores) == wanted


def test_a_process_on_a_gpu_takes_no_cores_from_others() -> None:
    gpu = FoundDevice(name="0", total=8 * GIB, free=8 * GIB)
    assert of(jobs.job("grpo", "trainer.devices=cpu"), 8, gpu) == {"train-0": 8}  # the engine is on the GPU


@pytest.mark.parametrize(("changes", "sleep"), [(["pacing.mode=async"], True), (["pacing.mode=sync", WHOLE], False)])
def test_threads_of_a_trainer_sleep_while_they_wait_where_engines_work_beside_it(
    changes: list[str], sleep: bool
) -> None:
    found = variables_of(jobs.job("grpo", *changes), 8)
    assert (found["train-0"].get("OMP_WAIT_POLICY") == "PASSIVE") is sleep
    assert "OMP_WAIT_POLICY" not in found["rollout-0"]


def test_threads_of_a_trainer_without_neighbours_do_not_sleep() -> None:
    gpu = FoundDevice(name="0", total=8 * GIB, free=8 * GIB)
    found = variables_of(jobs.job("grpo", "pacing.mode=async", "trainer.devices=cpu"), 8, gpu)
    assert found == {"train-0": {"OMP_NUM_THREADS": "8"}}
