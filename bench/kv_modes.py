"""What an update in flight costs vLLM with each mode of `kv`: ``python -m bench.kv_modes``.

One engine in process generates the same rows (`--rows` prompts of `--prompt` tokens, `--tokens` new ones each) with
each mode by turns, while weights are loaded `--updates` times, evenly over the rows' tokens. A version changes each
weight by `--lr` up or down, which is what a first step of AdamW does.

- tokens a second: of generation, updates included. *none* is generation without an update.
- prefilled again: tokens of running rows that vLLM read again, over those that it drew.
- longest gap: seconds between two tokens of a row, at most; it has the load of a version.
- difference: of log-probs as drawn, to those that the newest weights alone give each token, from a forward pass of
  transformers: mean of the absolute values. With *recompute* it is what both programs differ by.

Needs the environment of `make test-engines`. On a machine that does other work too, set ``OMP_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from bench.measurement_record import MeasuredResult, Measurement, summarize
from bench.run_record import into_option, save_record, show
from bench.weight_deltas import make_model
from transferqueue.adapters.protocols import Caches, Completion, Prompt, Sampling
from transferqueue.adapters.vllm import VllmGenerator
from transferqueue.adapters.weights import TensorWeights

NONE: Final = "none"
MODES: Final = (NONE, *(mode.value for mode in Caches))
WAIT_S: Final = 300.0


def versions_of(model: Any, options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """The weights of each version: those of the model, and after each update."""
    draws = torch.Generator().manual_seed(1)
    found = [{name: value.detach().clone() for name, value in model.named_parameters()}]
    for _ in range(options.updates):
        found.append(
            {
                name: value + options.lr * (torch.randint(0, 2, value.shape, generator=draws) * 2 - 1)
                for name, value in found[-1].items()
            }
        )
    return found


class Stepped:
    """Runs an update each time that the engine has made some steps, and takes the time of each."""

    def __init__(self, engine: VllmGenerator) -> None:
        self.times: list[float] = []
        self.changed = threading.Condition()
        batch = engine._rows
        step = batch.step

        def timed(version: int) -> Any:
            ended = step(version)
            with self.changed:
                self.times.append(time.perf_counter())
                self.changed.notify_all()
            return ended

        batch.step = timed  # type: ignore[method-assign]

    def wait(self, steps: int) -> None:
        """Wait until the engine has made this many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.times) >= steps, WAIT_S)


def one_run(
    engine: VllmGenerator, stepped: Stepped, mode: str, versions: Sequence[Any], options: argparse.Namespace, seed: int
) -> tuple[list[Completion], list[Prompt], dict[str, float]]:
    """Generate all rows in a mode, and return them and the figures of the run."""
    draws = np.random.default_rng(seed)
    prompts = [
        Prompt(ids=draws.integers(0, options.vocabulary, options.prompt).astype(np.int32)) for _ in range(options.rows)
    ]
    engine.kv = Caches.RECOMPUTE if mode == NONE else Caches(mode)
    engine.update_weights(TensorWeights(versions[0]), 0)
    again = engine.prefilled_again
    stepped.times.clear()
    found: list[Completion] = []
    began = time.perf_counter()
    rows = threading.Thread(
        target=lambda: found.extend(engine.generate(prompts, Sampling(tokens_max=options.tokens, seed=seed)))
    )
    rows.start()
    for version in range(1, 1 if mode == NONE else len(versions)):
        stepped.wait(version * options.tokens // len(versions))
        engine.update_weights(TensorWeights(versions[version]), version)
    rows.join(WAIT_S)
    seconds = time.perf_counter() - began
    drawn = sum(len(row.ids) for row in found)
    assert drawn == options.rows * options.tokens
    figures = {
        "tokens a second": drawn / seconds,
        "prefilled again": (engine.prefilled_again - again) / drawn,
        "longest gap": float(np.diff(stepped.times).max()),
    }
    return sorted(found, key=lambda row: row.prompt), prompts, figures


def difference(model: Any, versions: Sequence[Any], rows: Sequence[Completion], prompts: Sequence[Prompt]) -> float:
    """Mean of the absolute differences of log-probs as drawn to those of each token's version alone."""
    ids = torch.from_numpy(np.stack([np.concatenate([prompts[row.prompt].ids, row.ids]) for row in rows])).long()
    start = len(prompts[0].ids)
    drawn = torch.from_numpy(np.stack([row.logprobs for row in rows]))
    of_token = torch.from_numpy(np.stack([row.versions for row in rows]))
    found = torch.zeros_like(drawn)
    for version in of_token.unique().tolist():
        model.load_state_dict(versions[version], strict=False)
        with torch.no_grad():
            logits = model(ids).logits[:, start - 1 : -1]
        truth = torch.log_softmax(logits.float(), -1).gather(2, ids[:, start:, None])[..., 0]
        found = torch.where(of_token == version, (drawn - truth).abs(), found)
    return float(found.mean())


def measured(options: argparse.Namespace) -> Iterator[MeasuredResult]:
    """Results of all modes."""
    model = make_model(options)
    versions = versions_of(model, options)
    samples: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        engine = VllmGenerator(
            place,
            dtype="float32",
            enforce_eager=True,
            max_model_len=options.prompt + options.tokens,
            max_num_seqs=options.rows,
            max_num_batched_tokens=options.rows * (options.prompt + options.tokens),
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=1 << 30,
        )
        try:
            stepped = Stepped(engine)
            for turn in range(options.runs + 1):
                for mode in MODES if turn % 2 else reversed(MODES):
                    rows, prompts, figures = one_run(engine, stepped, mode, versions, options, turn)
                    figures["difference"] = difference(model, versions, rows, prompts)
                    for name, value in figures.items() if turn else ():
                        samples[mode].setdefault(name, []).append(value)
        finally:
            engine.close()
    units = {"tokens a second": "1/s", "prefilled again": "ratio", "longest gap": "s", "difference": "ratio"}
    for mode, of_mode in samples.items():
        for name, values in of_mode.items():
            yield summarize(f"{mode}: {name}", units[name], values)
        ratios = zip(of_mode["tokens a second"], samples[NONE]["tokens a second"], strict=True)
        if mode != NONE:
            yield summarize(f"{mode}: tokens over none", "ratio", [mine / none for mine, none in ratios])


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=5120)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--runs", type=int, default=3, help="of each mode, by turns, after one that does not count")
    into_option(parser)
    options = parser.parse_args()
    measurement = Measurement()
    lines = [*measured(options)]
    show(lines)
    names = ("hidden", "layers", "vocabulary", "rows", "prompt", "tokens", "updates", "lr")
    save_record(measurement, options.into, "kv-modes", lines, {name: getattr(options, name) for name in names})


if __name__ == "__main__":
    main()
