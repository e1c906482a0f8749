"""What it gains to lease rows as slots come free, beside whole leases: ``python -m bench.feeder``.

One engine generates the same rows twice, in turn: with one lease at a time, which is done when its longest row is, and
with slots that are kept full (`workflows.flow.loop.slots`). Lengths are StreamRL's published ones, scaled, as exact
limits of tokens without a stop token. Everything else is the same: engine, queue, rows, order. Both do the rows of
several leases, and both end with a tail in which slots stand empty.

Needs vLLM (its CPU build will do) or transformers; times are of a machine whose other work shares the cores, so compare
ratios of pairs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import numpy as np

import transferqueue as tq
from bench.published.dispatch import published_lengths
from bench.run_record import RECORDS, save_record
from transferqueue.adapters.protocols import Prompt, Sampling
from transferqueue.adapters.stages.generation import Generate
from transferqueue.observe.measurement_record import Measurement, summarize
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

LONGEST: Final = 384
"""Tokens of the longest published length after scaling."""
PROMPT: Final = 8
_BASE: Final = 200
GIVES: Final = ("response_ids", "rollout_logprobs", "finish_reason")


def open_vllm(directory: Path, slots: int) -> Any:
    """An engine that ends a row after as many tokens as the first two tokens of its prompt say."""
    from transferqueue.adapters.vllm.engine import VllmGenerator

    class GivenLengths(VllmGenerator):
        def _row(self, request: Any, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Any:
            length = _BASE * int(prompt.ids[0]) + int(prompt.ids[1])
            return super()._row(request, index, sample, prompt, replace(sampling, tokens_max=length))

    return GivenLengths(
        str(directory),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=slots,
        max_model_len=LONGEST + PROMPT + 1,
        kv_cache_memory_bytes=64 << 20,
    )


def lengths_of(rows: int, seed: int) -> Any:
    lengths = published_lengths(rows, np.random.default_rng(seed))
    return np.maximum(1, lengths * LONGEST // lengths.max())


def run(engine: Any, lengths: Any, slots: int, *, fed: bool) -> float:
    """Generate all rows; return the seconds."""
    task = tq.Task("generate", needs=["prompt_ids"], gives=GIVES)
    rest = np.arange(3, 1 + PROMPT)
    with tq.connect("embedded") as queue:
        table = queue.create_table("rows", tasks=[task], fields=[tq.Field("prompt_ids", "int32", (None,))])
        table.put(prompt_ids=[np.array([*divmod(int(length), _BASE), *rest], np.int32) for length in lengths])
        table.seal()
        if fed:
            stage = Stage(task=task, rows=max(1, slots // 4), at_least=1, slots=slots, stall_s=600)
        else:
            stage = Stage(task=task, rows=slots, at_least=1, stall_s=600)
        generate = Generate(engine, Sampling(tokens_max=LONGEST), part_rows=max(1, slots // 16) if fed else 16)
        started = time.perf_counter()
        run_stage(table, stage, generate, emit=lambda event: None)
        return time.perf_counter() - started


def main() -> None:
    """Measure pairs of runs, alternately, and write a record."""
    options = argparse.ArgumentParser(prog="python -m bench.feeder", description=main.__doc__)
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--rows", type=int, default=256)
    options.add_argument("--slots", type=int, default=32)
    options.add_argument("--out", type=Path, default=RECORDS)
    chosen = options.parse_args()
    from transferqueue.workflows.job.tiny_model.make import make

    measurement = Measurement()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="transferqueue-model-") as directory:
        make(directory)
        with closing(open_vllm(Path(directory), chosen.slots)) as engine:
            run(engine, lengths_of(chosen.slots, 99), chosen.slots, fed=True)
            for pair in range(chosen.pairs):
                lengths = lengths_of(chosen.rows, pair)
                for fed in (False, True) if pair % 2 else (True, False):
                    seconds[fed].append(run(engine, lengths, chosen.slots, fed=fed))
                print(f"whole leases {seconds[False][-1]:.2f} s, slots kept full {seconds[True][-1]:.2f} s", flush=True)
    ratios = [whole / fed for whole, fed in zip(seconds[False], seconds[True], strict=True)]
    lengths = lengths_of(chosen.rows, 0)
    results = [
        summarize("whole leases", "s", seconds[False]),
        summarize("slots kept full", "s", seconds[True]),
        summarize("whole leases / slots kept full", "ratio", ratios),
    ]
    details = {
        "rows": chosen.rows,
        "slots": chosen.slots,
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "mean": round(float(lengths.mean()), 1),
    }
    for result in results:
        print(result)
    save_record(measurement, chosen.out, "feeder", results, details)


if __name__ == "__main__":
    main()
