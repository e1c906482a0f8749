"""The memory of two FSDP2 ranks that load, train, save and resume one model:
``python -m bench.sharded_model --into bench/records``.

Two processes (gloo over loopback, CPU) are the ranks of a job's trainer. The model is a Llama of a billion parameters,
in bfloat16 on the disk; weights, gradients and moments are bfloat16 too, gradients are added in float32. One
life loads it, takes a step and saves a checkpoint; another loads, resumes and takes a step. Peak: the most memory of
its own (RssAnon) that a rank had in a phase, read every few milliseconds, less what it had before the first one. Pages
of files are not in it: the system takes them away as it needs. Nor are blocks that were freed: glibc would keep those
below 32 MB. Whole: what the same phase takes at least in a process
that has the model whole, in bytes a parameter: load and resume 2 (weights) and 6 (weights and moments), step 12
(weights, moments, the gradient and its float32 sums), save 6.

Expected, written before the first run: each rank has half of the whole in every phase. Beside it a pass, of which a
load makes some to see how the model takes rows, gathers embedding and output and two layers, 0.44 GB, and FSDP2 has
what it gathers twice for a moment. A save takes one rank's rows of one tensor, a resume nothing.

It takes 13 GB of memory and 8 GB of disk; ``--layers 2`` takes a fifth.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import distributed as dist

from bench.measurement_record import MeasuredResult, Measurement, single
from bench.run_record import into_option, save_record, show
from transferqueue.adapters.scoring.load_sharded import model_without_weights
from transferqueue.adapters.weight_files import WEIGHTS, TensorWriter
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.resolve import resolve
from transferqueue.workflows.job.training.checkpoint import Checkpoints, load_checkpoint
from transferqueue.workflows.job.training.gather import StreamPosition
from transferqueue.workflows.job.training.process import policy_learner
from transferqueue.workflows.job.training.ranks import Ranks

RANKS: Final = 2
DRAWN: Final = 1 << 22
"""Random numbers that the model consists of."""
HIDDEN, INNER, HEADS, KEY_HEADS, VOCABULARY = 2048, 5632, 32, 4, 32000
WHOLE: Final = {"load": 2, "step": 12, "save": 6, "resume": 6}
"""Bytes a parameter of each phase in one process."""
LARGE_BLOCK: Final = 1 << 22
_MMAP_THRESHOLD: Final = -3
"""Number of the parameter of mallopt."""
LOOK_S: Final = 0.005
WAIT_S: Final = 3000.0


def make_model(place: Path, layers: int) -> int:
    """Write the model, of the same random numbers again and again; return the number of its parameters."""
    import transformers

    place.mkdir()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=512,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(place)
    model = model_without_weights(place, "bfloat16")
    specs = {name: ("bfloat16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    drawn = (0.02 * torch.randn(DRAWN, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    with TensorWriter(place / WEIGHTS, specs) as writer:
        for _, shape in specs.values():
            for first in range(0, math.prod(shape), DRAWN):
                writer.write(drawn[: math.prod(shape) - first])
    writer.check()
    return sum(math.prod(shape) for _, shape in specs.values())


def job_of(place: Path) -> Job:
    """A job that trains the model in `place` on its ranks."""
    file = {
        "model": {"path": str(place), "dtype": "bfloat16"},
        "data": {"path": "none.jsonl", "prompt": "question", "response": "answer"},
        "algorithm": {"kind": "sft"},
        "trainer": {
            "parallel": "fsdp2", "ranks": RANKS, "master_dtype": "bfloat16", "devices": "cpu", "prompts_per_step": 4,
            "gradient_checkpointing": True,
        },
    }  # fmt: skip
    return resolve(msgspec.convert(file, Job))


class Peaks:
    """The most memory of its own that this process had in each phase, beyond what it had at the start."""

    def __init__(self) -> None:
        self.before, self.peaks, self.seconds = _own_bytes(), dict[str, int](), dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure until the end of the block."""
        dist.barrier()
        ended, peaks, began = threading.Event(), [_own_bytes()], time.perf_counter()

        def look() -> None:
            while not ended.wait(LOOK_S):
                peaks.append(_own_bytes())

        thread = threading.Thread(target=look)
        thread.start()
        yield
        self.seconds[name] = time.perf_counter() - began
        ended.set()
        thread.join()
        self.peaks[name] = max(peaks) - self.before


def _own_bytes() -> int:
    with Path("/proc/self/status").open() as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def _return_freed_memory() -> None:
    """Let the C library give large blocks back at once, so that what is counted is in use."""
    if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BLOCK):
        raise OSError("mallopt: the C library does not take the threshold")


def run_rank(rank: int, folder: Path, life: str, told: Any) -> None:
    """The process of one rank in one life."""
    _return_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{life}", rank=rank, world_size=RANKS)
    model_without_weights(folder / "model", "bfloat16")  # imports what a model needs
    ranks, peaks, checkpoints = Ranks(rank, RANKS, "fsdp2"), Peaks(), Checkpoints(folder / "checkpoints")
    draws = np.random.default_rng(rank)
    rows = {name: [draws.integers(0, VOCABULARY, 16).astype(np.int32)] for name in ("prompt_ids", "response_ids")}
    with peaks.phase("load"):
        learner = policy_learner(job_of(folder / "model"), ranks)
    if life == "resumed":
        with peaks.phase("resume"):
            load_checkpoint(checkpoints.path(1), learner)
    with peaks.phase("step"):
        learner.accumulate(rows)
        learner.step()
    if life == "first":
        with peaks.phase("save"):
            checkpoints.save(learner, 1, StreamPosition())
    told.put((life, rank, peaks.peaks, peaks.seconds))
    dist.barrier()
    dist.destroy_process_group()


def results(layers: int, at: Path) -> list[MeasuredResult]:
    """Peaks and seconds of both lives, by phase and rank."""
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    lines: list[MeasuredResult] = []
    with tempfile.TemporaryDirectory(dir=at) as name:
        parameters = make_model(Path(name) / "model", layers)
        for life in ("first", "resumed"):
            ranks = [context.Process(target=run_rank, args=(rank, Path(name), life, told)) for rank in range(RANKS)]
            for process in ranks:
                process.start()
            for _ in ranks:
                lines += _lines(parameters, *told.get(timeout=WAIT_S))
            for process in ranks:
                process.join(WAIT_S)
    return [single("parameters", "count", parameters), *sorted(lines)]


def _lines(
    parameters: int, life: str, rank: int, peaks: dict[str, int], seconds: dict[str, float]
) -> Iterator[MeasuredResult]:
    for phase, peak in peaks.items():
        yield single(f"{life}, {phase}: peak, rank {rank}", "bytes", peak)
        yield single(f"{life}, {phase}: peak / whole, rank {rank}", "ratio", peak / (WHOLE[phase] * parameters))
        yield single(f"{life}, {phase}: time, rank {rank}", "s", seconds[phase])


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20, help="of the model; default 20: a billion parameters")
    parser.add_argument("--at", type=Path, help="directory for 8 GB of files; default: that of temporary files")
    into_option(parser)
    options = parser.parse_args()
    measurement = Measurement()
    lines = results(options.layers, options.at)
    show(lines)
    details = {"ranks": RANKS, "layers": options.layers, "dtype": "bfloat16", "backend": "gloo"}
    save_record(measurement, options.into, "sharded-model", lines, details)


if __name__ == "__main__":
    main()
