"""The tensors of a checkpoint, as files that one process writes or several ranks together, and any number reads.

1. Each tensor of the weights is whole in one file, as loaders of models expect. Under ``fsdp2`` each rank writes a file
   with an equal share of them: the others send it their rows of a tensor, which go to the file as they come. Adapters
   are one file, rank 0's, since peft reads one.
2. Each rank writes a file with its rows of the moments and its random generators. In the order of the files they are
   the whole moments.
3. A rank that loads reads its own rows, of the weights and out of whichever files of moments have them. So more or
   fewer ranks may load than wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from transferqueue.adapters.scoring.lora import has_lora, peft_name
from transferqueue.adapters.weight_files import (
    WEIGHTS,
    TensorFiles,
    TensorWriter,
    dtype_name,
    numbered_file,
    write_index,
)
from transferqueue.adapters.weight_shards import like, shard_of
from transferqueue.errors import UsageError, listing
from transferqueue.transport.system.private_files import sync_path
from transferqueue.workflows.job.run_files import ADAPTERS
from transferqueue.workflows.job.training.learner import StepLearner

TRAINER: Final = "trainer"
_MOMENTS: Final = f"{TRAINER}/optimizer.safetensors"
_RANDOM: Final = "random/"


def checkpoint_bytes(learner: StepLearner) -> int:
    """Return the bytes of all tensors of a checkpoint."""
    return sum(map(_size, [*saved_weights(learner.model).values(), *_moments(learner).values()]))


def write_tensors(directory: Path, learner: StepLearner) -> list[str]:
    """Write this rank's files of a checkpoint into `directory`. Every rank calls it.

    Returns the names of its files, which are on the disk then. `OSError` if one cannot be written; the other ranks are
    not held up by that.
    """
    rank, writers = learner.ranks.rank, _writers(learner)
    names = _write_weights(directory, learner, writers)
    if rank < writers:
        names.append(numbered_file(_MOMENTS, rank, writers))
        _write_moments(directory / names[-1], learner)
    for name in names:
        sync_path(directory / name)
    return names


def write_weights_index(directory: Path, learner: StepLearner) -> None:
    """Write which file of a checkpoint has which weight, if several have some."""
    writers, tensors = _writers(learner), saved_weights(learner.model)
    if not has_lora(learner.model):
        files = {name: numbered_file(WEIGHTS, taker, writers) for name, taker in _takers(tensors, writers).items()}
        write_index(directory, files, sum(map(_size, tensors.values())))


def set_weights(model: nn.Module, files: TensorFiles, path: Path) -> None:
    """Copy this rank's rows of the weights of the checkpoint at `path` into `model`. `UsageError` if they are of
    another model."""
    own = saved_weights(model)
    if {name: tuple(value.shape) for name, value in own.items()} != {name: files.shape(name) for name in files.names}:
        differing = sorted(own.keys() ^ files.names) or [n for n in own if tuple(own[n].shape) != files.shape(n)]
        raise UsageError(
            f'checkpoint "{path}" is of another model: {listing(differing)} differ; give its model, or leave '
            "checkpoint.resume out"
        )
    for name, value in own.items():
        shard = shard_of(name, value)
        files.read(name, shard.values, shard.first)


def set_moments(learner: StepLearner, files: TensorFiles) -> None:
    """Restore this rank's rows of the moments, and its random generators; of a rank that wrote none, those of the
    last."""
    stored: dict[str, list[str]] = {}
    for file_name in files.names:
        owner, _, entry = file_name.rpartition("/")
        stored.setdefault(owner, []).append(entry)
    names = _names(learner.model)
    for parameter in learner.trained:
        name = names[id(parameter)]
        if entries := stored.get(name):
            values = {entry: _moment(files, f"{name}/{entry}", parameter) for entry in entries}
            learner.optimizer.state[parameter] = values
    states = stored.get(_RANDOM.rstrip("/"), [])
    _set_random_states({state: files.piece(f"{_RANDOM}{state}", learner.ranks.rank) for state in states})


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a checkpoint has, by name: all, or of a model with adapters those that are trained, by
    peft's names. Tied ones, which are one parameter, by their first name alone."""
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    saved = {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}
    if not has_lora(model):
        return saved
    return {peft_name(name): tensor for name, tensor in saved.items() if tensor.requires_grad}


def saved_tensors(learner: StepLearner) -> dict[str, Tensor]:
    """Return the weights and moments that a checkpoint of the learner has, by name."""
    return {**saved_weights(learner.model), **_moments(learner)}


# ---------------------------------------------------------------- weights


def _write_weights(directory: Path, learner: StepLearner, writers: int) -> list[str]:
    """Write this rank's file of weights, and give the others their parts of theirs. Returns its name, if there is
    one."""
    ranks, tensors = learner.ranks, saved_weights(learner.model)
    adapters = has_lora(learner.model)
    takers = dict.fromkeys(tensors, 0) if adapters else _takers(tensors, writers)
    parts = (part for name, tensor in tensors.items() for part in ranks.parts(name, tensor, takers[name]))
    specs = {name: _spec(tensor) for name, tensor in tensors.items() if takers[name] == ranks.rank}
    file = ADAPTERS if adapters else numbered_file(WEIGHTS, ranks.rank, writers)
    if not specs:
        return [file for _ in parts]  # it only gives
    _write(directory / file, specs, parts)
    return [file]


def _takers(tensors: Mapping[str, Tensor], writers: int) -> dict[str, int]:
    """Return which rank writes each tensor: about equally many bytes each, in order."""
    total, before, takers = sum(map(_size, tensors.values())), 0, {}
    for name, tensor in tensors.items():
        takers[name] = min(before * writers // max(1, total), writers - 1)
        before += _size(tensor)
    return takers


def _writers(learner: StepLearner) -> int:
    return learner.ranks.world if learner.ranks.parallel == "fsdp2" else 1


def _write(file: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]], parts: Iterable[Tensor]) -> None:
    with TensorWriter(file, specs) as writer:
        for part in parts:
            writer.write(part)
    writer.check()


def _spec(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return dtype_name(tensor), tuple(tensor.shape)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------- moments


def _write_moments(file: Path, learner: StepLearner) -> None:
    tensors = {name: shard_of(name, tensor).values for name, tensor in _moments(learner).items()}
    tensors |= {f"{_RANDOM}{name}": state for name, state in _random_states().items()}
    _write(file, {name: _spec(tensor) for name, tensor in tensors.items()}, tensors.values())


def _moments(learner: StepLearner) -> dict[str, Tensor]:
    names = _names(learner.model)
    return {
        f"{names[id(parameter)]}/{entry}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter in learner.trained
        for entry, value in learner.optimizer.state.get(parameter, {}).items()
    }


def _moment(files: TensorFiles, name: str, parameter: Tensor) -> Tensor:
    """Return an entry of the optimizer's state: a number, or this rank's rows, placed as the parameter is."""
    if not files.shape(name):
        return files.piece(name, 0).clone()
    shard = shard_of(name, parameter)
    rows = torch.empty_like(shard.values)
    files.read(name, rows, shard.first)
    return like(parameter, rows)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        states[f"cuda{device}"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name.startswith("cuda") and int(name[4:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name[4:]))
