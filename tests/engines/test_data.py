"""Torch's loaders over a queue, and prompts out of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

torch = pytest.importorskip("torch")

import transferqueue as tq
from tests.scale import only_long
from transferqueue.adapters.stages.prompts import PromptSource
from transferqueue.adapters.trainers.torch_data import QueueDataset, QueueLoader, tensordict
from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.loop.runner import run_source

ROWS, STEP = 24, 4


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        yield found


def fill(queue: tq.Queue) -> tq.Table:
    table = queue.create_table("t", tasks=[tq.Task("train", needs=["x", "ids", "text"])])
    table.put(
        x=np.arange(ROWS, dtype=np.float32)[:, None],
        ids=[np.arange(n % 5 + 1, dtype=np.int32) for n in range(ROWS)],
        text=[f"row {n}" for n in range(ROWS)],
    )
    table.seal()
    return table


def dataset(queue: tq.Queue, **more: Any) -> QueueDataset[Any]:
    return QueueDataset(queue.address, "t", "train", rows=STEP, timeout_s=60, **more)


def xs(batch: Any) -> list[int]:
    return [int(x) for x in batch["x"][:, 0]]


@pytest.mark.parametrize("workers", [0, *only_long(2)])
def test_batches_come_once_and_a_state_says_where(workers: int, queue: tq.Queue) -> None:
    table = fill(queue)
    loader = QueueLoader(dataset(queue), num_workers=workers)
    seen: list[int] = []
    for batch in loader:
        assert batch["x"].shape == (STEP, 1)
        lengths = [len(ids) for ids in batch["ids"].unbind()]
        assert lengths == [x % 5 + 1 for x in xs(batch)]
        assert batch["text"] == [f"row {x}" for x in xs(batch)]
        seen += xs(batch)
    assert sorted(seen) == list(range(ROWS))
    assert loader.state_dict()["step"] >= ROWS // STEP - 1  # workers do not end together
    assert table.audit().rows_done == 0
    assert loader.checkpointed() == ROWS
    assert table.audit().rows_done == ROWS


@pytest.mark.parametrize("workers", [0, *only_long(2)])
def test_a_job_that_died_goes_on_where_its_model_was_saved(workers: int, queue: tq.Queue) -> None:
    table = fill(queue)
    loader = QueueLoader(dataset(queue), num_workers=workers)
    batches = iter(loader)
    learned = [x for _ in range(2) for x in xs(next(batches))]
    saved = loader.state_dict()
    assert loader.checkpointed() == 2 * STEP
    lost = xs(next(batches))
    batches.close()  # type: ignore[attr-defined]
    again = QueueLoader(dataset(queue), num_workers=workers)
    again.load_state_dict(saved)
    learned += [x for batch in again for x in xs(batch)]
    assert sorted(learned) == list(range(ROWS))
    assert set(lost) <= set(learned)
    again.checkpointed()
    assert table.audit().rows_done == ROWS


def test_a_loader_without_a_state_begins_at_the_last_checkpoint(queue: tq.Queue) -> None:
    fill(queue)
    loader = QueueLoader(dataset(queue))
    batches = iter(loader)
    first = xs(next(batches))
    loader.checkpointed()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    rest = [x for batch in QueueLoader(dataset(queue)) for x in xs(batch)]
    assert sorted(first + rest) == list(range(ROWS))


def test_a_loader_that_is_left_and_entered_again_loses_nothing(queue: tq.Queue) -> None:
    fill(queue)
    loader = QueueLoader(dataset(queue))
    batches = iter(loader)
    seen = xs(next(batches))
    with pytest.raises(UsageError, match="being iterated already"):
        next(iter(loader))
    with pytest.raises(UsageError, match="while it is being iterated"):
        loader.load_state_dict({"step": 0})
    batches.close()  # type: ignore[attr-defined]
    seen += [x for batch in loader for x in xs(batch)]
    assert sorted(seen) == list(range(ROWS))


def test_what_is_no_state_is_refused(queue: tq.Queue) -> None:
    fill(queue)
    loader = QueueLoader(dataset(queue))
    for state in ({}, {"step": "1"}):
        with pytest.raises(UsageError, match="is no state of a loader"):
            loader.load_state_dict(state)
    loader.load_state_dict({"step": None})
    loader.load_state_dict({"step": 7})


def test_errors_of_the_lease_are_the_loops(queue: tq.Queue) -> None:
    fill(queue)
    with pytest.raises(NotFound, match='"nobody"'):
        next(iter(QueueDataset(queue.address, "t", "nobody", rows=1)))
    queue.create_table("u", tasks=[tq.Task("train", needs=["x"])])
    with pytest.raises(tq.DeadlineExceeded):
        next(iter(QueueDataset(queue.address, "u", "train", rows=1, timeout_s=0)))


def test_tensordicts(queue: tq.Queue) -> None:
    pytest.importorskip("tensordict")
    fill(queue)
    batch = next(iter(QueueLoader(dataset(queue, form=tensordict))))
    assert batch.batch_size == torch.Size([STEP])
    assert batch["text"] == ["row 0", "row 1", "row 2", "row 3"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the stack under test
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_restores_the_dataset(workers: int, queue: tq.Queue) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="make test-engines installs it")
    table = fill(queue)

    def loader() -> Any:
        context = "spawn" if workers else None
        return stateful.StatefulDataLoader(
            dataset(queue), batch_size=None, num_workers=workers, multiprocessing_context=context
        )

    before = loader()
    batches = iter(before)
    steps = [next(batches) for _ in range(3)]
    state = before.state_dict()
    del batches, before
    assert [step.number for step in steps] == [0, 1, 2]
    table.rollback(2)
    after = loader()
    after.load_state_dict(state)
    steps += list(after)
    numbers = [step.number for step in steps]
    assert numbers == sorted(set(numbers))
    assert sorted(x for step in steps for x in xs(step.batch)) == list(range(ROWS))


# ---------------------------------------------------------------- prompts


PROMPTS = pa.table(
    {"question": [f"q{n}" for n in range(5)], "ids": [[n] * (n + 1) for n in range(5)], "n": list(range(5))}
)


def put(queue: tq.Queue, source: PromptSource, name: str = "p") -> tq.Rows:
    table = queue.create_table(name, tasks=[tq.Task("rollout")], retention=tq.Manual())
    run_source(table, source, emit=lambda _: None)
    return table.read()


def files(directory: Path) -> list[Any]:
    pyarrow.parquet.write_table(PROMPTS, directory / "p.parquet")
    for name, new in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        with new(directory / f"{name}.arrow", PROMPTS.schema) as writer:
            writer.write_table(PROMPTS)
    return [PROMPTS, directory / "p.parquet", str(directory / "file.arrow"), directory / "stream.arrow"]


def test_prompts_of_any_file_become_groups(queue: tq.Queue, tmp_path: Path) -> None:
    for at, source in enumerate(files(tmp_path)):
        rows = put(queue, PromptSource(source, group_size=3, groups_per_put=2), f"p{at}")
        assert rows["question"].list() == [f"q{n}" for n in range(5) for _ in range(3)]
        assert rows["ids"].list() == [[n] * (n + 1) for n in range(5) for _ in range(3)]
        assert rows.group_id.tolist() == rows.ordinal.tolist() == [n for n in range(5) for _ in range(3)]


def test_prompts_of_datasets(queue: tq.Queue) -> None:
    datasets = pytest.importorskip("datasets", reason="make test-engines installs it")
    found = datasets.Dataset.from_dict({"q": ["a", "b", "c", "d"]}).select([3, 1])
    assert put(queue, PromptSource(found))["q"].list() == ["d", "b"]


def test_an_order_for_each_epoch_that_can_be_entered_anywhere(queue: tq.Queue) -> None:
    whole = put(queue, PromptSource(PROMPTS, epochs=3, seed=4, columns={"n": "number"}), "whole")
    numbers = whole["number"].list()
    epochs = [numbers[at : at + 5] for at in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5))] * 3
    assert epochs[0] != epochs[1]
    rest = put(queue, PromptSource(PROMPTS, epochs=3, seed=4, columns=["n"], start=7), "rest")
    assert rest["n"].list() == numbers[7:]
    assert rest.ordinal.tolist() == list(range(7, 15))


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"no")
    (tmp_path / "x.arrow").write_bytes(b"nothing at all")
    for source, error, said in (
        (tmp_path / "absent.parquet", NotFound, "no file of prompts"),
        (tmp_path / "absent.arrow", NotFound, "no file of prompts"),
        (tmp_path / "x.parquet", UsageError, "neither a Parquet nor an Arrow file"),
        (tmp_path / "x.arrow", UsageError, "neither a Parquet nor an Arrow file"),
        (["a"], UsageError, "come from list"),
        (PROMPTS[:0], UsageError, "no rows"),
    ):
        with pytest.raises(error, match=said):
            PromptSource(source)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match='no column "answer"; it has ids, n, question'):
        PromptSource(PROMPTS, columns=["answer"])
    with pytest.raises(UsageError, match="group_size=0"):
        PromptSource(PROMPTS, group_size=0)
