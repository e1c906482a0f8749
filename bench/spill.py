"""What a queue costs whose rows are four times its memory: puts all rows, then leases them back, with the arena
spilling to a disk and without.

    python -m bench.spill --directory DIR

Rows of 64 KiB in puts of 16; a lease takes 16 rows, compares its bytes, and acks. Reports MB/s of each phase, what was
spilled and loaded, and the most bytes that the arena had in use. `--remote` fetches over TCP instead of mapping.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import transferqueue as tq
from transferqueue.limits import MIB
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.server.runtime_directory import private_arena
from transferqueue.server.spill.spill_file import SpillPolicy
from transferqueue.transport import parse_address
from transferqueue.wire.answers.stats import SpillStats

ROW_BYTES = 64 * 1024
ROWS_PER_PUT = 16


def measured(directory: Path, arena_mib: int, rows_mib: int, *, spills: bool, remote: bool) -> dict[str, float]:
    """One run. spills: the arena has `arena_mib`; else it has room for all rows."""
    directory.chmod(0o700)
    address = parse_address(f"ipc://{directory}/control.sock")
    port = parse_address("tcp://127.0.0.1:0")
    arena_bytes = (arena_mib if spills else 2 * rows_mib) * MIB
    policy = SpillPolicy(directory / "spill", 2 * rows_mib * MIB) if spills else None
    server = ServerProcess(address, private_arena(arena_bytes), [port], spill=policy)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        place = server.tcp_addresses[0] if remote else server.address
        with tq.connect(place, data="remote" if remote else "auto") as queue:
            return _filled_and_drained(queue, server, rows_mib * MIB // (ROW_BYTES * ROWS_PER_PUT))
    finally:
        server.stop()
        thread.join()


def _filled_and_drained(queue: tq.Queue, server: ServerProcess, puts: int) -> dict[str, float]:
    field = tq.Field("body", "uint8", (ROW_BYTES,))
    table = queue.create_table("rows", fields=[field], tasks=[tq.Task("train", needs=["body"])])
    noise = np.random.default_rng(0).integers(
        0, 256, (ROWS_PER_PUT, ROW_BYTES), np.uint8
    )  # equal rows would be stored once
    memory = server.coordinator.memory
    most, began = 0, time.perf_counter()
    for number in range(puts):
        table.put(body=noise ^ np.uint8(number % 251))
        most = max(most, memory.used)
    filled = time.perf_counter()
    table.seal()
    for number in range(puts):
        with table.lease("train", rows=ROWS_PER_PUT, timeout_s=60) as batch:
            if not np.array_equal(batch["body"].numpy(), noise ^ np.uint8(number % 251)):
                raise AssertionError(f"put {number} came back with other bytes")
        most = max(most, memory.used)
    drained = time.perf_counter()
    megabytes = puts * ROWS_PER_PUT * ROW_BYTES / 1e6
    spill = queue.stats().server.spill or SpillStats()
    return {
        "put_mb_s": megabytes / (filled - began),
        "lease_mb_s": megabytes / (drained - filled),
        "both_mb_s": megabytes / (drained - began),
        "arena_used_most_mib": most / MIB,
        "spilled_mib": spill.spilled_bytes / MIB,
        "loaded_mib": spill.loaded_bytes / MIB,
        "load_waits_s": spill.load_waits_s,
    }


def main() -> None:
    """Run both, alternately."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to spill to; default: the system's")
    parser.add_argument("--arena-mib", type=int, default=64)
    parser.add_argument("--rows-mib", type=int, default=256)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--remote", action="store_true")
    options = parser.parse_args()
    for _ in range(options.times):
        for spills in (False, True):
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                run = measured(
                    Path(directory),
                    options.arena_mib,
                    options.rows_mib,
                    spills=spills,
                    remote=options.remote,
                )
            shown = "  ".join(f"{name} {value:.4g}" for name, value in run.items())
            print("spilling " if spills else "in memory", shown, flush=True)


if __name__ == "__main__":
    main()
