"""A served queue with four times as many bytes as memory: what goes in comes out equal, whoever dies meanwhile."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.limits import MIB
from transferqueue.server.process.assembly import ServerProcess
from transferqueue.server.process.serve import serve
from transferqueue.server.runtime_directory import private_arena
from transferqueue.server.spill.spill_file import SpillPolicy
from transferqueue.transport import parse_address

ROWS = 16
ROW_BYTES = 64 * 1024
NOISE = np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
"""Equal rows would be stored once."""
WORKER = """
import sys
import transferqueue as tq
with tq.connect(sys.argv[1]) as queue:
    batch = queue.table("rows").lease("train", rows=32)
    columns = batch["body"].numpy()
    print("leased", flush=True)
    sys.stdin.read()
"""


@contextmanager
def served(directory, arena_mib=8, *, spills=True):
    directory.mkdir(mode=0o700)
    address, port = parse_address(f"ipc://{directory}/control.sock"), parse_address("tcp://127.0.0.1:0")
    policy = SpillPolicy(directory / "spill", 256 * MIB) if spills else None
    server = ServerProcess(
        address,
        private_arena(arena_mib * MIB),
        [port],
        snapshots=directory.parent / "snapshots",
        records=directory.parent / "records",
        spill=policy,
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def fill(queue, puts):
    field = tq.Field("body", "uint8", (ROW_BYTES,))
    table = queue.create_table("rows", fields=[field], tasks=[tq.Task("train", needs=["body"])])
    for number in range(puts):
        table.put(body=NOISE ^ np.uint8(number))
    table.seal()
    return table


def drain(table, puts):
    """Lease the rows of these puts, in their order, and compare their bytes."""
    for number in puts:
        with table.lease("train", rows=ROWS, timeout_s=30) as batch:
            assert np.array_equal(batch["body"].numpy(), NOISE ^ np.uint8(number)), number


@pytest.mark.slow
def test_four_times_the_memory_comes_out_equal_here_and_elsewhere_though_a_worker_is_killed(tmp_path):
    with served(tmp_path / "server") as server, tq.connect(server.address) as queue:
        table = fill(queue, 32)
        spill = queue.stats().server.spill
        assert spill.bytes >= (32 - 6) * MIB
        assert server.coordinator.memory.used <= 6 * MIB
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, server.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as worker:
            assert worker.stdout.readline() == b"leased\n"
            worker.kill()
        drain(table, range(14))
        with tq.connect(server.tcp_addresses[0], data="remote") as elsewhere:
            drain(elsewhere.table("rows"), range(14, 32))
        assert table.audit().rows_done == 32 * ROWS
        after = queue.stats().server
        assert (after.spill.blocks, after.spill.bytes, after.used_bytes) == (0, 0, 0)
        assert after.spill.loaded_bytes >= spill.bytes
        assert list((tmp_path / "server" / "spill").iterdir()) == []


@pytest.mark.slow
def test_a_snapshot_has_what_is_on_the_disk(tmp_path):
    with served(tmp_path / "server") as server, tq.connect(server.address) as queue:
        fill(queue, 16)
        assert queue.stats().server.spill.bytes >= (16 - 6) * MIB
        queue.snapshot("kept")
    with served(tmp_path / "next", 64, spills=False) as server, tq.connect(server.address) as queue:
        queue.restore("kept")
        drain(queue.table("rows"), range(16))


@pytest.mark.slow
def test_rows_on_the_disk_are_recorded_while_a_snapshot_reads_them_too(tmp_path):
    with served(tmp_path / "server") as server, tq.connect(server.address) as queue:
        field = tq.Field("body", "uint8", (ROW_BYTES,))
        table = queue.create_table(
            "rows", fields=[field], tasks=[tq.Task("train", needs=["body"])], retention=tq.Recorded("run")
        )
        rows = [row for number in range(16) for row in table.put(body=NOISE ^ np.uint8(number))]
        assert queue.stats().server.spill.bytes >= (16 - 6) * MIB
        with ThreadPoolExecutor(1) as beside:
            taken = beside.submit(queue.snapshot, "kept")
            table.drop(rows, reason="surplus")
            taken.result(60)
    recorded = tq.open_run(tmp_path / "records" / "run").table("rows")
    assert recorded.check() == []
    found = recorded.arrow(["_row", "body"]).sort_by("_row")
    assert found["_row"].to_pylist() == rows
    for number in range(16):
        bodies = np.array(found["body"].slice(number * ROWS, ROWS).to_pylist(), np.uint8)
        assert np.array_equal(bodies, NOISE ^ np.uint8(number)), number


def test_options_that_cannot_be_are_refused_before_anything_listens(tmp_path):
    def refused(match, **options):
        with pytest.raises(tq.errors.UsageError, match=match):
            serve(f"ipc://{tmp_path}/run/control.sock", arena_bytes=16 * MIB, on_ready=lambda _: None, **options)

    refused("give both --spill-dir and --spill-bytes", spill_dir=tmp_path / "spill")
    refused("give both --spill-dir and --spill-bytes", spill_bytes=16 * MIB)
    refused("is below", spill_dir=tmp_path / "spill", spill_bytes=MIB)
    refused("that are free in", spill_dir=tmp_path / "spill", spill_bytes=1 << 59)
    refused("spilled blocks end with the process", spill_dir=tmp_path / "spill", spill_bytes=16 * MIB,
            durability="process", state=tmp_path / "state")  # fmt: skip
