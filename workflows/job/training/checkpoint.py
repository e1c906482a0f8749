"""Checkpoints of a trainer: directories that are complete or absent, without pickle.

``DIRECTORY/step-00000040/``::

    model.safetensors, config.json, …           a model directory (`model_files`), in the dtype that is trained
    adapter_model.safetensors, …                instead, of a model with adapters: peft's directory of them
    trainer/optimizer.safetensors               ``name/exp_avg``, ``name/exp_avg_sq``, ``name/step`` of each trained
                                                weight; random generators
    state.json                                  step, version of its weights, position in the data, its writer

Under ``fsdp2`` each rank writes files of its own (``model-00001-of-00008.safetensors`` with an index,
``trainer/optimizer-00001-of-00008.safetensors``), and none has the whole model or its moments in memory
(`checkpoint_files`). Any number of ranks goes on from them, and transformers, vLLM and `model.path` load the directory
as it is.

1. The ranks write into a directory beside the checkpoint's place, which they share. Rank 0 renames it once the files of
   all are on the disk. A reader takes the newest directory with a checkpoint's name, so a death at any moment leaves
   the checkpoint before or this one, never a part.
2. What fails on one rank is raised by all, and the directory is removed.
3. ``state.json`` has the checksum of each file with tensors. The ranks share the work of comparing them, before any
   loads something. The schedule has no state: the rate follows from the step.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError

from transferqueue.adapters.weight_files import TensorFiles
from transferqueue.errors import Corruption, NotFound, UsageError
from transferqueue.limits import MIB
from transferqueue.storage.memory.checksum import checksum
from transferqueue.transport.system.private_files import sync_path
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job.run_files import STATE, checkpoint_path, checkpoint_steps
from transferqueue.workflows.job.training.checkpoint_files import (
    TRAINER,
    checkpoint_bytes,
    set_moments,
    set_weights,
    write_tensors,
    write_weights_index,
)
from transferqueue.workflows.job.training.gather import StreamPosition
from transferqueue.workflows.job.training.learner import StepLearner
from transferqueue.workflows.job.training.ranks import ALONE, Ranks

FORMAT: Final = 2
_REMEDY: Final = (
    "put it back, or start a new run with checkpoint.resume at an older checkpoint: rows of its steps are final in "
    "this run"
)


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a checkpoint. step: of the trainer. version: of its weights. position: which places of the
    data were trained.

    checksums: of the other files by name, xxh3-64 in hexadecimal.
    """

    step: int
    version: int
    position: StreamPosition = StreamPosition()
    checksums: dict[str, str] = {}
    format: int = FORMAT
    torch: str = str(torch.__version__)


class Checkpoints:
    """The checkpoints of one trainer in `directory`, the newest `keep` of them. keeps: which of the steps stay beside
    them. describe: writes into a directory what a model has beside its weights."""

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        *,
        keeps: Callable[[Sequence[int]], Collection[int]] = lambda steps: (),
        describe: Callable[[Path], None] = lambda directory: None,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: a trainer that dies could not go on; keep 1 checkpoint or more")
        self.directory, self._keep, self._keeps, self._describe = directory, keep, keeps, describe

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, ascending."""
        return checkpoint_steps(self.directory)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return checkpoint_path(self.directory, step)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def save(self, learner: StepLearner, version: int, position: StreamPosition) -> dict[str, float]:
        """Write a checkpoint of the learner as it is now, then remove those beyond `keep`. Returns its step, seconds
        and bytes.

        Every rank calls this. Blocks until the checkpoint would survive a loss of power. `StageFailedInProcess` on all
        ranks if it cannot be written: what there is of it is removed, and the checkpoints before stay.
        """
        started = time.monotonic()
        state = CheckpointState(step=learner.steps_taken, version=version, position=position)
        final = self.path(state.step)
        try:
            self._write(learner, state, final)
        except OSError as error:
            raise StageFailedInProcess(
                f"the checkpoint of step {state.step}, {checkpoint_bytes(learner) / MIB:,.1f} MiB, cannot be written "
                f'to "{self.directory}": {error}; make room there, and go on with train --resume'
            ) from error
        if not learner.ranks.leads:
            return {}
        self._prune()
        nbytes = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
        return {"step": state.step, "seconds": time.monotonic() - started, "bytes": nbytes}

    def _write(self, learner: StepLearner, state: CheckpointState, final: Path) -> None:
        ranks = learner.ranks
        unfinished = _on_all(ranks, lambda: self._begun(final) if ranks.leads else "")[0]
        if not unfinished:
            return
        place = self.directory / unfinished
        try:
            written = _on_all(ranks, lambda: _summed(place, write_tensors(place, learner)))
            sums = {name: found for each in written for name, found in each.items()}
            _on_all(ranks, lambda: self._finish(place, final, learner, state, sums) if ranks.leads else None)
        finally:
            if ranks.leads:
                shutil.rmtree(place, ignore_errors=True)

    def _begun(self, final: Path) -> str:
        """Make the directory that becomes `final`. Returns its name; "" if the checkpoint is there already."""
        if final.exists():
            return ""
        unfinished = final.with_name(f".{final.name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / TRAINER).mkdir(parents=True)
        return unfinished.name

    def _finish(
        self, place: Path, final: Path, learner: StepLearner, state: CheckpointState, sums: dict[str, str]
    ) -> None:
        if away := [name for name in sums if not (place / name).is_file()]:
            raise OSError(f'rank 0 does not see "{away[0]}", which another rank wrote: put the folder on a shared disk')
        self._describe(place)
        write_weights_index(place, learner)
        state = msgspec.structs.replace(state, checksums=sums)
        (place / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        sync_tree(place)
        place.rename(final)
        sync_path(self.directory)

    def _prune(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self._keep]).difference(self._keeps(steps)):
            shutil.rmtree(self.path(step))
        for left in self.directory.glob(".step-*"):  # of a process that died
            shutil.rmtree(left)


def load_checkpoint(path: Path, learner: StepLearner) -> CheckpointState:
    """Restore the learner from the checkpoint at `path`, each rank its part; all call it. Returns its description.

    `NotFound` if it is not complete, `Corruption` if a file cannot be read, `UsageError` if it is of another model.
    """
    state = checkpoint_state(path)
    weights, moments = (checked_files(path, state, named, learner.ranks) for named in _by_kind(state))
    set_weights(learner.model, weights, path)
    set_moments(learner, moments)
    learner.steps_taken = state.step
    return state


def checked_weights(path: Path, state: CheckpointState) -> TensorFiles:
    """Return the weights, or adapters, of the checkpoint at `path`, once the checksums of their files are verified.
    Raises `Corruption`."""
    return checked_files(path, state, _by_kind(state)[0])


def checkpoint_tensors(path: Path, state: CheckpointState) -> TensorFiles:
    """Return all tensors of the checkpoint at `path`, weights and moments, once the checksums of their files are
    verified. Raises `Corruption`."""
    return checked_files(path, state, sorted(state.checksums))


def _by_kind(state: CheckpointState) -> tuple[list[str], list[str]]:
    """The files with weights, and those with moments, each in the order of the ranks that wrote them."""
    names = sorted(state.checksums)
    trainer = [name for name in names if name.startswith(f"{TRAINER}/")]
    return [name for name in names if name not in trainer], trainer


def checked_files(path: Path, state: CheckpointState, names: Sequence[str], ranks: Ranks = ALONE) -> TensorFiles:
    """Return the tensors of these files of the checkpoint at `path`, once their checksums are verified, each by one
    rank; all call it. Raises `Corruption`, on every rank the same."""
    try:
        found = _on_all(ranks, lambda: _summed(path, names[ranks.rank :: ranks.world]))
        for name, now in (entry for each in found for entry in each.items()):
            if now != state.checksums[name]:
                raise Corruption(
                    f'"{path / name}" is damaged: its checksum is {now}, and was {state.checksums[name]} when it was '
                    f"written; {_REMEDY}"
                )
        return TensorFiles(path / name for name in names)
    except (OSError, SafetensorError) as error:
        raise Corruption(f'checkpoint "{path}" cannot be read: {error}; {_REMEDY}') from error


def _on_all(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """Do this rank's part of some work; every rank calls it. Returns what the parts returned, by rank. If one failed,
    every rank raises its `OSError`."""
    own: OSError | None = None
    try:
        done = {"result": work()}
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        own, done = OSError(str(error)), {"error": str(error)}
    outcomes = [json.loads(text) for text in ranks.exchanged(json.dumps(done))]
    errors = [f"rank {rank}: {outcome['error']}" for rank, outcome in enumerate(outcomes) if "error" in outcome]
    if errors:
        raise OSError(errors[0]) if ranks.world > 1 or own is None else own
    return [outcome["result"] for outcome in outcomes]


def _summed(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the checksums of files, by name."""
    return {name: f"{checksum(np.memmap(directory / name, np.uint8, mode='r')):016x}" for name in names}


def checkpoint_state(path: Path) -> CheckpointState:
    """Read the description of a checkpoint. Raises as `load_checkpoint`."""
    try:
        state = msgspec.json.decode((path / STATE).read_bytes(), type=CheckpointState)
    except FileNotFoundError as error:
        raise NotFound(f'"{path}" is no checkpoint: it has no {STATE}; give a directory step-N of a run') from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Corruption(f'"{path / STATE}" cannot be read: {error}; {_REMEDY}') from error
    if state.format != FORMAT:
        raise UsageError(
            f'checkpoint "{path}" has format {state.format}, and this version reads {FORMAT}; use the version that '
            "wrote it"
        )
    return state


def sync_tree(directory: Path) -> None:
    """Block until all files and names below `directory` are on disk."""
    for file in (*directory.rglob("*"), directory):
        sync_path(file)
