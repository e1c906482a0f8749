"""Snapshots of two coordinators, whose rows lie in four shards, while clients work at both: each table is restored
whole."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import transferqueue as tq
from tests.client.test_coordinators import Deployed
from tests.cluster.shards import PATIENCE_S, ShardProcess, await_shards
from tests.cluster.test_shards import ROWS, values
from tests.cluster.test_snapshots import counts
from tests.scale import only_long
from transferqueue.errors import NotFound, TransferQueueError, UsageError
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE
from transferqueue.wire.answers.stats import ServerStats
from transferqueue.wire.home_coordinator import home_coordinator

pytestmark = pytest.mark.slow
SEATS = ["1/2", "2/2"]


def name_at(number: int, beginning: str = "t") -> str:
    """The name of a table whose home is this coordinator."""
    return next(name for at in range(100) if home_coordinator(name := f"{beginning}{at}", 2) == number)


FIRST, SECOND = name_at(1), name_at(2)
TASKS = [tq.Task("reward", needs=["x"], gives=["score"]), tq.Task("train", needs=["x", "score"], groups=tq.Complete())]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, str(tmp_path / "snapshots"))
    return tmp_path / "snapshots"


@pytest.fixture
def deployed(root: Path, tmp_path: Path) -> Iterator[Deployed]:
    (tmp_path / "old").mkdir()
    with Deployed(tmp_path / "old", SEATS) as made:
        yield made


@pytest.fixture
def empty(tmp_path: Path, root: Path) -> Iterator[Deployed]:
    (tmp_path / "new").mkdir()
    with Deployed(tmp_path / "new", SEATS) as made:
        yield made


def put(table: tq.Table, number: int) -> None:
    """Eight rows, in groups of four."""
    groups = 2 * number + np.arange(ROWS) // 4
    table.put(
        x=values(number), ordinal=np.arange(ROWS) + ROWS * number, group_id=groups, group_size=4, timeout_s=PATIENCE_S,
        key=[f"{number}-{row}" for row in range(ROWS)], tags=[{"put": number}] * ROWS, policy_version=number,
    )  # fmt: skip


def fill(queue: tq.Queue) -> None:
    """Rows, groups, done and unfinished tasks and weights at both coordinators."""
    for name in (FIRST, SECOND):
        table = queue.create_table(name, tasks=TASKS)
        for number in range(5):
            put(table, number)
        for done in range(3):
            with table.lease("reward", rows=ROWS, timeout_s=PATIENCE_S) as batch:
                batch.ack(score=np.arange(len(batch)) + 100.0 * done)
        with table.lease("train", groups=1, timeout_s=PATIENCE_S):
            pass
        queue.weights(f"{name}/policy").publish(7, {"w": np.arange(6.0), "b": np.full((2, 3), 2, np.float32)})


NOT_KEPT = {"age_s", "put_by", "labels", "events", "events_complete", "fields", "tasks"}
"""What `inspect` says of a row and a snapshot does not keep, or what is compared one by one."""


class Chain:
    """Puts number after number, each at the first coordinator and, when that has answered, at the second; from one
    thread."""

    def __init__(self, address: str) -> None:
        self.failed: list[BaseException] = []
        self.puts = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address,))
        self._thread.start()

    def _run(self, address: str) -> None:
        try:
            with tq.connect(address) as queue:
                tables = [queue.table(name_at(number, "chain")) for number in (1, 2)]
                while not self._stopping.is_set():
                    for table in tables:
                        table.put(n=[np.full(3, self.puts)], ordinal=[self.puts], timeout_s=PATIENCE_S)
                    self.puts += 1
        except BaseException as error:
            self.failed.append(error)
            raise

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_S)
        assert not self.failed
        assert not self._thread.is_alive()


def contents(queue: tq.Queue, name: str) -> dict[str, object]:
    """Everything that a snapshot promises to keep of a table, as plain values."""
    table = queue.table(name)
    found: dict[str, object] = {"counts": counts(table.stats()), "cursor": table.cursor()}
    with table.read() as rows:
        found["x"] = dict(zip(rows.rows.tolist(), [row.tolist() for row in rows["x"]], strict=True))
        for row in rows.rows.tolist():
            life = queue.inspect(name, row)
            found[f"row {row}"] = {fact: value for fact, value in life.plain().items() if fact not in NOT_KEPT}
            found[f"fields of {row}"] = {field: (at.set, at.value) for field, at in life.fields.items()}
            found[f"tasks of {row}"] = {task: (at.state, at.attempts) for task, at in life.tasks.items()}
    with table.read(where=[tq.Compare("score", ">=", 0)]) as scored:
        found["score"] = dict(zip(scored.rows.tolist(), scored["score"].numpy().tolist(), strict=True))
    return found


def made_at(part: str) -> float:
    """When a part of a snapshot was made, in seconds since 1970."""
    return json.loads((Path(part) / "MANIFEST.json").read_text())["about"]["made_at"]


def rows_in(part: str, name: str) -> pa.Table:
    """The rows file of a table in a part of a snapshot."""
    tables = json.loads((Path(part) / "MANIFEST.json").read_text())["about"]["tables"]
    (directory,) = (table["directory"] for table in tables if table["name"] == name)
    return pa.ipc.open_file(Path(part) / directory / "rows.arrow").read_all()


# ---------------------------------------------------------------- bad input


@pytest.mark.long
def test_an_error_names_its_coordinator(deployed: Deployed, empty: Deployed) -> None:
    with tq.connect(deployed.address) as queue, tq.connect(empty.address) as other:
        with pytest.raises(UsageError, match=r"coordinator 1/2 at ipc.*is outside"):
            queue.snapshot("../s")
        with pytest.raises(NotFound, match=r"coordinator 1/2 at ipc"):
            other.restore("s")
        queue.create_table(FIRST, tasks=TASKS)
        queue.snapshot("s")
        with pytest.raises(UsageError, match=r"coordinator 1/2 at ipc.*into an empty deployment; this one has"):
            queue.restore("s")
        assert queue.tables() == [FIRST]
        assert other.tables() == []


@pytest.mark.long
def test_each_coordinator_restores_its_newest_snapshot(deployed: Deployed, empty: Deployed, root: Path) -> None:
    with tq.connect(deployed.address) as queue, tq.connect(empty.address) as other:
        for name in (FIRST, SECOND):
            queue.create_table(name, tasks=TASKS).put(x=values(1))
        queue.snapshot("s")
        queue.table(SECOND).put(x=values(2))
        queue.snapshot("s")
        assert sorted(path.name for path in (root / "s").iterdir()) == ["1-of-2", "2-of-2"]
        shutil.rmtree(root / "s/1-of-2/000002")
        restored = other.restore("s")
        assert [Path(each).name for each in restored] == ["000001", "000002"]
        assert [each.made_at and each.made_at.timestamp() for each in restored] == pytest.approx(
            [made_at(each.path) for each in restored], abs=1e-5
        )
        assert [len(other.table(name).read()) for name in (FIRST, SECOND)] == [ROWS, 2 * ROWS]


@pytest.mark.long
def test_a_snapshot_of_another_coordinator_is_refused(deployed: Deployed, empty: Deployed, root: Path) -> None:
    """The error says what the first one did."""
    with tq.connect(deployed.address) as queue, tq.connect(empty.address) as other:
        for name in (FIRST, SECOND):
            queue.create_table(name, tasks=TASKS).put(x=values(1))
        queue.snapshot("s")
        shutil.rmtree(root / "s/2-of-2")
        shutil.copytree(root / "s/1-of-2", root / "s/2-of-2")
        with pytest.raises(TransferQueueError, match=r"coordinator 2/2 at ipc.*; coordinators 1/2 go on with theirs"):
            other.restore("s")
        assert other.tables() == [FIRST]


def servers(queue: tq.Queue) -> list[ServerStats]:
    return [answer.server for answer in queue.stats().coordinators.values()]


# ---------------------------------------------------------------- there and elsewhere


@pytest.mark.parametrize("shards", [2, *only_long(4)])
def test_all_is_the_same_elsewhere_and_each_table_is_whole(
    deployed: Deployed, empty: Deployed, root: Path, shards: int
) -> None:
    with ExitStack() as stack:
        for at in range(shards):
            stack.enter_context(ShardProcess(deployed.all[at % 2].tcp))
        queue = stack.enter_context(tq.connect(deployed.address))
        for coordinator in deployed.all:
            await_shards(stack.enter_context(tq.connect(coordinator.ipc)), shards // 2)
        fill(queue)
        assert all(shard.used_bytes for server in servers(queue) for shard in server.shards)
        for number in (1, 2):
            queue.create_table(name_at(number, "chain"), tasks=[tq.Task("t", needs=["n"])])
        chain = Chain(deployed.address)
        try:
            parts: list[str] = []
            for _ in range(3):
                before = chain.puts
                parts = [each.path for each in queue.snapshot("s", timeout_s=PATIENCE_S)]
                first, second = (
                    sorted(rows_in(part, name_at(number, "chain"))["ordinal"].to_pylist())
                    for number, part in enumerate(parts, 1)
                )
                assert first == list(range(len(first)))
                assert second == list(range(len(second)))
                assert len(second) >= before
                assert len(first) >= before
        finally:
            chain.stop()
        other = stack.enter_context(tq.connect(empty.address))
        assert [each.path for each in other.restore("s", timeout_s=PATIENCE_S)] == parts
        assert other.tables() == queue.tables()
        for name in (FIRST, SECOND):
            assert contents(other, name) == contents(queue, name)
            with other.weights(f"{name}/policy").pull() as weights:
                assert weights.version == 7
                assert weights["w"].tolist() == list(range(6))
                assert (np.asarray(weights["b"]) == 2).all()
        for number, count in ((1, len(first)), (2, len(second))):
            with other.table(name_at(number, "chain")).read() as rows:
                assert sorted(row[0] for row in rows["n"]) == list(range(count))
        assert other.audit().balanced


@pytest.mark.long
def test_a_shard_that_dies_ends_the_snapshot_of_its_coordinator_alone(deployed: Deployed, root: Path) -> None:
    with tq.connect(deployed.address) as queue, ShardProcess(deployed.all[1].tcp) as shard:
        await_shards_of(deployed, 1)
        fill(queue)
        queue.snapshot("s", timeout_s=PATIENCE_S)
        shard.process.send_signal(19)
        error: list[TransferQueueError] = []

        def take() -> None:
            try:
                queue.snapshot("s", timeout_s=PATIENCE_S)
            except TransferQueueError as raised:
                error.append(raised)

        taking = threading.Thread(target=take)
        taking.start()
        while not list((root / "s/2-of-2").glob(".new-*")):
            pass
        shard.kill()
        taking.join(PATIENCE_S)
        assert "coordinator 2/2 at ipc" in str(error[0])
        assert "the only copy of block" in str(error[0])
        assert sorted(str(path.relative_to(root)) for path in root.glob("s/*/*")) == [
            "s/1-of-2/000001",
            "s/1-of-2/000002",
            "s/2-of-2/000001",
        ]
        queue.snapshot("s", timeout_s=PATIENCE_S)


def await_shards_of(deployed: Deployed, number: int) -> None:
    with tq.connect(deployed.all[number].ipc) as queue:
        await_shards(queue, 1)
