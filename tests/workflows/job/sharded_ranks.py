"""One of two ranks that load, train, save and resume a tiny policy under FSDP2: started by test_sharded.py.

python -m tests.workflows.job.sharded_ranks RANK PLACE [CHANGE ...]

PLACE has the model in ``base``, and a checkpoint that one process wrote in ``alone``. The rank writes what it found out
to ``rank-N.json``.
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from tests.workflows.job import jobs
from tests.workflows.job.test_learner import rows
from transferqueue.adapters.scoring import load_sharded
from transferqueue.adapters.weight_files import TensorFiles
from transferqueue.errors import Corruption
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job.data.tokenizer import load_tokenizer
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.training import checkpoint
from transferqueue.workflows.job.training.checkpoint import Checkpoints, load_checkpoint
from transferqueue.workflows.job.training.gather import StreamPosition
from transferqueue.workflows.job.training.learner import StepLearner
from transferqueue.workflows.job.training.model_files import write_model_files
from transferqueue.workflows.job.training.process import policy_learner
from transferqueue.workflows.job.training.ranks import ALONE, Ranks

RANKS = 2
COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "advantages")
OPENED: list[TensorFiles] = []


class Counted(TensorFiles):
    """Files that are remembered, so that what was read of them can be counted."""

    def __init__(self, files: Any) -> None:
        super().__init__(files)
        OPENED.append(self)


def job_at(place: Path, changes: list[str], ranks: Ranks = ALONE) -> Job:
    """The job of the policy in `place`."""
    several = [f"trainer.parallel={ranks.parallel}", f"trainer.ranks={ranks.world}"] if ranks.world > 1 else []
    words = [f'model.path="{place / "base"}"', "model.dtype=float32", "trainer.devices=cpu", "trainer.lr=1e-3"]
    return jobs.job("grpo", *words, *several, *changes)


def step(learner: StepLearner) -> dict[str, float]:
    """Train on this rank's share of the same rows."""
    accumulate(learner)
    return learner.step()


def accumulate(learner: StepLearner) -> None:
    """Compute this rank's share of the gradient of a step."""
    learner.accumulate({name: rows()[name][learner.ranks.rank :: learner.ranks.world] for name in COLUMNS})


def own(learner: StepLearner) -> list[torch.Tensor]:
    """Copies of what this rank has of weights and moments."""
    moments = [state[entry] for state in learner.optimizer.state.values() for entry in sorted(state)]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in [*learner.trained, *moments]]


def held(learner: StepLearner) -> dict[str, int]:
    """Bytes of what this rank has of weights, gradients and moments."""
    moments = [state[name] for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [*learner._wide, *(parameter.grad for parameter in learner.trained)]
    kinds = {"weights": learner.model.parameters(), "gradients": gradients, "moments": moments}
    return {
        name: sum(getattr(each, "_local_tensor", each).nbytes for each in tensors if each is not None)
        for name, tensors in kinds.items()
    }


def bytes_read() -> int:
    """Of the files that were opened since the last call."""
    read = sum(files.bytes_read for files in OPENED)
    OPENED.clear()
    return read


def refused(work: Any, kind: type[Exception]) -> str:
    """The error that `work` ends with."""
    try:
        work()
    except kind as error:
        return str(error)
    return ""


def main() -> None:
    rank, place, changes = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    load_sharded.TensorFiles = checkpoint.TensorFiles = Counted  # type: ignore[misc]
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=RANKS)
    ranks, found = Ranks(rank, RANKS, "fsdp2"), {}
    job = job_at(place, changes, ranks)
    learner = policy_learner(job, ranks)
    found["base"] = bytes_read()
    found["step"] = step(learner)
    checkpoints = Checkpoints(
        place / "ranks",
        describe=lambda folder: write_model_files(folder, learner.model, load_tokenizer(job.model), job.model.path),
    )
    checkpoints.save(learner, 1, StreamPosition())
    accumulate(learner)
    found["held"] = held(learner)
    learner.step()
    whole = own(learner)

    again = policy_learner(job, ranks)
    bytes_read()
    load_checkpoint(checkpoints.path(1), again)
    found["resumed"] = bytes_read()
    step(again)
    found["goes on bit for bit"] = all(map(torch.equal, own(again), whole))
    load_checkpoint(place / "alone" / "step-00000001", again)
    found["of one process"] = bytes_read()
    before = own(again)
    found["damaged"] = refused(lambda: load_checkpoint(place / "damaged", again), Corruption)
    found["unchanged"] = all(map(torch.equal, own(again), before))
    found["disk"] = full_disk(learner, checkpoints, on_this=rank == 1)
    (place / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def full_disk(learner: StepLearner, checkpoints: Checkpoints, *, on_this: bool) -> str:
    """What a checkpoint is refused with that one of the ranks finds no room for. A limit on the size of files stands in
    for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if on_this:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        return refused(lambda: checkpoints.save(learner, 2, StreamPosition()), StageFailedInProcess)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


if __name__ == "__main__":
    main()
