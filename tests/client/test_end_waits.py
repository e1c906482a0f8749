"""Waits that a supervisor ends: in whatever thread, with its reason, and without losing or refusing anything else."""

import threading

import pytest

import transferqueue as tq
from tests.client.deployments import until_someone_waits

GENEROUS_S = 60.0


class Gone(tq.PeerError):
    """A reason with more to say than its text."""

    def __init__(self, text: str, *, who: str = "") -> None:
        super().__init__(text)
        self.who = who


WHY = Gone("nobody is left", who="double-0")


@pytest.mark.parametrize("why", ["gone", None, ValueError("gone")])
def test_a_reason_that_is_no_error_of_the_queue_is_refused(why):
    with tq.connect("embedded") as queue:
        with pytest.raises(
            tq.UsageError, match=f"is {type(why).__name__}; give an error that calls of the queue may raise"
        ):
            queue.end_waits(why)
        table = queue.create_table("t", tasks=[tq.Task("a", needs=["x"])])
        with pytest.raises(tq.DeadlineExceeded):
            table.lease("a", rows=1, timeout_s=0.01)  # waits as before


def test_waits_end_with_the_reason_and_what_can_be_done_at_once_is():
    with tq.connect() as queue:
        table = queue.create_table(
            "t", tasks=[tq.Task("a", needs=["x"]), tq.Task("b", needs=["y"])], limits=tq.Limits(rows=4)
        )
        found = []

        def lease():
            with pytest.raises(Gone) as raised:
                table.lease("b", rows=1, timeout_s=GENEROUS_S)
            found.append(raised.value)

        threads = [threading.Thread(target=lease) for _ in range(2)]
        for thread in threads:
            thread.start()
        until_someone_waits(queue, "t", 2)
        queue.end_waits(WHY)
        for thread in threads:
            thread.join()
        assert [(str(one), one.who) for one in found] == [("nobody is left", "double-0")] * 2
        assert found[0] is not found[1]
        table.put(x=[1.0, 2.0, 3.0, 4.0], timeout_s=GENEROUS_S)
        with table.lease("a", rows=1, timeout_s=GENEROUS_S) as batch:
            assert batch["x"].list() == [1.0]
        for wait in (
            lambda: table.put(x=[5.0], timeout_s=GENEROUS_S),
            lambda: table.lease("b", rows=1, timeout_s=GENEROUS_S),
            lambda: queue.table("u", timeout_s=GENEROUS_S),
            lambda: queue.weights("w").pull(timeout_s=GENEROUS_S),
        ):
            with pytest.raises(Gone):
                wait()
        with pytest.raises(tq.DeadlineExceeded):  # the caller did not want to wait: that is no news
            table.lease("b", rows=1, timeout_s=0)
        queue.allow_waits()
        with pytest.raises(tq.DeadlineExceeded):
            table.lease("b", rows=1, timeout_s=0.01)
        assert queue.audit().balanced
