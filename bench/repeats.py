"""What finding repeated values costs a put that repeats nothing, and what it and `Interned` spare a group that shares
an image.

    python -m bench.repeats --turns 25
    python -m bench.repeats --turns 0        # only the group
    .venv-shim/bin/python -m bench.repeats --drop-in --turns 25

Costs: CPU time of a process with an embedded server, for a put and the deletion of its rows. Each turn puts the same
columns through three clients: one that does not look for repeated values (`TRANSFERQUEUE_FIND_REPEATS=0`), another one
of that kind, and one that looks. A sample of ``on/...`` is the time of the last over that of the first, in one turn; of
``control/...`` that of the second over the first: what the machine does to a ratio of equal work. The order changes
from turn to turn. ``search/...`` is the CPU time of the search alone, for the columns of one put, and ``share/...`` its
least over the least of ``off/...``: what a busy machine disturbs less.

Group: 16 rows of one prompt with an image, to a client of another host. ``stored``: bytes of the table; ``received``:
bytes (both exact) that the shard sent for the leases of all rows, one lease a row.

Drop-in: the same costs for puts of samples through the drop-in for ``transfer_queue``, none of which comes again, with
its table of recurring values and without it; all three clients search the rows of each put. ``drop_in_group/...``: the
bytes of a group that is put one by one, with it and without it. It needs tensordict and omegaconf.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import transferqueue as tq
from bench.run_record import RECORDS, save_record, show
from bench.server import Server
from transferqueue.limits import KIB
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, summarize
from transferqueue.storage.inputs.prepare import _parse
from transferqueue.storage.inputs.repeats import find_repeats, share_rows

WORD: Final = "TRANSFERQUEUE_FIND_REPEATS"
TURN_S: Final = 0.02
"""About what the puts of one client take in a turn."""
PUTS_MAX: Final = 12
GROUP: Final = 16
IMAGE_SHAPE: Final = (3, 224, 224)
Columns = Mapping[str, Any]


def _bytes(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, 255, shape, np.uint8)


def _ids(rng: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 150_000, count))


def _jagged(rng: np.random.Generator, rows: int, count: int) -> torch.Tensor:
    rows_of_ids = [_ids(rng, count) for _ in range(rows)]
    nested: torch.Tensor = torch.nested.as_nested_tensor(rows_of_ids, layout=torch.jagged)
    return nested


def _padded(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Rows that are zero where samples are taken."""
    rows = np.zeros((16, 512 * KIB), np.uint8)
    rows[:, 1000 : 200 * KIB] = _bytes(rng, 16, 200 * KIB - 1000)
    return rows


def _one_byte(rows: int, size: int, at: int) -> np.ndarray[Any, Any]:
    """Rows that differ in one byte, where no sample is taken: the search compares a pair or two up to there."""
    values = np.zeros((rows, size), np.uint8)
    values[:, at] = np.arange(rows) % 251
    return values


def cases() -> dict[str, Columns]:
    """Columns of which no row repeats another."""
    rng = np.random.default_rng(0)
    return {
        "dense_16x512KiB": {"x": _bytes(rng, 16, 512 * KIB)},
        "dense_2048x4KiB": {"x": _bytes(rng, 2048, 4 * KIB)},
        "padded_16x512KiB": {"x": _padded(rng)},
        "one_byte_16x512KiB": {"x": _one_byte(16, 512 * KIB, 300 * KIB)},
        "one_byte_2048x4KiB": {"x": _one_byte(2048, 4 * KIB, 3000)},
        "tensors_1024x5.6KB": {"x": [_ids(rng, 700) for _ in range(1024)]},
        "tensors_1024x400B": {"x": [_ids(rng, 50) for _ in range(1024)]},
        "lists_1024x700": {"x": [_ids(rng, 700).tolist() for _ in range(1024)]},
        "nested_1024x5.6KB": {"x": _jagged(rng, 1024, 700)},
        "images_64": {"x": [torch.from_numpy(_bytes(rng, *IMAGE_SHAPE)) for _ in range(64)]},
        "arrays_256x8KiB": {"x": [_bytes(rng, 8 * KIB) for _ in range(256)]},
        "texts_1024x300": {"x": [f"{row:0300d}" for row in range(1024)]},
        "texts_512x8KiB": {"x": [f"{row:08192d}" for row in range(512)]},
        "ragged_32_fields": {f"f{field}": _jagged(rng, 64, 128) for field in range(32)},
        "one_row": {"x": [_ids(rng, 700)], "s": ["a prompt"], "r": [1.0]},
    }


def costs(turns: int) -> list[MeasuredResult]:
    """The ratios of all cases."""
    os.environ.pop(WORD, None)
    results: list[MeasuredResult] = []
    with (
        tq.connect("embedded", arena_bytes="1GiB") as server,
        _client(server, "0") as off,
        _client(server, None) as on,
        _client(server, "0") as control,
    ):
        for name, columns in cases().items():
            server.create_table(name, retention=tq.Manual())
            results += _ratios(name, columns, [client.table(name) for client in (off, control, on)], turns)
            show(results[-5:])
    return results


def _client(server: tq.Queue, word: str | None) -> tq.Queue:
    if word is not None:
        os.environ[WORD] = word
    try:
        return tq.connect(server.address)
    finally:
        os.environ.pop(WORD, None)


def _ratios(name: str, columns: Columns, tables: Sequence[tq.Table], turns: int) -> list[MeasuredResult]:
    puts = max(1, min(PUTS_MAX, int(TURN_S / max(_cpu_s(tables[0], columns, 2), 1e-5))))
    for table in tables:
        _cpu_s(table, columns, 2)
    samples: list[list[float]] = [[], [], []]
    for turn in range(turns):
        for each in np.roll(np.arange(3), turn)[:: 1 if turn % 2 else -1].tolist():
            samples[each].append(_cpu_s(tables[each], columns, puts))
    off, control, on = samples
    search = [_search_s(columns) for _ in range(turns)]
    return [
        summarize(f"off/{name}", "s", off),
        summarize(f"control/{name}", "ratio", [b / a for a, b in zip(off, control, strict=True)]),
        summarize(f"on/{name}", "ratio", [b / a for a, b in zip(off, on, strict=True)]),
        summarize(f"search/{name}", "s", search),
        summarize(f"share/{name}", "ratio", [min(search) / min(off)]),
    ]


def _search_s(columns: Columns) -> float:
    """CPU seconds of the search of all columns, without what parses them."""
    spent = 0.0
    for name, value in columns.items():
        parsed = _parse(value, None, name)
        began = time.thread_time()
        if find_repeats(value) or share_rows(parsed):
            raise ValueError(f"{name} repeats a value")
        spent += time.thread_time() - began
    return spent


def _cpu_s(table: tq.Table, columns: Columns, puts: int) -> float:
    """CPU seconds of this process for one put."""
    gc.disable()
    began = time.process_time()
    rows = [table.put(**columns) for _ in range(puts)]
    spent = time.process_time() - began
    gc.enable()
    for those in rows:
        table.delete(those)
    return spent / puts


# ---------------------------------------------------------------- a group that shares an image


def group() -> list[MeasuredResult]:
    """Bytes that a group of `GROUP` rows takes and that cross to a remote reader, as rows are put together or one by
    one."""
    image = torch.from_numpy(_bytes(np.random.default_rng(1), *IMAGE_SHAPE))
    ways: dict[str, list[Any]] = {
        "together": [[image.clone() for _ in range(GROUP)]],
        "one_by_one": [[image.clone()] for _ in range(GROUP)],
        "one_by_one_interned": [tq.Interned([image.clone()]) for _ in range(GROUP)],
    }
    results: list[MeasuredResult] = []
    server = Server(tcp=True)
    try:
        with tq.connect(server.tcp_address, data="remote") as queue:
            for way, puts in ways.items():
                table = queue.create_table(
                    way, fields=[tq.Field("image", "uint8", IMAGE_SHAPE)], tasks=[tq.Task("train", needs=["image"])]
                )
                before = _sent(queue)
                for images in puts:
                    table.put(image=images)
                stored = table.stats()["bytes"]
                for _ in range(GROUP):
                    with table.lease("train", rows=1, timeout_s=30) as batch:
                        if not torch.equal(batch["image"].torch()[0], image):
                            raise ValueError("a row of other bytes was delivered")
                results += [
                    summarize(f"group/{way}/stored", "count", [stored]),
                    summarize(f"group/{way}/received", "count", [_sent(queue) - before]),
                ]
    finally:
        server.stop()
    show(results)
    return results


# ---------------------------------------------------------------- the drop-in


def drop_in(turns: int) -> list[MeasuredResult]:
    """What looking for values that come again costs the drop-in's puts if none does, and what it spares a group that is
    put one by one."""
    from tensordict import TensorDict

    from transferqueue.adapters.transfer_queue.samples.partitions import Partitions

    rng = np.random.default_rng(2)
    size = int(np.prod(IMAGE_SHAPE))
    images = torch.from_numpy(_bytes(rng, 16, *IMAGE_SHAPE))
    alike = torch.zeros(16, size, dtype=torch.uint8)
    shapes = {
        "images_1": images[:1],
        "images_16": images,
        "jagged_16": torch.nested.as_nested_tensor(list(images.reshape(16, -1)), layout=torch.jagged),
        "alike_16": alike,
        "tokens_16x2048": torch.from_numpy(rng.integers(0, 150_000, (16, 2048))),
        "small_16x100": torch.from_numpy(rng.integers(0, 150_000, (16, 100))),
    }
    results: list[MeasuredResult] = []
    with (
        tq.connect("embedded", arena_bytes="1GiB") as server,
        _client(server, None) as off,
        _client(server, None) as on,
        _client(server, None) as control,
    ):
        partitions = []
        for client, word in ((off, "0"), (control, "0"), (on, "1")):
            os.environ[WORD] = word
            partitions.append(Partitions(client, rows_max=1 << 16))
        os.environ.pop(WORD)
        for name, column in shapes.items():
            data = TensorDict({"x": column, "reward": torch.zeros(len(column))}, batch_size=[len(column)])
            results += _drop_in_ratios(name, data, partitions, turns)
            show(results[-3:])
        for way, client in (("off", partitions[0]), ("on", partitions[2])):
            for _ in range(GROUP):
                client.put(way, TensorDict({"image": images[3:4].clone()}, batch_size=[1]))
            results.append(
                summarize(f"drop_in_group/{way}/stored", "count", [server.table(f"p.{way}").stats()["bytes"]])
            )
    show(results[-2:])
    return results


def _drop_in_ratios(name: str, data: Any, partitions: Sequence[Any], turns: int) -> list[MeasuredResult]:
    samples: list[list[float]] = [[], [], []]
    for turn in range(-2, turns):
        for each in np.roll(np.arange(3), turn)[:: 1 if turn % 2 else -1].tolist():
            spent = _drop_in_cpu_s(partitions[each], name, data, turn)
            if turn >= 0:
                samples[each].append(spent)
    off, control, on = samples
    return [
        summarize(f"drop_in_off/{name}", "s", off),
        summarize(f"drop_in_control/{name}", "ratio", [b / a for a, b in zip(off, control, strict=True)]),
        summarize(f"drop_in_on/{name}", "ratio", [b / a for a, b in zip(off, on, strict=True)]),
    ]


def _drop_in_cpu_s(partitions: Any, name: str, data: Any, turn: int) -> float:
    """CPU seconds of this process for one put, of `PUTS_MAX` with other values each. Those named "alike" differ where
    no sample is taken."""
    column, spent = data["x"], 0.0
    rows = column.values().reshape(len(data), -1) if column.is_nested else column.reshape(len(data), -1)
    for number in range(PUTS_MAX):
        place = 100 if name.startswith("alike") else 0
        rows[:, place] = (torch.arange(len(rows)) + 16 * number) % 251
        rows[:, place + 1] = (turn + 2) % 251
        gc.disable()
        began = time.process_time()
        indexes = partitions.put(name, data)
        spent += time.process_time() - began
        gc.enable()
        partitions.find(name).delete(indexes)
    return spent / PUTS_MAX


def _sent(queue: tq.Queue) -> int:
    return sum(queue.stats()["server"]["bulk_sent_bytes"].values())


def main() -> None:
    """Measure, print, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--drop-in", action="store_true", help="measure puts through the drop-in, and nothing else")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measurement = Measurement()
    details = {"turns": options.turns, "group": GROUP, "image_bytes": int(np.prod(IMAGE_SHAPE))}
    if options.drop_in:
        save_record(measurement, options.out, "repeats-drop-in", drop_in(options.turns), details)
        return
    results = group() + (costs(options.turns) if options.turns else [])
    save_record(measurement, options.out, "repeats", results, details)


if __name__ == "__main__":
    main()
