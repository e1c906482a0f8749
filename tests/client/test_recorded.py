"""`Recorded`: each row that has ended is in one file, with its values and its life, while the table is in use and
after any kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import transferqueue as tq
from tests.client.test_full_disk import SmallDisk, disk  # noqa: F401  (a fixture)
from tests.scale import sizes
from transferqueue.server.row_record import part

TASKS = [tq.Task("train", needs=["ids"], retry=tq.Retry(first_s=0, attempts=1))]


def wait_until_recorded(table: tq.Table, rows: int) -> None:
    """Until that many rows are in files. The test's own deadline bounds it."""
    tick = threading.Event()
    while table.stats().rows_recorded < rows:
        tick.wait(0.02)


def test_files_have_the_bytes_that_were_put(tmp_path: Path) -> None:
    """Every layout, and rows without a value: as they were put, by bits."""
    columns: dict[str, Any] = {
        "ids": [np.array([1, 2, 3], np.int32), np.array([], np.int32), np.array([7], np.int32)],
        "image": [np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((0, 3), np.uint8), np.ones((1, 3), np.uint8)],
        "dense": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.array([1.5, -0.0, 6e-8], np.float16),
        "reward": [1.0, -0.0, float("inf")],
        "flag": [True, False, True],
        "text": ["a", "größe", ""],
        "raw": [b"\0\xff", b"", b"x"],
        "odd": [{"a": 1}, None, [1, 2]],
    }
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded(str(tmp_path / "run")))
        rows = table.put(**columns)
        table.update(rows[1:2], late=[[0.5, 0.25]])
        kept = table.read(rows)
        expected = {name: kept[name].arrow().to_pylist() for name in columns}
        with table.lease("train", rows=3):
            pass
    recorded = tq.open_run(tmp_path / "run").table("t")
    found = recorded.arrow()
    assert {name: found[name].to_pylist() for name in columns} == expected
    assert found["half"].combine_chunks().buffers()[1].to_pybytes()[:6] == columns["half"].tobytes()
    assert found["late"].to_pylist() == [None, [0.5, 0.25], None]
    assert found["_row"].to_pylist() == [0, 1, 2]
    assert recorded.check() == []


def test_bf16_stays_bf16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = [torch.tensor([1.0, -2.5], dtype=torch.bfloat16), torch.tensor([3.0], dtype=torch.bfloat16)]
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded(str(tmp_path)))
        table.put(ids=[[1], [2]], hidden=values)
        table.lease("train", rows=2).ack()
    (file,) = tq.open_run(tmp_path).table().files
    column = pq.read_table(file)["hidden"]
    assert pq.read_schema(file).field("hidden").metadata[b"transferqueue.dtype"] == b"bfloat16"
    bits = [np.array(row, np.uint16) for row in column.to_pylist()]
    assert [torch.from_numpy(row.view(np.int16)).view(torch.bfloat16).tolist() for row in bits] == [[1.0, -2.5], [3.0]]


def test_the_life_of_a_row_is_beside_it(tmp_path: Path) -> None:
    with tq.connect("embedded", label="trainer-0") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded(str(tmp_path)))
        table.put(ids=[[1], [2], [3], [4]], key=["a", "b", "c", "d"], tags={"source": "math"}, policy_version=5)
        table.lease("train", rows=1).ack(step=7)
        table.lease("train", rows=1).release(failed=True, reason="bad sum")
        table.drop([2], reason="too_long")
        table.delete([3])
        table.put(ids=[[9]], key=["b"])  # the key of an ended row is free at once
        table.checkpointed(7)
        audit = table.audit()
    rows = {row["_row"]: row for row in tq.open_run(tmp_path).table().arrow().to_pylist()}
    assert {row: (each["_fate"], each["_reason"], each["_step"]) for row, each in rows.items()} == {
        0: ("done", None, 7),
        1: ("dropped", "attempts", None),
        2: ("dropped", "too_long", None),
        3: ("dropped", "deleted", None),
    }
    assert audit.rows_done == 1
    assert audit.dropped == Counter(each["_reason"] for each in rows.values() if each["_reason"])
    assert [rows[1][name] for name in ("_key", "_tags", "_version")] == ["b", '{"source": "math"}', 5]
    events = [(event["what"], event["task"], event["worker"], event["detail"]) for event in rows[1]["_events"]]
    assert events[0] == ("put", None, "trainer-0", None)
    assert ("failed", "train", "trainer-0", "bad sum") in events
    assert events[-1] == ("dropped", None, None, "attempts")
    assert rows[1]["_attempts"] == [{"task": "train", "failures": 1}]


def test_a_run_is_read_while_it_goes_on(tmp_path: Path) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, limits=tq.Limits(rows=4), retention=tq.Recorded(str(tmp_path)))
        for number in range(3):  # more rows than the table holds: those that ended leave it by their files
            table.put(ids=[[number]] * 4, timeout_s=60)
            table.lease("train", rows=4, timeout_s=60).ack()
        wait_until_recorded(table, 12)
        recorded = tq.open_run(tmp_path).table("t")
        assert sorted(recorded.arrow(["_row"])["_row"].to_pylist()) == list(range(12))
        assert recorded.arrow(["ids"], pc.field("_row") == 5)["ids"].to_pylist() == [[1]]
        assert table.stats().rows_resident == 0


def test_a_table_that_records_is_not_dropped_with_rows(tmp_path: Path) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded(str(tmp_path)))
        table.put(ids=[[1]])
        with pytest.raises(tq.UsageError, match=r"records its rows, and 1 live ones .* end the live ones by drop"):
            queue.drop_table("t")
        table.drop([0], reason="over")
        wait_until_recorded(table, 1)
        queue.drop_table("t")
    assert tq.open_run(tmp_path).table().arrow(["_reason"])["_reason"].to_pylist() == ["over"]


def test_a_restored_snapshot_has_a_life_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers record what they end: no row is missing, and none is told twice in one life."""
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path / "snapshots"))
    retention = tq.Recorded(str(tmp_path / "run"))
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=retention)
        table.put(ids=[[1], [2], [3]])
        table.lease("train", rows=1).ack()
        queue.snapshot("s")
        table.lease("train", rows=2).ack()
    with tq.connect("embedded") as queue:
        queue.restore("s")
        table = queue.table("t")
        table.lease("train", rows=2).ack()
        assert table.audit().rows_done == 3
    rows = tq.open_run(tmp_path / "run").table().arrow(["_life", "_row"]).to_pylist()
    lives = {row["_life"] for row in rows}
    assert len(lives) == 2
    assert sorted(sorted(row["_row"] for row in rows if row["_life"] == life) for life in lives) == [[0, 1, 2], [1, 2]]


def test_a_snapshot_whose_directory_is_outside_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_SNAPSHOTS", str(tmp_path / "snapshots"))
    with tq.connect("embedded") as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded(str(tmp_path / "run")))
        table.put(ids=[[1]])
        queue.snapshot("s")
    (tmp_path / "run" / "t" / ".aside").rmdir()
    (tmp_path / "run" / "t").rename(tmp_path / "kept")
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_bytes(b"")
    with tq.connect("embedded") as queue:
        with pytest.raises(tq.UsageError, match=r'table "t" cannot record its rows: .* cannot be written to'):
            queue.restore("s")
        assert queue.tables() == []
        other = queue.create_table("u", tasks=TASKS, retention=tq.Recorded(str(tmp_path / "other")))
        other.put(ids=[[1]])
        other.drop([0], reason="over")
    assert tq.open_run(tmp_path / "other").table("u").arrow(["_row"]).num_rows == 1


def put_for_ever(table: tq.Table) -> None:
    """Until the table takes no more."""
    while not threading.Event().wait(0.05):
        table.put(ids=[[1]])


@pytest.mark.parametrize("required", [True, False])
def test_a_full_disk(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, *, required: bool) -> None:  # noqa: F811
    """Rows wait, then puts are refused, or rows end without a file and are counted; with room, it goes on by itself."""
    monkeypatch.setattr(part, "PATIENCE_S", 0.3)
    monkeypatch.setattr(part, "RETRY_S", 0.1)
    with tq.connect("embedded") as queue:
        retention = tq.Recorded(str(disk.path / "run"), required=required)
        table = queue.create_table("t", tasks=TASKS, retention=retention)
        disk.fill()
        table.put(ids=[np.random.default_rng(0).integers(0, 1 << 60, 1 << 16)])
        table.lease("train", rows=1).ack()
        tick = threading.Event()
        if required:
            with pytest.raises(tq.Full, match=r'table "t" takes no rows: .*No space left on device'):
                put_for_ever(table)
        else:
            while not table.stats().rows_unrecorded:
                tick.wait(0.05)
        disk.empty()
        if not required:
            table.put(ids=[[1]])
        if table.stats().rows_live:
            table.drop(list(range(1, table.stats().rows_put)), reason="over")
        while table.stats().rows_to_record:
            tick.wait(0.05)
        audit, stats = table.audit(), table.stats()
        assert table.put(ids=[[1]])
    recorded = tq.open_run(disk.path / "run").table()
    assert recorded.check() == []
    assert recorded.arrow(["_row"]).num_rows == audit.rows_done + audit.rows_dropped - stats.rows_unrecorded
    assert stats.rows_unrecorded == (0 if required else 1)


# ---------------------------------------------------------------- servers of their own


class Server(AbstractContextManager["Server"]):
    """A server process with a state and a directory of records, which may be killed and started again."""

    def __init__(self, directory: Path, level: str) -> None:
        self.address = f"ipc://{directory}/run/q.sock"
        self._options = ["--durability", level, "--state", f"{directory}/state"]
        self._environment = os.environ | {"TRANSFERQUEUE_RECORDS": f"{directory}/records"}
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "transferqueue.server", "--address", self.address, "--arena-bytes", "64MiB"]
        self.process = subprocess.Popen(
            [*command, *self._options], stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("ready")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


def values_of(number: int) -> np.ndarray[Any, Any]:
    """The ids of the row of this number."""
    return np.random.default_rng(number).integers(0, 1 << 30, number % 50 + 1)


def work(table: tq.Table, batches: int, done: list[int]) -> None:
    """Put, train and drop rows; `done` grows by one for each batch."""
    for batch in range(batches):
        numbers = range(batch * 16, batch * 16 + 16)
        rows = table.put(number=list(numbers), ids=[values_of(number) for number in numbers], timeout_s=120)
        table.drop(list(rows)[:3], reason=f"r{batch % 3}")
        with table.lease("train", rows=13, timeout_s=120):
            pass
        done.append(batch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", sizes(5, 60))
@pytest.mark.parametrize("level", ["process", "disk"])
def test_each_row_is_in_one_file_whenever_the_server_is_killed(level: str, kills: int, tmp_path: Path) -> None:
    """The server gets a SIGKILL at random instants, also while it writes a file."""
    instants, batches = random.Random(kills), kills * 30
    done: list[int] = []
    with Server(tmp_path, level) as server, tq.connect(server.address) as queue:
        table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded("run"), limits=tq.Limits(rows=256))
        worker = threading.Thread(target=work, args=(table, batches, done), daemon=True)
        worker.start()
        pause = threading.Event()
        for _ in range(kills):
            pause.wait(instants.uniform(0.05, 1.3))
            server.kill()
            server.start()
        worker.join(500)
        assert len(done) == batches
        audit = table.audit()
        wait_until_recorded(table, audit.rows_done + audit.rows_dropped)
        check(tq.open_run(tmp_path / "records" / "run").table("t"), batches, audit)
    aside = tmp_path / "records" / "run" / "t" / ".aside"
    assert not list(aside.iterdir()), "what a killed server was writing is gone"


def check(recorded: tq.RecordedRows, batches: int, audit: Any) -> None:
    """Each row that was put is there once, with the values that were put, and the sums are those of the audit."""
    assert recorded.check() == []
    rows = recorded.arrow(["_life", "_row", "_fate", "_reason", "number", "ids", "_events"]).to_pylist()
    assert len({row["_life"] for row in rows}) == 1
    assert sorted(row["_row"] for row in rows) == list(range(batches * 16))
    assert sorted(row["number"] for row in rows) == list(range(batches * 16))
    assert all(row["ids"] == values_of(row["number"]).tolist() for row in rows)
    assert Counter(row["_fate"] for row in rows) == {"done": audit.rows_done, "dropped": audit.rows_dropped}
    assert Counter(row["_reason"] for row in rows if row["_reason"]) == audit.dropped
    assert all(row["_events"][0]["what"] == "put" for row in rows)
    assert audit.rows_live == 0
