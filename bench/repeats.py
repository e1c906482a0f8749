"""Bytes of a group of 16 rows that share an image, as they are stored and as they cross to a client of another host, by
how they are put: together or one by one, with `Repeat` and without it.

    python -m bench.repeats

``stored``: bytes of the table. ``sent``: bytes of the puts. ``received``: bytes that the shard sent for the leases of
all rows, one lease a row. All are exact. ``put``: wall time of all puts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import transferqueue as tq
from bench.measurement_record import MeasuredResult, Measurement, single
from bench.run_record import RECORDS, save_record, show
from bench.server import Server

GROUP: Final = 16
IMAGE_SHAPE: Final = (3, 224, 224)


WAYS: Final[dict[str, Callable[[torch.Tensor], list[Any]]]] = {
    "together": lambda image: [torch.stack([image] * GROUP)],
    "together_counted": lambda image: [tq.Repeat([image], GROUP)],
    "together_by_content": lambda image: [tq.Repeat(torch.stack([image] * GROUP))],
    "one_by_one": lambda image: [[image.clone()] for _ in range(GROUP)],
    "one_by_one_by_content": lambda image: [tq.Repeat([image.clone()]) for _ in range(GROUP)],
}
"""The columns of the puts, by how they are put."""


def group() -> list[MeasuredResult]:
    """Bytes and times of all ways."""
    images = np.random.default_rng(1).integers(0, 255, (len(WAYS), *IMAGE_SHAPE), np.uint8)
    results: list[MeasuredResult] = []
    server = Server(tcp=True)
    try:
        with tq.connect(server.tcp_address, data="remote") as queue:
            for (way, columns_of), image in zip(WAYS.items(), torch.from_numpy(images), strict=True):
                puts = columns_of(image)
                fields = [tq.Field("image", "uint8", IMAGE_SHAPE)]
                table = queue.create_table(way, fields=fields, tasks=[tq.Task("train", needs=["image"])])
                before, began = _crossed(queue), time.perf_counter()
                for column in puts:
                    table.put(image=column)
                put_s, stored = time.perf_counter() - began, table.stats().bytes
                for _ in range(GROUP):
                    with table.lease("train", rows=1, timeout_s=30) as batch:
                        if not torch.equal(batch["image"].torch()[0], image):
                            raise ValueError("a row of other bytes was delivered")
                after = _crossed(queue)
                results += [
                    single(f"group/{way}/stored", "count", stored),
                    single(f"group/{way}/sent", "count", after["received"] - before["received"]),
                    single(f"group/{way}/received", "count", after["sent"] - before["sent"]),
                    single(f"group/{way}/put", "s", put_s),
                ]
    finally:
        server.stop()
    show(results)
    return results


def _crossed(queue: tq.Queue) -> dict[str, int]:
    """Bytes that the shard has sent and received."""
    server = queue.stats().server
    return {way: sum(getattr(server, f"bulk_{way}_bytes").values()) for way in ("sent", "received")}


def main() -> None:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    measurement = Measurement()
    details = {"group": GROUP, "image_bytes": int(np.prod(IMAGE_SHAPE))}
    save_record(measurement, options.out, "repeats", group(), details)


if __name__ == "__main__":
    main()
