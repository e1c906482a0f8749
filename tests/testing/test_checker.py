"""The checker: histories that the promises allow pass, and each kind of violation is found."""

from typing import Any

import pytest

from transferqueue.errors import UsageError
from transferqueue.policies import Complete, DeliverPartial, Pacing, Requeue, Retry, Task
from transferqueue.testing.checker.checker import check
from transferqueue.testing.history import history as h

SCORE = Task("score", needs=["a"], gives=["b"], retry=Retry(attempts=2))
TRAIN = Task("train", needs=["a", "b"])


class Story:
    """Builds a history, one operation after the other; `op` ends at once unless `open`."""

    def __init__(self, *tasks: Task, rows_max: int = 8, **terms: Any) -> None:
        self.at = 0.0
        self.number = 0
        self.lines: list[h.Line] = [h.Declared("t", list(tasks or (SCORE,)), rows_max, **terms)]

    def begin(self, call: h.Call, process: str = "p") -> int:
        self.number += 1
        self.at += 1
        self.lines.append(h.Invoked(self.number, process, self.at, call))
        return self.number

    def end(self, op: int, outcome: Any = "ok", result: h.Result | None = None, error: str = "") -> None:
        self.at += 1
        self.lines.append(h.Ended(op, self.at, outcome, result, error))

    def op(self, call: h.Call, result: h.Result | None = None, outcome: Any = "ok", process: str = "p") -> None:
        self.end(self.begin(call, process), outcome, result)

    def put(self, first: int, *values: str, outcome: Any = "ok", **facts: Any) -> None:
        rows = h.RowsResult(list(range(first, first + len(values)))) if outcome == "ok" else None
        self.op(h.PutCall("t", len(values), {"a": list(values)}, **facts), rows, outcome)

    def lease(self, lease: int, rows: dict[int, str], task: str = "score", clock: int = -1, **facts: Any) -> None:
        got = h.LeasedResult(lease, list(rows), {"a": list(rows.values())}, clock=clock, **facts)
        self.op(h.LeaseCall("t", task), got)

    def ack(self, lease: int, *rows: int, task: str = "score", outcome: Any = "ok", **results: Any) -> None:
        self.op(h.AckCall("t", task, lease, list(rows), **results), None, outcome)

    def count(self, put: int, done: int = 0, live: int = 0, drained: bool = True, **rest: Any) -> None:
        self.at += 1
        self.lines.append(h.Counted("t", self.at, put, live, done, drained=drained, **rest))

    def kinds(self, **how: Any) -> list[str]:
        return sorted({one.kind for one in check([*self.lines, h.Finished(self.at + 1)], **how)})


def test_a_plain_run_is_allowed():
    story = Story()
    story.put(0, "x", "y")
    story.lease(1, {0: "x", 1: "y"})
    story.ack(1, 0, 1, digests={"b": ["s", "t"]})
    story.op(h.SealCall("t"))
    story.op(h.LeaseCall("t", "score"), None, "fail")
    story.count(2, done=2)
    assert story.kinds() == []


def test_rows_of_an_unanswered_put_are_known_by_their_values():
    story = Story()
    story.put(0, "x", "y", outcome="unknown")
    story.lease(1, {0: "x", 1: "y"})
    story.ack(1, 0, 1)
    story.count(2, done=2)
    assert story.kinds() == []


def test_a_lease_told_before_its_put_is_allowed():
    story = Story()
    put = story.begin(h.PutCall("t", 1, {"a": ["x"]}))
    story.lease(1, {4: "x"})
    story.end(put, "ok", h.RowsResult([4]))
    assert story.kinds() == []


def test_a_row_that_expired_may_be_lent_again():
    story = Story()
    story.put(0, "x")
    story.lease(1, {0: "x"})
    story.lease(2, {0: "x"})
    story.ack(2, 0)
    story.ack(1, 0, outcome="fail")
    story.count(1, done=1)
    assert story.kinds() == []


# ---------------------------------------------------------------- one kind each


def test_lost_at_the_end():
    story = Story()
    story.put(0, "x", "y")
    story.lease(1, {0: "x"})
    story.ack(1, 0)
    story.count(2, done=1, live=1)
    assert story.kinds() == ["lost"]


def test_a_row_that_is_done_and_that_no_worker_acked():
    """As many rows are done as were acked; but one of these was dropped, so another one was done by nobody."""
    story = Story()
    story.put(0, "x", "y")
    story.put(7, "w", outcome="unknown")
    story.lease(1, {0: "x", 7: "w"})
    story.ack(1, 0, 7)
    story.op(h.DropCall("t", [7], "bad"), None, "unknown")
    story.count(3, done=2, dropped={"bad": 1})
    (found,) = check([*story.lines, h.Finished(story.at + 1)])
    assert str(found).startswith("lost: 1 rows have ended, and no worker of some task acked them: 1;")


def test_counts_that_do_not_add_up():
    story = Story()
    story.put(0, "x", "y")
    story.count(2, done=1, drained=False)
    assert story.kinds() == ["lost"]


def test_fewer_rows_than_clients_were_told():
    story = Story()
    story.put(0, "x", "y")
    story.count(1, live=1, drained=False)
    assert story.kinds() == ["lost"]


def test_done_without_an_ack():
    story = Story()
    story.put(0, "x")
    story.lease(1, {0: "x"})
    story.count(1, done=1)
    assert story.kinds() == ["lost"]


def test_dropped_without_a_reason():
    story = Story()
    story.put(0, "x")
    story.count(1, dropped={"bored": 1})
    assert story.kinds() == ["lost"]


def test_invented_row():
    story = Story()
    story.lease(1, {7: "x"})
    assert story.kinds() == ["invented row"]


def test_what_was_there_before_a_partial_history_is_not_invented():
    story = Story()
    story.lines = [h.Declared("t", [SCORE], 8, whole=False)]
    story.lease(1, {7: "x"})
    assert story.kinds() == []


def test_one_id_for_two_rows():
    story = Story()
    story.put(0, "x", "y")
    story.put(1, "z")
    assert "row ids" in story.kinds()


def test_a_put_with_two_sets_of_rows():
    story = Story()
    put = story.begin(h.PutCall("t", 1, {"a": ["x"]}))
    story.lease(1, {0: "x"})
    story.end(put, "ok", h.RowsResult([1]))
    assert story.kinds() == ["duplicated effect"]


def test_acked_and_lent_again():
    story = Story()
    story.put(0, "x")
    story.lease(1, {0: "x"})
    story.ack(1, 0)
    story.lease(2, {0: "x"})
    assert story.kinds() == ["duplicated effect"]


def test_acked_and_lent_again_is_allowed_where_rows_are_requeued():
    pacing = Pacing("score", 4, max_staleness=1, on_stale=Requeue("score"))
    story = Story(pacing=pacing)
    story.put(0, "x")
    story.lease(1, {0: "x"})
    story.ack(1, 0)
    story.lease(2, {0: "x"})
    assert story.kinds() == []


def test_dropped_and_lent_again():
    story = Story()
    story.put(0, "x")
    story.op(h.DropCall("t", [0], "bored"))
    story.lease(1, {0: "x"})
    assert story.kinds() == ["duplicated effect"]


def test_fencing():
    story = Story()
    story.put(0, "x")
    story.lease(1, {0: "x"})
    story.lease(2, {0: "x"})
    story.ack(1, 0)
    assert story.kinds() == ["fencing"]


def failing(*failed: bool) -> Story:
    """A row is dropped for failing after leases that were released so."""
    story = Story()
    story.put(0, "x")
    for lease, one in enumerate(failed, 1):
        story.lease(lease, {0: "x"})
        story.op(h.ReleaseCall("t", "score", lease, [0], failed=one))
    story.count(1, dropped={"attempts": 1})
    return story


def test_a_row_is_dropped_after_its_attempts():
    assert failing(True, True).kinds() == []


@pytest.mark.parametrize("failed", [(True,), (True, False), ()])
def test_a_row_is_dropped_for_failing_too_early(failed: tuple[bool, ...]):
    assert failing(*failed).kinds() == ["attempts"]


def test_readiness():
    story = Story(TRAIN)
    story.put(0, "x")
    story.lease(1, {0: "x"}, "train")
    assert story.kinds() == ["readiness"]


def test_a_refused_put_is_seen():
    story = Story()
    put = story.begin(h.PutCall("t", 1, {"a": ["x"]}))
    story.lease(1, {0: "x"})
    story.end(put, "fail", error="Full")
    assert story.kinds() == ["atomic put"]


def test_a_refused_result_is_seen():
    story = Story(SCORE, TRAIN)
    story.put(0, "x")
    story.lease(1, {0: "x"})
    ack = story.begin(h.AckCall("t", "score", 1, [0], {"b": ["s"]}))
    story.op(h.LeaseCall("t", "train"), h.LeasedResult(2, [0], {"a": ["x"], "b": ["s"]}))
    story.end(ack, "fail", error="LeaseExpired")
    assert story.kinds() == ["atomic put"]


def test_torn_read():
    story = Story()
    story.put(0, "x")
    story.lease(1, {0: "z"})
    assert story.kinds() == ["torn read"]


def test_memory_that_changes_under_a_view():
    story = Story()
    story.op(h.LookCall("t", 1), h.LookedResult(same=False))
    assert story.kinds() == ["torn read"]


@pytest.mark.parametrize(("rule", "members", "allowed"), [(Complete(), 1, False), (Complete(), 2, True)])
def test_split_group(rule: Complete, members: int, allowed: bool):
    story = Story(Task("score", needs=["a"], groups=rule))
    story.put(0, "x", "y", group_id=[5, 5], group_size=[2, 2])
    rows = dict(list({0: "x", 1: "y"}.items())[:members])
    story.lease(1, rows, group_id=[5] * members, group_size=[2] * members)
    assert (story.kinds() == []) is allowed


def test_a_group_may_be_as_small_as_its_rule_says():
    story = Story(Task("score", needs=["a"], groups=Complete(min_size=2, incomplete=DeliverPartial())))
    story.put(0, "x", "y", group_id=[5, 5], group_size=[3, 3])
    story.lease(1, {0: "x", 1: "y"}, group_id=[5, 5], group_size=[3, 3])
    assert story.kinds() == []
    story.put(2, "z", group_id=[6], group_size=[3])
    story.lease(2, {2: "z"}, group_id=[6], group_size=[3])
    assert story.kinds() == ["split group"]


def test_staleness_at_the_clock_of_the_reply():
    story = Story(pacing=Pacing("score", 4, max_staleness=1))
    story.put(0, "x", versions=[0])
    story.lease(1, {0: "x"}, versions=[0], clock=2)
    assert story.kinds() == ["staleness bound"]


def test_staleness_at_the_clock_that_was_certainly_reached():
    story = Story(pacing=Pacing("score", 4, max_staleness=1))
    story.put(0, "x", versions=[0])
    story.op(h.AdvanceCall("t", 2))
    story.lease(1, {0: "x"}, versions=[0], clock=1)
    assert story.kinds() == ["staleness bound"]


def test_rows_beyond_the_limit():
    story = Story(Task("score", needs=["a"]), rows_max=2)
    story.put(0, "x", "y")
    story.put(2, "z")
    assert story.kinds() == ["memory bound"]


def test_rows_counted_beyond_the_limit():
    story = Story(rows_max=2)
    story.put(0, "x", "y", "z")
    story.count(3, live=3, drained=False, rows_resident=3)
    assert story.kinds() == ["memory bound"]


def test_reservations_beyond_the_pace():
    story = Story(pacing=Pacing("score", 2, depth=0))
    for number in (1, 2):
        story.op(h.ReserveCall("t", 2), h.ReservedResult(number, 2), process=f"p{number}")
    assert story.kinds() == ["pacing bound"]


def test_reservations_of_the_dead_are_free():
    story = Story(pacing=Pacing("score", 2, depth=0))
    story.op(h.ReserveCall("t", 2), h.ReservedResult(1, 2), process="p1")
    story.lines.append(h.Died("p1", story.at))
    story.op(h.ReserveCall("t", 2), h.ReservedResult(2, 2), process="p2")
    assert story.kinds() == []


def test_a_put_after_the_seal():
    story = Story()
    story.op(h.SealCall("t"))
    story.put(0, "x")
    assert story.kinds() == ["seal"]


def test_weights():
    story = Story()
    story.op(h.PublishCall("w", 1, "one"))
    story.op(h.PublishCall("w", 2, "two"))
    story.op(h.PullCall("w"), h.PulledResult(2, "two"))
    assert story.kinds() == []
    story.op(h.PullCall("w"), h.PulledResult(1, "one"))
    assert story.kinds() == ["lost"]
    story.op(h.PullCall("w"), h.PulledResult(2, "one"))
    assert story.kinds() == ["lost", "torn read"]
    story.op(h.PullCall("w", above=2), h.PulledResult(2, "two"))
    assert story.kinds() == ["lost", "torn read", "weights"]


def test_stuck():
    story = Story()
    story.begin(h.LeaseCall("t", "score", wait_s=1))
    assert story.kinds() == ["stuck"]


def test_late():
    story = Story()
    lease = story.begin(h.LeaseCall("t", "score", wait_s=1))
    story.at += 50
    story.end(lease, "fail", error="DeadlineExceeded")
    assert story.kinds() == []
    assert story.kinds(late_s=10) == ["stuck"]


def test_what_a_dead_process_waited_for_is_not_stuck():
    story = Story()
    story.begin(h.LeaseCall("t", "score"), "p1")
    story.lines.append(h.Died("p1", story.at))
    assert story.kinds() == []


def test_an_end_without_a_beginning():
    assert [one.kind for one in check([h.Ended(3, 0.0, "ok")])] == ["history"]


# ---------------------------------------------------------------- files


def test_lines_go_to_a_file_and_back(tmp_path):
    story = Story(pacing=Pacing("score", 4, max_staleness=1, on_stale=Requeue("score")))
    story.put(0, "x", versions=[0])
    path = tmp_path / "h.jsonl"
    path.write_bytes(b"".join(map(h.write_line, story.lines)))
    assert list(h.read(path)) == story.lines


def test_a_line_that_is_none_is_named(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_bytes(h.write_line(h.Finished(0.0)) + b'{"type":"Nonsense"}\n')
    with pytest.raises(UsageError, match=r"line 2 of .*h\.jsonl is no event"):
        list(h.read(path))


def test_histories_are_merged_in_order_of_time():
    put, lease = Story(), Story()
    put.put(0, "x")
    lease.at = 10
    lease.lease(1, {0: "x"})
    whole = list(h.merge([lease.lines, put.lines]))
    assert [line.op for line in whole if isinstance(line, h.Invoked)] == [1, 2]
    assert check(whole) == []
