"""Requests as large as a training step: one call each."""

from __future__ import annotations

import numpy as np
import pytest

import transferqueue as tq

ROWS = 1 << 14


def test_a_step_of_grpo_is_one_call() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["reward"], groups=tq.Complete())])
        groups, rewards = np.repeat(np.arange(ROWS // 8), 8), np.arange(ROWS, dtype=np.float32)
        keys = [f"sample-{number}" for number in range(ROWS)]
        rows = table.put(reward=rewards, group_id=groups, group_size=8, key=keys, tags={"task": "math"})
        with table.lease("train", groups=ROWS // 8, timeout_s=20) as batch:
            assert (batch["reward"].numpy() == rewards).all()
            assert (batch.group_id == groups).all()
            assert batch.keys == keys
        assert len(rows) == ROWS


def test_any_number_of_keys_is_found() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"])])
        table.put(x=[1, 2], key=["first", "last"])
        keys = ["first", *(f"none-{number}" for number in range(2 * ROWS)), "last"]
        found = table.find(keys)
        assert (found.size, found[0], found[-1]) == (len(keys), 0, 1)
        assert (found[1:-1] == -1).all()
        assert table.find([]).size == 0


def test_a_put_that_takes_the_server_too_long_says_how_many_rows_do_not() -> None:
    with tq.connect() as queue:
        table = queue.create_table("t", tasks=[tq.Task("train", needs=["x"], groups=tq.Complete())])
        with pytest.raises(
            tq.UsageError, match=r"a put of 16,384 rows .* takes the server about .* send at most [\d,]+ rows"
        ):
            table.put(x=np.zeros(ROWS, np.float32), group_id=np.arange(ROWS), group_size=1)
        assert table.audit().rows_put == 0
