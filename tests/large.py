"""``python -m tests.large``: columns of more than 2 GiB, where a 32-bit length or offset anywhere would show.

Needs about 14 GiB of memory and a few minutes. The suite has the cheap forms: shapes and counts beyond 2^31 without
their bytes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

import transferqueue as tq
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE
from transferqueue.server.process import embedded

GIB: Final = 1 << 30
OVER: Final = 2 * GIB + (64 << 20)
"""Bytes of a column: more than any int32 counts."""


def told(what: str, act: Callable[[], Any]) -> None:
    """Do it, and say how long it took or what went wrong."""
    started = time.monotonic()
    try:
        act()
    except Exception as error:  # noqa: BLE001  (all of them are tried)
        FAILED.append(what)
        print(f"{what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    else:
        print(f"{what}: {time.monotonic() - started:.1f} s", flush=True)


FAILED: Final[list[str]] = []


def marked(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros with the place of each 16 MiB written there, and at the end."""
    values = np.zeros(nbytes, np.uint8)
    for at in [*range(0, nbytes - 8, 16 << 20), nbytes - 8]:
        values[at : at + 8].view(np.int64)[:] = at
    return values


def check(values: np.ndarray[Any, Any], nbytes: int) -> None:
    """That they are `marked`."""
    flat = values.reshape(-1).view(np.uint8)
    assert flat.nbytes == nbytes, (flat.nbytes, nbytes)
    for at in [*range(0, nbytes - 8, 16 << 20), nbytes - 8]:
        assert int.from_bytes(flat[at : at + 8].tobytes(), "little") == at, at


def new(queue: tq.Queue) -> tq.Table:
    """A table without rows."""
    for name in queue.tables():
        queue.drop_table(name)
    return queue.create_table("t", tasks=[tq.Task("train")], limits=tq.Limits(rows=1 << 20))


def dense(queue: tq.Queue) -> None:
    """One row of it, and rows that are more together."""
    table = new(queue)
    table.put(x=marked(OVER).reshape(1, -1))
    check(table.read()["x"].numpy(), OVER)
    with table.lease("train", rows=1, fields=["x"]) as batch:
        check(batch["x"].torch().numpy(), OVER)


def dense_arrow(queue: tq.Queue) -> None:
    """As Arrow, whose fixed-size lists count in 32 bits."""
    table = new(queue)
    table.put(x=marked(OVER).reshape(1, -1))
    found = table.read()["x"].arrow()
    found.validate(full=True)
    check(found.flatten().to_numpy(), OVER)


def ragged(queue: tq.Queue) -> None:
    """Rows of different sizes, read as they lie and in another order."""
    table = new(queue)
    half = marked(OVER // 2 // 8 * 8)
    rows = table.put(x=[half, half[:-8], half[:8]])
    found = table.read()["x"]
    check(found[0], half.nbytes)
    values, offsets = found.ragged()
    assert int(offsets[-1]) == values.nbytes == 2 * half.nbytes
    found.arrow().validate(full=True)
    assert table.read(rows[::-1])["x"].lengths.tolist() == [8, half.nbytes - 8, half.nbytes]
    check(table.read(rows[[1, 0]])["x"][1], half.nbytes)


def texts(queue: tq.Queue) -> None:
    """Text and bytes, from Python and from Arrow arrays with 32-bit offsets."""
    table = new(queue)
    text = "a" * (OVER // 4)
    small = pa.chunked_array([pa.array([text[: GIB // 2]])] * 5)
    table.put(x=small)
    assert table.read()["x"].lengths.tolist() == [GIB // 2] * 5
    assert len(table.read()["x"].arrow()) == 5
    table = new(queue)
    table.put(x=[text] * 4 + ["end"])
    assert table.read()["x"][4] == "end"


def gathered(queue: tq.Queue) -> None:
    """Many rows of several blocks, in another order."""
    table = new(queue)
    parts = [marked(OVER // 4 // 4096 * 4096).reshape(-1, 4096) for _ in range(4)]
    rows = np.concatenate([table.put(x=part, n=np.arange(len(part))) for part in parts])
    order = rows[::-1]
    found = table.read(order)["x"].numpy()
    assert found.nbytes > 2 * GIB
    check(found[::-1][: len(parts[0])], parts[0].nbytes)


def weights(queue: tq.Queue) -> None:
    """A tensor with a dimension beyond 2^31."""
    new(queue)
    queue.weights("big").publish(1, {"w": marked(OVER)})
    with queue.weights("big").pull() as found:
        check(np.asarray(found["w"]), OVER)


def snapshot(queue: tq.Queue) -> None:
    """Out and back, for another server."""
    table = new(queue)
    table.put(x=marked(OVER).reshape(2, -1))
    queue.snapshot("s", timeout_s=600)


def restored(queue: tq.Queue) -> None:
    """What `snapshot` and `weights` left."""
    queue.restore("s", timeout_s=600)
    check(queue.table("t").read()["x"].numpy(), OVER)
    with queue.weights("big").pull() as found:
        check(np.asarray(found["w"]), OVER)


def main() -> int:
    """All of them; 1 if one failed."""
    root = Path(tempfile.mkdtemp(prefix="large-"))
    os.environ[SNAPSHOTS_VARIABLE] = str(root)
    try:
        server = embedded.start(arena_bytes=7 * GIB)
        with tq.connect(server.address) as queue:
            for act in (dense, dense_arrow, ragged, texts, gathered):
                if len(sys.argv) < 2 or act.__name__ in sys.argv:
                    told(act.__name__, lambda act=act: act(queue))  # type: ignore[misc]
        with tq.connect(server.address) as queue:
            told("weights", lambda: weights(queue))
            told("snapshot", lambda: snapshot(queue))
        server.stop()
        server = embedded.start(arena_bytes=7 * GIB)
        with tq.connect(server.address) as queue:
            told("restored", lambda: restored(queue))
        server.stop()
    finally:
        shutil.rmtree(root)
    return int(bool(FAILED))


if __name__ == "__main__":
    sys.exit(main())
