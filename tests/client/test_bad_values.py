"""Values that are no columns, through each call that takes columns: a typed, short error, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.storage.test_bad_columns import UNDECLARED, Failing
from transferqueue.errors.text import TEXT_SHOWN_CHARS

SHORT = 700
"""Characters of the longest refusal of a value: with the list of dtypes that may be stored."""
BAD = {name: value for name, (value, text) in UNDECLARED.items() if "single value" not in text}
BAD |= {
    "failing": Failing(),
    "a lazy parameter": torch.nn.parameter.UninitializedParameter(),
    "huge rows": np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,)),
    "huge shape": np.lib.stride_tricks.as_strided(np.zeros(1), (2, 1 << 40), (0, 0)),
    "many dimensions": np.zeros((2, *(1,) * 20)),
}
LONG = "x" * 100_000
FACTS: dict[str, Any] = {
    "policy_version": 10**400,
    "priority": [10**400, 1],
    "group_id": [1, 10**400],
    "tokens": "x" * 100_000,
    "ordinal": [[1], [2, 3]],
    "key": 10**5000,
    "tags": {"a": "x" * 100_000},
}


@pytest.fixture(scope="module")
def table() -> Iterator[tq.Table]:
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        table = queue.create_table("t", tasks=[tq.Task("work", needs=["base"])], extra_fields=True)
        table.put(base=[1, 2], key=["a", "b"])
        yield table


def state(table: tq.Table) -> Any:
    with table.read() as rows:
        return table.audit(), table.stats().bytes, rows.fields, rows.keys, rows.tags, rows.policy_version.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "case"),
    [
        *((call, case) for call in ("put", "update", "ack", "release") for case in BAD),
        *((call, case) for call in ("put", "update", "ack") for case in FACTS),
    ],
)
def test_a_value_that_is_no_column_is_refused_in_each_call(table: tq.Table, call: str, case: str) -> None:
    given = {case: FACTS[case]} if case in FACTS else {"x": BAD[case]}
    before = state(table)
    with table.lease("work", rows=2, timeout_s=5) as batch:
        calls = {
            "put": lambda: table.put(base=[3, 4], timeout_s=0, **given),
            "update": lambda: table.update([0, 1], **given),
            "ack": lambda: batch.ack(**given),
            "release": lambda: batch.release(**given),
        }
        with pytest.raises((tq.UsageError, tq.OutOfMemory)) as refused:
            calls[call]()
        assert 10 < len(str(refused.value)) < SHORT
        batch.release()
    assert state(table) == before


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_cannot_be_read_is_refused_by_its_name(table: tq.Table) -> None:
    bad = {
        name: value for name, value in BAD.items() if name not in ("an empty tensor", "an empty array", "too many rows")
    }
    with tq.connect("embedded", arena_bytes="64MiB") as queue:
        channel = queue.weights("policy")
        for name, value in bad.items():
            with pytest.raises(tq.UsageError) as refused:
                channel.publish(1, {"w": value})
            assert 10 < len(str(refused.value)) < SHORT, name
            assert "_w" not in str(refused.value), name
        channel.publish(1, {"w": torch.tensor([1 + 2j]).conj()})
        assert channel.pull(timeout_s=5)["w"].tolist() == [1 - 2j]


def test_lazy_views_are_resolved(table: tq.Table) -> None:
    """Conjugate and negative views, transposed, expanded and flipped ones, and buffers that do not lie in order."""
    whole = torch.tensor([[1 + 2j, 3j], [4 + 0j, 5 - 1j]])
    grid = np.arange(6).reshape(2, 3)
    given: dict[str, Any] = {
        "conj": whole.conj(), "neg": whole.conj().imag, "adjoint": list(whole.mH), "rows": list(whole.conj().imag),
        "expanded": torch.ones(1, 3).expand(2, 3), "fortran": np.asfortranarray(grid), "swapped": grid.astype(">i8"),
        "columns": [memoryview(np.asfortranarray(grid)), memoryview(np.arange(4)[::2])],
    }  # fmt: skip
    wanted = {
        "conj": whole.conj().tolist(), "neg": (-whole.imag).tolist(), "adjoint": whole.mH.tolist(),
        "rows": (-whole.imag).tolist(), "expanded": [[1.0] * 3] * 2, "fortran": grid.tolist(), "swapped": grid.tolist(),
        "columns": [grid.tobytes(), np.array([0, 2]).tobytes()],
    }  # fmt: skip
    rows = table.put(**given)
    with table.read(rows, fields=list(given)) as read:
        assert {name: column.list() for name, column in read.items()} == wanted
    table.delete(rows)


@pytest.mark.parametrize(
    ("use", "kind", "match"),
    [
        (lambda queue, table: table.read()[LONG], tq.NotFound, "is not in this batch of"),
        (lambda queue, table: table.read(where=tq.Compare(LONG, "<", 1)), tq.NotFound, "is not in table"),
        (lambda queue, table: table.read(where=tq.Compare("base", "<", 10**400)), tq.UsageError, "at most 64 bits"),
        (lambda queue, table: table.put(base=[1], tags={"a": 10**400}), tq.UsageError, "at most 64 bits"),
        (lambda queue, table: table.put(base=[type(LONG[:9_000], (), {})()]), tq.SchemaError, "rows of type"),
        (lambda queue, table: table.lease("work", rows=1, device=LONG), tq.UsageError, "is no device of torch"),
        (lambda queue, table: table.add_task(tq.Task("a", selector=tq.Plugin(LONG))), tq.NotFound, "not installed"),
        (lambda queue, table: tq.Slice((0, 10**400)), tq.UsageError, "beyond 2..48; give 0 <= start < stop"),
        (lambda queue, table: tq.Retry(first_s=10**5000), tq.UsageError, "first_s=an integer of 16,610 bits"),
        (lambda queue, table: tq.connect(10**400), tq.UsageError, "an address is text"),  # type: ignore[arg-type]
        (lambda queue, table: tq.connect("tcp://a:" + "9" * 900), tq.UsageError, "a port is a number"),
    ],
)
def test_an_argument_that_is_long_is_cut_in_its_refusal(
    table: tq.Table, use: Callable[[tq.Queue, tq.Table], Any], kind: type[Exception], match: str
) -> None:
    with tq.connect("embedded", arena_bytes="64MiB") as queue, pytest.raises(kind, match=match) as refused:
        use(queue, table)
    assert len(str(refused.value)) < SHORT


def test_each_error_is_short_whatever_it_names() -> None:
    for kind in (tq.UsageError, tq.DeadlineExceeded, tq.Disconnected, tq.InternalError):
        text = str(kind(f"subject {'x' * 100_000}; remedy"))
        assert len(text) == TEXT_SHOWN_CHARS
        assert text.startswith("subject x")
        assert text.endswith("x; remedy")
