"""Snapshots of a running deployment, and deployments made from them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import transferqueue as tq
from transferqueue.errors import Corruption, EndOfTable, FlowSignal, Full, NotFound, OutOfMemory, UsageError
from transferqueue.server.durability import snapshot_directory
from transferqueue.server.durability.snapshot_files import _Rows
from transferqueue.server.durability.snapshots import SNAPSHOTS_VARIABLE
from transferqueue.server.process import embedded


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def queue(root: Path) -> Iterator[tq.Queue]:
    with tq.connect() as made:
        yield made


TASKS = [tq.Task("reward", needs=["text"], gives=["score", "trace"]), tq.Task("train", needs=["text", "score"])]


def filled(queue: tq.Queue) -> tq.Table:
    table = queue.create_table("rollouts", tasks=TASKS)
    prompts = tq.Repeat([np.arange(4), np.arange(9)], 3)
    table.put(
        prompt_ids=prompts, text=[f"row {n}" for n in range(6)], ordinal=range(6), key=[f"k{n}" for n in range(6)],
        tags=[{"n": n} for n in range(6)], policy_version=2, image=[np.full((n, 2), n, np.float32) for n in range(6)],
    )  # fmt: skip
    with table.lease("reward", rows=4) as batch:
        batch.ack(score=np.arange(4.0), trace=[{"why": n} for n in range(4)])
    return table


def arrow(path: str | Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("path", ["../other", "/etc/x", "a/../../b", "nul\0"])
def test_paths_stay_under_the_root(queue: tq.Queue, root: Path, path: str) -> None:
    with pytest.raises(UsageError, match=r"is outside .*root, where this server keeps snapshots; name one under it"):
        queue.snapshot(path)
    with pytest.raises(UsageError, match="is outside"):
        queue.restore(path)
    assert not root.exists()


@pytest.mark.parametrize("path", ["000001", "runs/000001", "000001/more"])
def test_no_snapshot_is_written_into_another(queue: tq.Queue, root: Path, path: str) -> None:
    """A restore of its name would be of the other one, and what removes that one would remove it."""
    queue.snapshot(".")
    with pytest.raises(UsageError, match="has a number for a name"):
        queue.snapshot(path)
    assert [found.name for found in root.iterdir()] == ["000001"]


def test_a_link_out_of_the_root_is_outside(queue: tq.Queue, root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (root / "out").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is outside"):
        queue.snapshot("out/x")


def test_there_must_be_a_snapshot_to_restore(queue: tq.Queue) -> None:
    with pytest.raises(NotFound, match=r"there is no snapshot at .*nothing; name the directory"):
        queue.restore("nothing")


def test_a_restore_needs_an_empty_deployment(queue: tq.Queue) -> None:
    filled(queue)
    queue.snapshot("s")
    with pytest.raises(UsageError, match="into an empty deployment; this one has rollouts"):
        queue.restore("s")


def test_a_flipped_byte_in_any_file_is_found_and_named(queue: tq.Queue, root: Path) -> None:
    filled(queue)
    queue.weights("actor").publish(1, {"w": np.arange(6.0).reshape(2, 3)})
    made = Path(queue.snapshot("s")[0])
    for file in sorted(one for one in made.rglob("*") if one.is_file()):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
        with tq.connect() as other, pytest.raises(Corruption, match=file.name.replace(".xxh3", ".json")):
            other.restore("s")
        file.write_bytes(whole)
    (made / "tables/0/rows.arrow").unlink()
    with tq.connect() as other:
        with pytest.raises(Corruption, match=r"rows\.arrow cannot be read"):
            other.restore("s")
        assert other.tables() == []


def test_an_arena_too_small_is_told_and_left_empty(queue: tq.Queue) -> None:
    filled(queue).put(text=["x" * 3_000_000])
    queue.snapshot("s")
    server = embedded.start(arena_bytes=1 << 20)
    try:
        with tq.connect(server.address) as other:
            with pytest.raises((OutOfMemory, UsageError), match="arena"):
                other.restore("s")
            assert other.tables() == []
            assert other.stats().server.used_bytes == 0
    finally:
        server.stop()


# ---------------------------------------------------------------- there and back


def test_everything_comes_back(queue: tq.Queue, root: Path) -> None:
    table = filled(queue)
    table.lease("train", rows=1)  # lent: ready again after the restore
    queue.weights("actor").publish(7, {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.zeros(3)})
    seen: list[tuple[int, int]] = []
    (made,) = queue.snapshot("run/a", progress=lambda done, total: seen.append((done, total)))
    assert made.path == os.fspath(made) == str(root / "run/a/000001")
    with tq.connect() as other:
        assert other.restore("run/a") == [made]
        again = other.table("rollouts")
        rows, wanted = again.read(), table.read()
        for name in ("prompt_ids", "text", "image"):
            assert rows[name].arrow() == wanted[name].arrow()
        assert rows.rows.tolist() == wanted.rows.tolist()
        assert (rows.keys, rows.tags) == (wanted.keys, wanted.tags)
        assert again.read([0, 1, 2, 3])["trace"].list() == [{"why": n} for n in range(4)]
        assert again.lease("train", rows=4)["score"].numpy().tolist() == [0, 1, 2, 3]
        assert again.lease("reward", rows=2).rows.tolist() == [4, 5]
        assert again.put(text=["new"]).tolist() == [6]
        assert other.audit().balanced
        with other.weights("actor").pull() as weights:
            assert weights.version == 7
            np.testing.assert_array_equal(weights["w"], np.arange(6, dtype=np.float32).reshape(2, 3))


def test_shared_values_are_stored_once_and_read_by_anything(queue: tq.Queue) -> None:
    filled(queue)
    made = Path(queue.snapshot("s")[0])
    about = json.loads((made / "MANIFEST.json").read_bytes())["about"]["tables"][0]
    rows = arrow(made / about["directory"] / "rows.arrow")
    prompts = arrow(made / about["directory"] / f"field-{about['placed'].index('prompt_ids')}.arrow")
    assert len(prompts) == 2
    joined = prompts["prompt_ids"].take(rows["at/prompt_ids"].combine_chunks())
    assert joined.to_pylist() == [list(range(4))] * 3 + [list(range(9))] * 3
    assert rows["field/score"].to_pylist() == [0, 1, 2, 3, None, None]
    assert pc.sum(pc.equal(rows["task/train/state"].cast(pa.string()), "ready")).as_py() == 4
    assert (os.stat(made).st_mode & 0o777, os.stat(made / "MANIFEST.json").st_mode & 0o777) == (0o700, 0o600)


def test_an_empty_table_and_an_empty_deployment(queue: tq.Queue) -> None:
    queue.snapshot("nothing")
    queue.create_table("t", tasks=[tq.Task("train")], fields=[tq.Field("x", "int64", (None,))])
    queue.snapshot("empty")
    for path, tables in (("nothing", []), ("empty", ["t"])):
        with tq.connect() as other:
            other.restore(path)
            assert other.tables() == tables


def test_a_column_that_older_snapshots_lack_is_what_it_was_before() -> None:
    made = snapshot_directory.SnapshotReader(Path("s"), b"", {})
    rows = _Rows(made, "rows.arrow", pa.table({"row_id": np.arange(3)}))
    assert rows.numbers("stamped", np.int64, missing=-1).tolist() == [-1] * 3
    assert rows.numbers("row_id", np.int64, missing=-1).tolist() == [0, 1, 2]
    assert _Rows(made, "rows.arrow", None).numbers("stamped", np.int64, missing=-1).tolist() == []


def test_the_newest_are_kept(queue: tq.Queue, root: Path) -> None:
    table = filled(queue)
    for _ in range(4):
        table.put(text=["more"])
        queue.snapshot("s", keep=2)
    assert sorted(one.name for one in (root / "s").iterdir()) == ["000003", "000004"]
    with tq.connect() as other:
        other.restore("s/000003")
        assert other.table("rollouts").stats().rows_put == 9


def test_a_full_disk_leaves_the_old_one_whole(queue: tq.Queue, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(queue)
    queue.snapshot("s")

    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(snapshot_directory, "sync_path", full)
        with pytest.raises(OutOfMemory, match=r"does not fit its disk \(No space left.*earlier snapshots are unharmed"):
            queue.snapshot("s")
    assert [one.name for one in (root / "s").iterdir()] == ["000001"]
    assert queue.snapshot("s")[0].path.endswith("000002")


def test_what_a_dead_writer_left_is_swept(queue: tq.Queue, root: Path) -> None:
    (root / "s/.new-12345678/tables").mkdir(parents=True)
    filled(queue)
    queue.snapshot("s")
    assert [one.name for one in (root / "s").iterdir()] == ["000001"]


def test_a_server_that_stops_leaves_no_half_snapshot(root: Path) -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train")])
        for _ in range(20):
            table.put(x=np.zeros((4, 1 << 20), np.uint8))
        queue.snapshot("s", timeout_s=0)
    assert all(one.name == "000001" for one in (root / "s").iterdir())


def test_a_snapshot_holds_what_is_freed_meanwhile_and_lets_it_go(queue: tq.Queue) -> None:
    table = queue.create_table("t", tasks=[tq.Task("train")])
    table.put(x=np.zeros((4, 1 << 20), np.uint8))
    queue.snapshot("s", timeout_s=0)
    table.lease("train", rows=4).ack()
    with tq.connect() as other:
        wait_for_snapshot(queue)
        other.restore("s")
        assert other.table("t").read()["x"].numpy().shape == (4, 1 << 20)


def wait_for_snapshot(queue: tq.Queue) -> None:
    """Another begins only when the first has ended: `Full` says that it has not."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            queue.snapshot("another")
            return
        except Full:
            continue
    raise AssertionError("the snapshot did not end within 60 s")


def test_from_an_event_loop(root: Path) -> None:
    async def main() -> None:
        async with tq.aconnect() as queue:
            table = await queue.create_table("t", tasks=[tq.Task("train")])
            await table.put(text=["a", "b"], ordinal=[0, 1])
            async with table.lease("train", rows=1) as batch:
                await batch.ack(step=3)
            assert await table.checkpointed(2) == 0
            assert await queue.snapshot("s")
        async with tq.aconnect() as other:
            await other.restore("s")
            again = await other.table("t")
            assert (await again.cursor(), await again.rollback(2), await again.cursor()) == (0, 1, 0)

    asyncio.run(main())


# ---------------------------------------------------------------- under load


class Load:
    """Producers and consumers until `stop`; every put has four rows of one value, every reward is ten times its row's
    number."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.stopping = threading.Event()
        self.failures: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self.produce, self.reward, self.train)
        ]

    def _guarded(self, work: Any) -> None:
        try:
            with tq.connect(self.address) as queue:
                work(queue.table("rollouts"))
        except BaseException as error:  # noqa: BLE001  (told by the test)
            self.failures.append(error)

    def produce(self, table: tq.Table) -> None:
        number = 0
        while not self.stopping.is_set():
            try:
                table.put(text=[f"{number}"] * 4, payload=[np.full(200, number)] * 4, timeout_s=1)
                number += 1
            except FlowSignal:
                continue

    def reward(self, table: tq.Table) -> None:
        for batch in self._batches(table, "reward"):
            batch.ack(score=batch.rows * 10.0, trace=[f"{row}" for row in batch.rows])

    def train(self, table: tq.Table) -> None:
        for batch in self._batches(table, "train"):
            batch.ack()

    def _batches(self, table: tq.Table, task: str) -> Iterator[Any]:
        while not self.stopping.is_set():
            try:
                yield table.lease(task, rows=16, at_least=1, timeout_s=1)
            except EndOfTable:
                return
            except FlowSignal:
                continue


@pytest.mark.slow
def test_cuts_under_load_are_consistent(queue: tq.Queue, root: Path) -> None:
    queue.create_table("rollouts", tasks=TASKS, limits=tq.Limits(rows=2000))
    load = Load(queue.address)
    for thread in load.threads:
        thread.start()
    table = queue.table("rollouts")
    try:
        for number in range(5):
            wanted = table.stats().rows_put + 400
            while table.stats().rows_put < wanted and not load.failures:
                table.lease("train", rows=1, timeout_s=10).release()
            held = table.lease("train", rows=1, timeout_s=10)  # or the consumers may have left no row for the cut
            queue.snapshot(f"s{number}")
            held.release()
    finally:
        load.stopping.set()
        for thread in load.threads:
            thread.join(60)
    assert not load.failures
    for number in range(5):
        with tq.connect() as other:
            other.restore(f"s{number}")
            check(other)
        shutil.rmtree(root / f"s{number}")


def check(queue: tq.Queue) -> None:
    """The audit balances; of every put all rows or none were in the cut; what was acked has its results."""
    audit = queue.audit()
    assert audit.balanced
    table = queue.table("rollouts")
    assert audit.tables["rollouts"].rows_put % 4 == 0
    rows = table.read()
    assert len(rows), "the cut holds no row, so it shows nothing"
    for row, text in zip(rows.rows.tolist(), rows["text"].list(), strict=True):
        assert int(text) == row // 4
    np.testing.assert_array_equal(rows["payload"].padded()[:, 0], rows.rows // 4)
    for row in rows.rows.tolist()[:: max(1, len(rows) // 50)]:
        life = queue.inspect("rollouts", row)
        rewarded = life.tasks["reward"].state == "done"
        assert life.fields["score"].set == life.fields["trace"].set == rewarded
        assert not rewarded or life.fields["score"].value == row * 10.0
        assert life.tasks["train"].state in (("ready", "done") if rewarded else ("pending",))
