"""What a recorder writes of a real queue passes the checker; what a faulty one would have written does not."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.cli.app import run
from transferqueue.errors import EndOfTable, LeaseExpired
from transferqueue.testing.checker.checker import Checker, check
from transferqueue.testing.history import history as h
from transferqueue.testing.history.recorder import HistoryRecorder, RecordedTable


def table_of(queue: tq.Queue, **terms: Any) -> tq.Table:
    score = tq.Task("score", needs=["ids", "text"], gives=["score"])
    train = tq.Task("train", needs=["ids", "score"], groups=tq.Complete())
    pacing = tq.Pacing("train", batch_rows=8, depth=1, max_staleness=2)
    return queue.create_table("t", tasks=[score, train], limits=tq.Limits(rows=32), pacing=pacing, **terms)


def put_group(table: RecordedTable, group: int) -> None:
    random = np.random.default_rng(group)
    ids = [random.integers(0, 99, random.integers(1, 9)) for _ in range(4)]
    with table.reserve(4) as held:
        table.put(
            ids=ids,
            text=[f"row {group}.{at}" for at in range(4)],
            mask=np.full((4, 3), group % 2 == 0),
            group_id=group,
            group_size=4,
            policy_version=0,
            reservation=held,
        )


def scorer(table: RecordedTable) -> None:
    while True:
        try:
            batch = table.lease("score", rows=3, at_least=1, timeout_s=30)
        except EndOfTable:
            return
        batch.ack(score=batch.batch["ids"].lengths.astype(np.float32) / 3)


def trainer(table: RecordedTable) -> None:
    while True:
        try:
            with table.lease("train", groups=1, timeout_s=30) as batch:
                batch.look()
        except EndOfTable:
            return


def test_a_run_on_several_threads_keeps_the_promises(tmp_path: Path):
    paths = [tmp_path / f"{at}.jsonl" for at in range(3)]
    with tq.connect() as queue:
        plain = table_of(queue)
        recorders = [HistoryRecorder(path, process=path.stem) for path in paths]
        tables = [recorder.table(plain) for recorder in recorders]
        threads = [
            threading.Thread(target=work, args=[table])
            for work, table in zip((scorer, trainer), tables[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        for group in range(8):
            put_group(tables[0], group)
        tables[0].seal()
        for thread in threads:
            thread.join(30)
        recorders[0].count(tables[0], drained=True)
        for recorder in recorders:
            recorder.close()
    checker = Checker()
    for line in h.merge([list(h.read(path)) for path in paths]):
        checker.see(line)
    assert checker.violations == []
    assert checker.operations > 50
    assert run(["check-history", *map(str, paths)]) == 0


def test_a_late_ack_is_refused_and_written_down(tmp_path: Path):
    path = tmp_path / "h.jsonl"
    with tq.connect() as queue, HistoryRecorder(path) as recorder:
        plain = queue.create_table("t", tasks=[tq.Task("score", needs=["a"])])
        table = recorder.table(plain)
        rows = table.put(a=[1, 2])
        first = table.lease("score", rows=2)
        first.release(failed=True)
        second = table.lease("score", rows=2)
        table.update(rows, b=[1.5, 2.5])
        table.drop(rows[:1], "bored")
        assert second.ack(rows[:1]) == 0
        plain.rollback(-1)
        with pytest.raises(LeaseExpired):
            second.ack(rows[1:])
        recorder.count(table)
    lines = list(h.read(path))
    assert check(lines) == []
    assert [line.error for line in lines if isinstance(line, h.Ended) and line.outcome == "fail"] == ["LeaseExpired"]


def test_values_are_digested_as_they_are_read(tmp_path: Path):
    path = tmp_path / "h.jsonl"
    torch = pytest.importorskip("torch")
    with tq.connect() as queue, HistoryRecorder(path) as recorder:
        fields = [tq.Field("f", "float32"), tq.Field("bf", "bfloat16", (2,))]
        table = recorder.table(
            queue.create_table("t", fields=fields, tasks=[tq.Task("all", needs=["f"])], extra_fields=True)
        )
        table.put(
            f=[0.1, 0.2],
            bf=torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.bfloat16),
            nested=torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged),
            raw=[b"x", b"yy"],
            plain=[{"a": 1, "b": [1, 2]}, {"b": [], "a": None}],
            shared=tq.Repeat(["one"], 2),
        )
        with table.lease("all", rows=2, fields=["f", "bf", "nested", "raw", "plain", "shared"]) as batch:
            assert len(batch) == 2
    assert check(h.read(path)) == []


def test_weights_and_the_clock(tmp_path: Path):
    path = tmp_path / "h.jsonl"
    with tq.connect() as queue, HistoryRecorder(path) as recorder:
        channel = recorder.channel(queue.weights("w"))
        channel.publish(1, {"a": np.arange(4.0), "b": np.float32(1).reshape(1)})
        with channel.pull() as found:
            assert found.version == 1
        with channel.pull(version=1):
            pass
        table = recorder.table(table_of(queue))
        table.advance(3)
        table.seal()
        with pytest.raises(EndOfTable):
            table.lease("score", rows=1)
        recorder.count(table, drained=True)
    assert check(h.read(path)) == []


def test_a_broken_history_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "h.jsonl"
    lost = h.Counted("t", 1.0, rows_put=2, rows_live=0, rows_done=1)
    path.write_bytes(h.write_line(lost))
    assert run(["check-history", str(path)]) == 1
    said = capsys.readouterr().out
    assert 'lost: table "t" does not balance: 2 put, 0 live, 1 ended' in said
    assert "2 violations" in said


def test_a_file_that_is_no_history_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "h.jsonl"
    path.write_text("hello\n")
    assert run(["check-history", str(path)]) == 2
    assert "line 1 of" in capsys.readouterr().err


def test_a_bad_put_is_refused_as_ever_and_not_written(tmp_path: Path):
    path = tmp_path / "h.jsonl"
    with tq.connect() as queue, HistoryRecorder(path) as recorder:
        table = recorder.table(queue.create_table("t", tasks=[tq.Task("all", needs=["a"])]))
        with pytest.raises(tq.SchemaError):
            table.put(a=[1, 2], b=[1])
    assert not [line for line in h.read(path) if isinstance(line, h.Invoked)]
