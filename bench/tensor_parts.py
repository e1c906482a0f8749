"""Weights of which the ranks of a tensor-parallel engine pull their parts, or all:
``python -m bench.tensor_parts --into bench/records``.

A model of about 104 MB in bfloat16 (4 layers in Llama's shapes) is published in slices of two ranks. Four processes
that reach the server's memory over the bulk endpoint alone, as from another host, begin to pull each version together.
Ways, one after the other: *whole*, all tensors, which each rank would then cut itself; *parts*, of each matrix the
quarter that vLLM gives the rank (query, key, value, gate and up along dimension 0; output and down along dimension 1);
*again*, the same parts of the same version, as a second engine would. Seconds: until the last rank has its tensors.
Bytes: what the server sent, over what it would send if each rank got a quarter of the matrices and all of the norms.

Expected, written before the first run: bytes 4.0 for whole, 1.00 to 1.02 for parts. Loopback moves about 1 GB/s to a
process while two cores do everything: whole moves 416 MB, parts 104 MB, so parts take at most 0.5 of whole; not a
quarter, since the server gathers columns and compares each block besides. Again: no faster than 0.7 of parts, since
each piece is compared again. One-sided over CMA is not measured here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from bench.measurement_record import MeasuredResult, Measurement, single, summarize
from bench.run_record import into_option, save_record, show
from bench.server import Server

RANKS: Final = 4
LAYERS, HIDDEN, INNER = 4, 1024, 2816
WAYS: Final = ("whole", "parts", "again")
CHANNEL: Final = "policy"
WAIT_S: Final = 100.0
ROWS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices that a rank has a share of along dimension 0; of the others, along dimension 1."""
SHAPES: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("gate_proj", "up_proj"), (INNER, HIDDEN)),
    "down_proj": (HIDDEN, INNER),
}


def model(version: int) -> dict[str, NDArray[np.uint16]]:
    """The tensors, as the bits of bfloat16."""
    rng = np.random.default_rng(version)
    made = {
        f"{layer}.{name}": rng.integers(0, 1 << 16, shape, np.uint16)
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    return made | {f"{layer}.norm": rng.integers(0, 1 << 16, (HIDDEN,), np.uint16) for layer in range(LAYERS)}


def parts(rank: int) -> dict[str, tq.Slice | None]:
    """What a rank has."""
    share = tq.Share(rank, RANKS)
    slices = {name: tq.Slice(share) if name in ROWS else tq.Slice(None, share) for name in SHAPES}
    made = {f"{layer}.{name}": part for layer in range(LAYERS) for name, part in slices.items()}
    return made | dict.fromkeys(f"{layer}.norm" for layer in range(LAYERS))


def run_rank(address: str, rank: int, versions: int, together: Any, told: Any) -> None:
    """The process of one rank: pulls each version in all ways."""
    with tq.connect(address, data="remote", label=f"rank {rank}") as queue:
        channel = queue.weights(CHANNEL)
        for version in range(versions):
            for way in WAYS:
                together.wait(WAIT_S)
                began = time.perf_counter()
                only = None if way == "whole" else parts(rank)
                with channel.pull(version=version, only=only, timeout_s=WAIT_S) as weights:
                    assert len(weights.numpy()) == len(parts(rank))
                told.put(time.perf_counter() - began)
                together.wait(WAIT_S)


def publish(queue: tq.Queue, version: int) -> None:
    """Publish a version in the slices of two ranks."""
    channel, tensors = queue.weights(CHANNEL, keep=1), model(version)
    pending = channel.begin(version, parts=2)
    for part in (1, 0):
        slices = {
            name: tq.WeightSlice(value[len(value) // 2 * part :][: len(value) // 2], len(value) // 2 * part, len(value))
            for name, value in tensors.items()
        }
        channel.publish(version, slices, pending=pending, part=part)


def sent(queue: tq.Queue) -> int:
    """Bytes that the server has sent."""
    return sum(queue.stats().server.bulk_sent_bytes.values())


def measured(versions: int) -> dict[str, list[float]]:
    """Seconds, and bytes for each byte that the ranks need, by way."""
    context = multiprocessing.get_context("spawn")
    together, told = context.Barrier(RANKS + 1), context.Queue()
    sizes = {name: value.nbytes for name, value in model(0).items()}
    needed = sum(nbytes * (RANKS if "norm" in name else 1) for name, nbytes in sizes.items())
    found: dict[str, list[float]] = {}
    server = Server("2GiB", tcp=True)
    with ExitStack() as opened:
        opened.callback(server.stop)
        queue = opened.enter_context(tq.connect(server.address))
        ranks = [
            context.Process(target=run_rank, args=(server.tcp_address, rank, versions, together, told))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for version in range(versions):
            publish(queue, version)
            for way in WAYS:
                before = sent(queue)
                together.wait(WAIT_S)
                seconds = max(told.get(timeout=WAIT_S) for _ in ranks)
                together.wait(WAIT_S)
                if version:
                    found.setdefault(f"{way}: seconds", []).append(seconds)
                    found.setdefault(f"{way}: bytes", []).append((sent(queue) - before) / needed)
        for rank in ranks:
            rank.join(WAIT_S)
    return found


def results(versions: int) -> Iterator[MeasuredResult]:
    """Medians and spread."""
    samples = measured(versions)
    for name, values in samples.items():
        yield summarize(name, "s" if "seconds" in name else "ratio", values)
    for first, second in (("parts", "whole"), ("again", "parts")):
        pairs = zip(samples[f"{first}: seconds"], samples[f"{second}: seconds"], strict=True)
        yield summarize(f"{first} / {second}: seconds", "ratio", [one / other for one, other in pairs])
    yield single("model", "bytes", sum(value.nbytes for value in model(0).values()))


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=10)
    into_option(parser)
    options = parser.parse_args()
    measurement = Measurement()
    lines = list(results(options.versions + 1))
    show(lines)
    details = {"ranks": RANKS, "layers": LAYERS, "hidden": HIDDEN, "inner": INNER, "carrier": "stream over loopback"}
    save_record(measurement, options.into, "tensor-parts", lines, details)


if __name__ == "__main__":
    main()
