"""What a caller can give at its extremes: a value that cannot be is `UsageError` with its remedy, and no other
error."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors.text import shown

HUGE = 10**400
EXTREMES: list[Any] = [
    *(
        0,
        1,
        -1,
        2**31,
        2**53,
        2**60,
        2**62 - 1,
        2**62,
        2**63 - 1,
        2**63,
        2**64,
        HUGE,
        -(2**63),
        -(2**64),
        -HUGE,
        HUGE**13,
    ),
    *(0.0, -0.5, 1e9, 1e300, float("inf"), float("-inf"), float("nan"), True, None),
    *(
        "",
        "a b",
        "\0",
        "\ud800",
        "x" * 600,
        "9" * 400 + "TiB",
        "-1",
        b"",
        b"\xff",
        [],
        [None],
        (),
        {},
        {1: 2},
        {"a": HUGE},
        set(),
    ),
    *(object(), len, lambda row: True, type, np.float64("nan"), np.int64(1), np.zeros(2)),
]

VALUES = sorted(
    (found for name in tq.__all__ if inspect.isclass(found := getattr(tq, name)) and issubclass(found, msgspec.Struct)),
    key=lambda kind: kind.__name__,
)
PLAIN: dict[str, Any] = {
    "name": "a",
    "directory": "a",
    "task": "a",
    "batch_rows": 1,
    "dtype": "int64",
    "field": "x",
    "op": "<",
    "value": 1,
    "index": 0,
    "of": 2,
}
"""A value for each parameter that has no default."""


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with tq.connect("embedded") as opened:
        yield opened


def use(queue: tq.Queue, value: Any) -> None:
    """Have the server hear of the value, in the place where it belongs."""
    terms: dict[str, Any] = {"tasks": [tq.Task("a", needs=["x"], gives=["y"])]}
    match value:
        case tq.Limits():
            terms["limits"] = value
        case tq.Pacing():
            terms["pacing"] = value
        case tq.Field():
            terms["fields"] = [value]
        case tq.Task():
            terms["tasks"] = [value]
        case tq.Acked() | tq.Manual():
            terms["retention"] = value
        case tq.Complete():
            terms["tasks"] = [tq.Task("a", groups=value)]
        case tq.Refill() | tq.DeliverPartial() | tq.DropGroup():
            terms["tasks"] = [tq.Task("a", groups=tq.Complete(incomplete=value))]
        case tq.Retry():
            terms["tasks"] = [tq.Task("a", retry=value)]
        case tq.DropStale() | tq.KeepStale() | tq.Requeue() | tq.HoldClock():
            terms["pacing"] = tq.Pacing("a", 1, on_stale=value)
        case tq.Retry():
            terms["tasks"] = [tq.Task("a", needs=["x"], retry=value)]
        case tq.TagIs() | tq.VersionBetween() | tq.Compare():
            queue.table("there").read(where=value)
            return
        case tq.Share():
            queue.table("there").read(fields={"values": tq.Slice(value)}).release()
            return
        case tq.Recorded():
            terms["retention"] = value
        case _:
            terms["tasks"] = [tq.Task("a", selector=value)]
    queue.create_table("made", **terms)
    queue.drop_table("made")


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_every_value_of_a_policy_is_good_or_a_usage_error(
    queue: tq.Queue, kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "there" not in queue.tables():
        queue.create_table("there", fields=[tq.Field("x", "int64"), tq.Field("values", "int64", (None,))]).put(
            x=[1], values=[np.arange(5)]
        )
    parameters = inspect.signature(kind).parameters
    given = {name: PLAIN[name] for name, one in parameters.items() if one.default is one.empty}
    monkeypatch.chdir(tmp_path)  # where relative directories of records are
    use(queue, kind(**given)) if kind not in (tq.Plugin, tq.Requeue, tq.Pacing) else None
    for name in parameters:
        for extreme in EXTREMES:
            try:
                use(queue, kind(**{**given, name: extreme}))
            except (tq.UsageError, tq.Full):
                continue
            except Exception as error:
                raise AssertionError(f"{kind.__name__}({name}={shown(extreme)}): {error!r:.300}") from error
    assert queue.tables() == ["there"]


@pytest.fixture
def things(queue: tq.Queue, name: str) -> Iterator[dict[str, Any]]:
    table = queue.create_table(name, tasks=[tq.Task("work", needs=["x"])])
    table.put(x=[1, 2], y=[[1], [2, 3]])
    channel = queue.weights(name)
    channel.publish(1, {"a": np.ones(2)})
    with (
        table.lease("work", rows=1, fields=["x", "y"]) as batch,
        table.loader("work", rows=1) as loader,
        table.reserve(1) as room,
    ):
        yield {
            "queue": queue,
            "table": table,
            "batch": batch,
            "inline column": batch["x"],
            "column": batch["y"],
            "rows": table.read(),
            "channel": channel,
            "weights": channel.pull(),
            "loader": loader,
            "reservation": room,
        }
        batch.release()


CALLS: dict[str, tuple[Callable[[tq.Queue, tq.Table, tq.Batch], object], str]] = {
    "step": (
        lambda q, t, b: b.ack(step=2**60),
        r"step=1152921504606846976 is out of range; give -1 to 9007199254740992",
    ),
    "checkpointed": (lambda q, t, b: t.checkpointed(2**60), "step=1152921504606846976 is out of range"),
    "rollback": (lambda q, t, b: t.rollback(2**60), "step=1152921504606846976 is out of range"),
    "long step": (lambda q, t, b: b.ack(step=HUGE * HUGE**20), r"step=an integer of [\d,]+ bits is out of range"),
    "code": (
        lambda q, t, b: t.lease("work", rows=1, where=lambda row: True),
        "where=<function .*give TagIs.*no code of clients",
    ),
    "no list": (lambda q, t, b: t.read(where=5), "where=5 is int; give TagIs"),
    "text": (lambda q, t, b: t.read(where="x > 1"), "where='x > 1' is str; give TagIs"),
    "none": (lambda q, t, b: t.read(where=None), "where=None is NoneType; give TagIs"),
    "bytes": (lambda q, t, b: tq.Limits(bytes="9" * 999 + "TiB"), "is over 4611686018427387903 bytes"),
    "arena": (lambda q, t, b: tq.connect(arena_bytes="9" * 999), "is over 4611686018427387903 bytes"),
    "long arena": (
        lambda q, t, b: tq.connect(arena_bytes=HUGE),
        r"size an integer of [\d,]+ bits is not positive, or over",
    ),
    "time": (
        lambda q, t, b: t.lease("work", rows=1, timeout_s=HUGE),
        r"timeout_s=an integer of [\d,]+ bits is out of range",
    ),
    "put time": (lambda q, t, b: t.put(x=[1], timeout_s=HUGE), "out of range"),
    "no time": (lambda q, t, b: t.put(x=[1], timeout_s=float("nan")), "timeout_s=nan is out of range"),
    "connect time": (lambda q, t, b: tq.connect(timeout_s=HUGE), "out of range"),
    "keys": (lambda q, t, b: t.find(5), "keys=5 is int; give a key"),
    "fields": (lambda q, t, b: t.read(fields=5), "fields are int, 5; give a list of names"),
    "rows": (lambda q, t, b: t.read([[1], [2, 3]]), "rows cannot be read as an array.*give row ids"),
    "rows column": (lambda q, t, b: t.put(x=[1], rows=[1]), "put takes no rows"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_at_its_extremes_is_a_usage_error(queue: tq.Queue, things: dict[str, Any], case: str) -> None:
    call, text = CALLS[case]
    before = queue.stats().tables["there"].rows_put if "there" in queue.tables() else 0
    with pytest.raises(tq.UsageError, match=text) as raised:
        call(queue, things["table"], things["batch"])
    assert len(str(raised.value)) < 600
    assert before == (queue.stats().tables["there"].rows_put if "there" in queue.tables() else 0)


@pytest.mark.parametrize("values", [None, 5, object(), [], {}, "x", np.zeros(()), [1], tq.Field("x", "int64")])
def test_a_repeat_of_anything_is_good_or_a_usage_error(queue: tq.Queue, name: str, values: Any) -> None:
    table = queue.create_table(name)
    for counts in [*EXTREMES, [[1], [1, 2]], [2**62, 2**62]]:
        try:
            table.put(x=tq.Repeat(values, counts))
        except tq.UsageError:
            continue


def test_a_field_may_be_called_as_the_first_argument_of_a_method(queue: tq.Queue, name: str) -> None:
    table = queue.create_table(name, tasks=[tq.Task("work", needs=["self"], gives=["table"])])
    table.put(self=[1, 2])
    table.update([0], cls=["a"])
    with table.lease("work", rows=2) as batch:
        assert batch["self"].list() == [1, 2]
        batch.ack(table=["a", "b"])
    assert table.audit().rows_done == 2


THINGS = ["queue", "table", "batch", "inline column", "column", "rows", "channel", "weights", "loader", "reservation"]


@pytest.mark.parametrize("how", [ForkingPickler.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("thing", THINGS)
def test_what_belongs_to_a_process_says_what_to_pass_instead(
    things: dict[str, Any], how: Callable[[Any], Any], thing: str
) -> None:
    with pytest.raises(
        tq.UsageError, match=r"belongs to the process that has it, and cannot be pickled or copied; (pass|lease)"
    ):
        how(things[thing])


def test_policies_are_plain_values_that_go_anywhere() -> None:
    task = tq.Task("a", needs=["x"], groups=tq.Complete(deadline_s=1))
    assert ForkingPickler.loads(ForkingPickler.dumps(task)) == task == copy.deepcopy(task)
