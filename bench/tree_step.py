"""What a training step takes when each token that rows share is computed once: ``python -m bench.tree_step``.

A Qwen3 model made from a config (`--hidden`, `--layers`, `--vocabulary`) takes steps (forward, backward, AdamW) on the
same eight rows by turns: *flat*, each row apart, and *tree*. Two trees have about 80 % shared tokens: a *group* (a
prompt of 512 tokens, eight responses of 48), and *branches* (a trunk of 416 tokens that branches in two three times,
after it, after 96 and after 32 more, into leaves of 16).

- seconds: of a step. speed-up: flat over tree, of the medians.
- computed: tokens of the forward pass. shared: the share of the rows' tokens that the tree does not compute.
- gradient: norm of the difference of both gradients before the first step, over that of flat; float64 weights.

Expected, written before the first run: without attention a step would take a fifth of the time. Attention of a row's
own tokens costs the same in both, so 3.5 to 5 times faster on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import into_option, save_record, show
from bench.weight_deltas import make_model
from transferqueue.adapters.scoring import RowTree, response_logprobs

ROWS: Final = 8
PROMPT: Final = 16
"""Tokens of a row of branches that are its prompt."""


class Rows(NamedTuple):
    """prompts, responses: token ids of each row. tree: what they share."""

    prompts: list[Any]
    responses: list[Any]
    tree: RowTree


def group(draws: np.random.Generator, vocabulary: int) -> Rows:
    """Eight responses to one prompt."""
    prompt = draws.integers(0, vocabulary, 512)
    responses = [draws.integers(0, vocabulary, 48) for _ in range(ROWS)]
    return Rows([prompt] * ROWS, responses, RowTree.of([-1] + [0] * (ROWS - 1), [0] + [512] * (ROWS - 1)))


def branches(draws: np.random.Generator, vocabulary: int) -> Rows:
    """Eight leaves of a tree that branches in two."""
    runs = {(depth, at): draws.integers(0, vocabulary, size) for depth, size in enumerate((416, 96, 32, 16))
            for at in range(2**depth)}  # fmt: skip
    rows = [np.concatenate([runs[depth, leaf >> (3 - depth)] for depth in range(4)]) for leaf in range(ROWS)]
    parents, tokens = [-1, 0, 0, 2, 0, 4, 4, 6], [0, 544, 512, 544, 416, 544, 512, 544]
    return Rows([row[:PROMPT] for row in rows], [row[PROMPT:] for row in rows], RowTree.of(parents, tokens))


def gradient(model: Any, rows: Rows, tree: RowTree) -> torch.Tensor:
    """The gradient of a sum in which each token has another weight."""
    model.zero_grad()
    logprobs_N = response_logprobs(model, rows.prompts, rows.responses, tree=tree)
    (logprobs_N * torch.linspace(-1, 2, len(logprobs_N))).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def measured(options: argparse.Namespace, name: str, rows: Rows) -> Iterator[MeasuredResult]:
    """Results of one shape of tree."""
    ways = {"flat": RowTree.apart(ROWS), "tree": rows.tree}
    model = make_model(options).double()
    flat, tree = (gradient(model, rows, way) for way in ways.values())
    yield single(f"{name}: gradient", "ratio", float((tree - flat).norm() / flat.norm()))
    model = model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(options.steps + 1):
        for way, of_way in ways.items():
            began = time.perf_counter()
            gradient(model, rows, of_way)
            optimizer.step()
            if turn:
                seconds[way].append(time.perf_counter() - began)
    all_tokens = sum(map(len, rows.prompts)) + sum(map(len, rows.responses))
    shared = int(rows.tree.shared.sum())
    for way, values in seconds.items():
        yield summarize(f"{name}: {way} seconds", "s", values)
        yield single(f"{name}: {way} computed", "count", all_tokens - (shared if way == "tree" else 0))
    yield single(f"{name}: shared", "ratio", shared / all_tokens)
    medians = [statistics.median(seconds[way]) for way in ways]
    yield single(f"{name}: speed-up", "ratio", medians[0] / medians[1])


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=5120)
    parser.add_argument("--steps", type=int, default=7)
    into_option(parser)
    options = parser.parse_args()
    measurement, draws = Measurement(), np.random.default_rng(0)
    lines = [
        line
        for shape in (group, branches)
        for line in measured(options, shape.__name__, shape(draws, options.vocabulary))
    ]
    show(lines)
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "vocabulary", "steps")}
    save_record(measurement, options.into, "tree-step", lines, sizes | {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
