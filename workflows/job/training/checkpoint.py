"""Checkpoints of a trainer: directories that are complete or absent, without pickle.

``DIRECTORY/step-00000040/``::

    model.safetensors, config.json, …           a model directory (`model_files`), in the dtype that is trained
    adapter_model.safetensors, …                instead, of a model with adapters: peft's directory of them
    trainer/optimizer.safetensors               ``name/exp_avg``, ``name/exp_avg_sq``, ``name/step`` of each trained
                                                weight; random generators
    state.json                                  step, version of its weights, position in the data, its writer

One process writes the directory, whole, whatever number of ranks trains. So transformers, vLLM and `model.path` load
it as it is; loaders that take each ``*.safetensors`` of a directory for weights see the weights alone.

A checkpoint is written into a directory beside it, whose files and names are synchronised with the disk; then the
directory is renamed. ``state.json`` has the checksum of each file, which is compared before anything is loaded. A
reader takes the newest directory of that form, so a death at any moment leaves the checkpoint before or this one, never
a part. The schedule has no state: the rate follows from the step.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transferqueue.adapters.scoring.lora import has_lora, peft_name, whole
from transferqueue.errors import Corruption, NotFound, UsageError, listing
from transferqueue.limits import MIB
from transferqueue.storage.memory.checksum import checksum
from transferqueue.transport.system.private_files import sync_path
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job.run_files import STATE, checkpoint_path, checkpoint_steps
from transferqueue.workflows.job.training.gather import StreamPosition
from transferqueue.workflows.job.training.learner import StepLearner

FORMAT: Final = 2
WEIGHTS, ADAPTERS, TRAINER = "model.safetensors", "adapter_model.safetensors", "trainer"
_OPTIMIZER: Final = f"{TRAINER}/optimizer.safetensors"
_REMEDY: Final = (
    "put it back, or start a new run with checkpoint.resume at an older checkpoint: rows of its steps are final in "
    "this run"
)
_RANDOM: Final = "random/"


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

        Under FSDP2 every rank calls this; rank 0 writes. Blocks until the checkpoint would survive a loss of power.
        `StageFailedInProcess` if it cannot be written: what there is of it is removed, and the checkpoints before stay.
        """
        started = time.monotonic()
        tensors = learner_tensors(learner)
        if not learner.ranks.leads:
            return {}
        state = CheckpointState(step=learner.steps_taken, version=version, position=position)
        final = self.path(state.step)
        if not final.exists():
            weights, optimizer = tensors
            self._write_or_remove(final, {weights_file(learner.model): weights, _OPTIMIZER: optimizer}, state)
        self._prune()
        nbytes = sum(file.stat().st_size for file in final.rglob("*") if file.is_file())
        return {"step": state.step, "seconds": time.monotonic() - started, "bytes": nbytes}

    def _write_or_remove(self, final: Path, files: Mapping[str, dict[str, Tensor]], state: CheckpointState) -> None:
        unfinished = final.with_name(f".{final.name}.{os.getpid()}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write(unfinished, final, files, state)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            nbytes = sum(tensor.nbytes for part in files.values() for tensor in part.values())
            raise StageFailedInProcess(
                f"the checkpoint of step {state.step}, {nbytes / MIB:,.1f} MiB, cannot be written to "
                f'"{self.directory}": {error}; make room there, and go on '
                "with train --resume"
            ) from error

    def _write(
        self, unfinished: Path, final: Path, files: Mapping[str, dict[str, Tensor]], state: CheckpointState
    ) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / TRAINER).mkdir(parents=True)
        self._describe(unfinished)
        for name, part in files.items():
            save_file(part, unfinished / name, metadata={"format": "pt"})
        state = msgspec.structs.replace(state, checksums={name: _checksum(unfinished / name) for name in files})
        (unfinished / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        sync_tree(unfinished)
        unfinished.rename(final)
        sync_path(self.directory)

    def _prune(self) -> None:
        steps = self.steps()
        for step in set(steps[: -self._keep]).difference(self._keeps(steps)):
            shutil.rmtree(self.path(step))
        for left in self.directory.glob(".step-*"):  # of a process that died
            shutil.rmtree(left)


def load_checkpoint(path: Path, learner: StepLearner) -> CheckpointState:
    """Restore the learner from the checkpoint at `path`. Returns its description.

    `NotFound` if it is not complete, `Corruption` if a file cannot be read, `UsageError` if it is of another model.
    """
    state = checkpoint_state(path)
    weights, optimizer = (load_tensors(path, state, name) for name in (weights_name(state), _OPTIMIZER))
    set_weights(learner.model, weights, path)
    _set_optimizer(learner, optimizer)
    learner.steps_taken = state.step
    return state


def load_tensors(path: Path, state: CheckpointState, name: str) -> dict[str, Tensor]:
    """Return the tensors of a file of the checkpoint at `path`, once its checksum is verified. Raises `Corruption`."""
    try:
        _verify(path, state, name)
        tensors: dict[str, Tensor] = load_file(path / name)
    except Corruption:
        raise
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: an empty file cannot be mapped
        raise Corruption(f'checkpoint "{path}" cannot be read: {error}; {_REMEDY}') from error
    return tensors


def weights_file(model: nn.Module) -> str:
    """Return the name of the file with the weights of `model`."""
    return ADAPTERS if has_lora(model) else WEIGHTS


def weights_name(state: CheckpointState) -> str:
    """Return the name of the file with the weights of a checkpoint."""
    return ADAPTERS if ADAPTERS in state.checksums else WEIGHTS


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


def _verify(path: Path, state: CheckpointState, name: str) -> None:
    """Raise `Corruption` for a file that is not as it was written."""
    found, written = _checksum(path / name), state.checksums.get(name, "none")
    if found != written:
        raise Corruption(
            f'"{path / name}" is damaged: its checksum is {found}, and was {written} when it was written; {_REMEDY}'
        )


def sync_tree(directory: Path) -> None:
    """Block until all files and names below `directory` are on disk."""
    for file in (*directory.rglob("*"), directory):
        sync_path(file)


def _checksum(file: Path) -> str:
    return f"{checksum(np.memmap(file, np.uint8, mode='r')):016x}"


# ---------------------------------------------------------------- tensors


def learner_tensors(learner: StepLearner) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights, and the state of optimizer and random generators, by name, as whole tensors in host memory. Only
    rank 0 keeps them; the others give their shards, and get nothing."""
    names, leads = _names(learner.model), learner.ranks.leads
    model, optimizer = _saved_weights(learner.model), _optimizer_entries(learner, names)
    gathered = [_gathered(part, keep=leads) for part in (model, optimizer)]
    return gathered[0], {**gathered[1], **_random_states()}


def _optimizer_entries(learner: StepLearner, names: Mapping[int, str]) -> dict[str, Any]:
    return {
        f"{names[id(parameter)]}/{entry}": value
        for parameter in learner.trained
        for entry, value in learner.optimizer.state.get(parameter, {}).items()
    }


def _gathered(tensors: Mapping[str, Any], *, keep: bool) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for name, value in tensors.items():
        gathered = _host(value, keep=keep)
        if keep:
            kept[name] = gathered
    return kept


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy the weights of the checkpoint at `path` into `model`. `UsageError` if they are of another model."""
    own = _saved_weights(model)
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in weights.items()}:
        differing = sorted(own.keys() ^ weights.keys()) or [n for n in own if own[n].shape != weights[n].shape]
        raise UsageError(
            f'checkpoint "{path}" is of another model: {listing(differing)} differ; give its model, or leave '
            "checkpoint.resume out"
        )
    for name, value in own.items():
        _copy(value, weights[name])


def _set_optimizer(learner: StepLearner, optimizer: Mapping[str, Tensor]) -> None:
    names = _names(learner.model)
    for parameter in learner.trained:
        prefix = f"{names[id(parameter)]}/"
        entries = {name.removeprefix(prefix): value for name, value in optimizer.items() if name.startswith(prefix)}
        if entries:
            learner.optimizer.state[parameter] = {name: _like(parameter, value) for name, value in entries.items()}
    _set_random_states(optimizer)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights that a checkpoint has, by name: all, or of a model with adapters those that are trained, by peft's
    names. Tied ones, which are one parameter, by their first name alone."""
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    saved = {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}
    if not has_lora(model):
        return saved
    return {peft_name(name): tensor for name, tensor in saved.items() if tensor.requires_grad}


def _host(value: Any, *, keep: bool) -> Tensor:
    """Gather a value from all ranks; to host memory if it is kept."""
    tensor: Tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    gathered = whole(tensor).detach()
    return gathered.cpu().contiguous() if keep else gathered


def _copy(into: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        into.copy_(_like(into, value))


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return `value`, which is whole, where and as `tensor` is: on its device, and sharded if it is."""
    if value.ndim == 0:
        return value.clone()
    from torch.distributed.tensor import DTensor, distribute_tensor

    placed = value.to(tensor.device)
    if isinstance(tensor, DTensor):
        return distribute_tensor(placed, tensor.device_mesh, tensor.placements)
    return placed


def _random_states() -> dict[str, Tensor]:
    states = {f"{_RANDOM}cpu": torch.get_rng_state()}
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        states[f"{_RANDOM}cuda{device}"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        if name == f"{_RANDOM}cpu":
            torch.set_rng_state(state)
        elif name.startswith(f"{_RANDOM}cuda") and int(name[len(_RANDOM) + 4 :]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name[len(_RANDOM) + 4 :]))
