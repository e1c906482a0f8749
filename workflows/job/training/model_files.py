"""A model's directory: what it has beside the weights, and how a checkpoint becomes one that other tools read.

1. A checkpoint is the directory of a model already, or of peft's adapters (`checkpoint`), with the names that the
   trained module has. `write_model_files` writes what is beside its weights.
2. `export_checkpoint` writes a checkpoint as ``save_pretrained`` does: the names of the model's publisher, weights in
   parts of 5 GB with an index, in any dtype; adapters as they are, or added to the weights of their base.
3. A directory is written beside its place and renamed, so it is complete or absent. Nothing that exists is replaced.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from transferqueue.adapters.builtin.model import BuiltinModel
from transferqueue.adapters.engines.images import processor_of
from transferqueue.adapters.scoring import load_causal_lm
from transferqueue.adapters.scoring.load import torch_device, torch_dtype
from transferqueue.adapters.scoring.load_sharded import (
    load_sharded_causal_lm,
    local_directory,
    model_without_weights,
)
from transferqueue.adapters.scoring.lora import adapted_weights, add_lora, has_lora, merge_lora, peft_config
from transferqueue.adapters.weight_files import (
    INDEX,
    TensorFiles,
    dtype_name,
    model_weight_files,
    specs_bytes,
    write_tensors,
    write_weights,
)
from transferqueue.errors import UsageError
from transferqueue.limits import MIB
from transferqueue.observe import units
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.run_files import ADAPTER_CONFIG, ADAPTERS, CONFIG, STATE
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.training.checkpoint import checked_weights, checkpoint_state, sync_tree
from transferqueue.workflows.job.training.checkpoint_files import TRAINER, saved_weights, set_weights
from transferqueue.workflows.job.training.published_weights import PublishedWeights, published, with_adapters
from transferqueue.workflows.job.training.ranks import ALONE, Ranks

SHARD_BYTES: Final = 5 * 10**9
"""Most bytes of a file with weights; one larger tensor is a file of its own."""
_FILES_BYTES: Final = 64 * MIB
"""Room for the other files: tokenizers have some ten million bytes."""
GENERATION: Final = "generation_config.json"


def load_policy(job: Job, *, device: str = "auto", ranks: Ranks = ALONE) -> Any:
    """Load the policy of a resolved job as its trainer begins with it: with the adapters that it trains, whose values
    are drawn from torch's global generator. device: as of `load_causal_lm`. ranks: under ``fsdp2`` each loads its part,
    so all call this."""
    source: dict[str, Any] = {
        "dtype": _base_dtype(job),
        "device": device,
        "revision": job.model.revision,
        "trust_remote_code": job.model.trust_remote_code,
    }
    if ranks.parallel != "fsdp2":
        return _adapted(load_causal_lm(job.model.path, images=bool(job.data.images), **source), job)
    compute, place = torch_dtype(job.model.dtype), torch_device(device)
    return load_sharded_causal_lm(
        job.model.path, lambda model: ranks.sharded(_adapted(model, job), compute, place), **source
    )


def _adapted(model: Any, job: Job) -> Any:
    settings = job.trainer
    if settings.lora_rank:
        add_lora(
            model,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            targets=settings.lora_targets,
            dtype=torch_dtype(settings.master_dtype),
        )
    return model


def _base_dtype(job: Job) -> str:
    """The dtype of the policy's weights in the trainer. Under adapters they do not change, so they need no more digits
    than engines have."""
    frozen = job.trainer.lora_rank > 0 and job.trainer.parallel != "fsdp2"  # it shards a layer as tensors of one dtype
    return job.model.dtype if frozen else job.trainer.master_dtype


def write_model_files(directory: Path, model: Any, tokenizer: TextTokenizer, base: str) -> None:
    """Write what a directory of `model` has beside its weights: of a whole model the configurations, of one with
    adapters peft's; and tokenizer and chat template. base: path of the model that adapters belong to."""
    if has_lora(model):
        place = Path(base).expanduser()
        config = peft_config(model, str(place.absolute()) if place.is_dir() else base)
        (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        _write_config(directory, model)
    if (processor := processor_of(model)) is not None:
        processor.save(directory)
    save = getattr(tokenizer, "save_pretrained", None)
    if callable(save):  # the built-in one has no files
        save(directory)


def _write_config(directory: Path, model: Any) -> None:
    if isinstance(model, BuiltinModel):
        model.save_config(directory)
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # torch renames the class of a sharded module
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.to_json_file(directory / CONFIG)
    if model.can_generate():  # as text: transformers refuses to save some settings that it loads
        (directory / GENERATION).write_text(model.generation_config.to_json_string(), encoding="utf-8")
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=config)


# ---------------------------------------------------------------- export


def export_checkpoint(
    checkpoint: Path,
    job: Job,
    out: Path,
    *,
    dtype: str = "",
    merge: bool = False,
    shard_bytes: int = SHARD_BYTES,
    free_bytes: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
) -> int:
    """Write the policy of a checkpoint as a model directory `out`; return the bytes of its weights.

    job: of the run, resolved. dtype: of floating weights ("": that of the trained ones). merge: add adapters to the
    weights of their base; else they are written in the format of peft. Holds a tensor at a time, or where the model's
    publisher has weights in other parts (mixtures of experts) those of a layer. shard_bytes: most bytes of a file.
    free_bytes: bytes that are free where a directory is.

    Raises `UsageError` for an unknown dtype, an `out` that has files, a run without adapters that is to be merged, and
    a disk without room, before anything is written; as `load_checkpoint` for a checkpoint that cannot be read.
    """
    out = out.absolute()
    if dtype:
        torch_dtype(dtype)
    check_out(out)
    state = checkpoint_state(checkpoint)
    adapters = ADAPTERS in state.checksums
    if merge and not adapters:
        raise UsageError("--merge: the run trains all weights and has no adapters; leave it out")
    files = checked_weights(checkpoint, state)
    if adapters and not merge:
        tensors = {name: files.tensor(name, dtype) for name in files.names}
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with _written(out, nbytes, free_bytes) as unfinished:
            write_tensors(unfinished / ADAPTERS, tensors)
            _copy_others(checkpoint, unfinished)
        return nbytes
    weights = _merged(checkpoint, job, files, dtype) if merge else _trained(checkpoint, job, files, dtype)
    with _written(out, specs_bytes(weights.specs), free_bytes) as unfinished:
        _write_config(unfinished, weights.model)
        nbytes = write_weights(unfinished, weights.specs, weights.tensors, file_bytes=shard_bytes)
        _copy_others(checkpoint, unfinished)
    return nbytes


def check_out(out: Path) -> None:
    """Raise `UsageError` if `out` has files, or is one."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already, and nothing is replaced; give a directory that is new or empty")


def _trained(checkpoint: Path, job: Job, files: TensorFiles, dtype: str) -> PublishedWeights:
    model = model_without_weights(
        checkpoint,
        dtype or files.dtype,
        trust_remote_code=job.model.trust_remote_code,
        images=bool(job.data.images),
    )
    specs = {name: files.spec(name, dtype) for name in files.names}
    return published(model, specs, lambda name: files.tensor(name, dtype))


def _merged(checkpoint: Path, job: Job, adapters: TensorFiles, dtype: str) -> PublishedWeights:
    """The weights of the base, with the adapters of a checkpoint. A base whose files name weights otherwise than its
    module, or are no safetensors, is loaded."""
    base = local_directory(job.model.path, job.model.revision)
    files, own = TensorFiles(model_weight_files(base)), dtype or _base_dtype(job)
    if adapted_weights(adapters.names).keys() <= set(files.names):
        model = model_without_weights(base, own, trust_remote_code=job.model.trust_remote_code)
        return with_adapters(model, files, adapters, scale=job.trainer.lora_alpha / job.trainer.lora_rank, dtype=own)
    model = load_policy(job, device="cpu")
    set_weights(model, adapters, checkpoint)
    merge_lora(model)
    model.to(torch_dtype(own))
    weights = saved_weights(model)
    specs = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
    return published(model, specs, weights.__getitem__)


def _copy_others(checkpoint: Path, into: Path) -> None:
    """Copy what a checkpoint has beside weights, the trainer's state and what `into` has already."""
    for entry in checkpoint.iterdir():
        is_written = entry.suffix == ".safetensors" or entry.name in (INDEX, STATE, TRAINER)
        if is_written or (into / entry.name).exists():
            continue
        if entry.name == ADAPTER_CONFIG and (into / CONFIG).is_file():
            continue  # a merged model: peft would look for its adapters
        if entry.is_dir():
            shutil.copytree(entry, into / entry.name)
        else:
            shutil.copyfile(entry, into / entry.name)


@contextmanager
def _written(out: Path, nbytes: int, free_bytes: Callable[[Path], int]) -> Iterator[Path]:
    """Yield the directory that becomes `out` at the end. Nothing is left of it after an error."""
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        free, needed = free_bytes(unfinished.parent), nbytes + _FILES_BYTES
        if free < needed:
            raise UsageError(
                f"{out} needs {units.size(needed)}, and its disk has {units.size(free)} free; make room, or give "
                "another directory"
            )
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        yield unfinished
        sync_tree(unfinished)
        unfinished.rename(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error}; give a directory of your own, with room") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
