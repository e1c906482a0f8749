"""What a coordinator holds back while several take their parts of one cut, when it lets go, and how a part is completed or given up."""

import threading

import pytest

from tests.server.nodes import Bench, lease
from tests.server.test_shards import local
from transferqueue.client.operations import cuts
from transferqueue.client.session.calls import Deadline, outcome
from transferqueue.client.session.run import Within
from transferqueue.errors import Disconnected, ProtocolError, TransferQueueError
from transferqueue.limits import CUT_HOLD_S
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.durability import snapshot_job, snapshots
from transferqueue.server.sessions import cut_hold
from transferqueue.transport.control.zeromq import KeyedPeer
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex

CUT, OTHER = "0" * 31 + "1", "0" * 31 + "2"
ENDED_S = 30.0


class Node(Bench):
    """A coordinator with a table, a client that leads cuts, and another client."""

    def __init__(self, root, index="1/1"):
        super().__init__()
        self.root, self.stirred = root, threading.Event()
        self.coordinator.operations.snapshots = snapshots.SnapshotJobs(
            root,
            self.coordinator.ledger,
            self.coordinator.operations.fetches,
            wake=self.coordinator.waiting.wake,
            stir=self.stirred.set,
            index=CoordinatorIndex.parse(index),
        )
        self.leader, self.other = local(self), self.client()

    def hold(self, hold_s=CUT_HOLD_S, cut=CUT):
        assert self.leader.ask(m.HoldRequests(cut, hold_s)) == m.DoneReply()

    def part(self, cut=CUT, path="s"):
        return self.leader.ask(m.SnapshotPart(path, cut))

    def ended(self, work, *wait_for):
        """What the leader is told of a part that is ready, has ended or failed. wait_for: which of these; else its end."""
        while True:
            reply = self.leader.ask(m.WatchPart(work))
            if isinstance(reply, m.Failed) or any(getattr(reply, what) for what in wait_for or ("ended",)):
                return reply
            assert self.stirred.wait(ENDED_S)
            self.stirred.clear()
            self.coordinator.tick(self.now)
            self.deliver()

    def rows(self):
        return self.coordinator.ledger.live_rows()["t"]

    def close(self):
        self.coordinator.operations.snapshots.stop()
        super().close()


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    made.other.create_table()
    yield made
    made.close()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("hold_s", [0.0, -1.0, CUT_HOLD_S + 1, float("nan")])
def test_a_hold_has_a_bounded_length(hold_s):
    with pytest.raises(ProtocolError):
        codec.decode_call(codec.encode_call(m.CallFrame(1, 2, 0, m.HoldRequests(CUT, hold_s))))


@pytest.mark.parametrize(
    "request_",
    [
        m.SnapshotPart("s", "x" * 32),
        m.SnapshotPart("s", CUT + "0"),
        m.EndPart(1, True, -1),
        m.RestorePart("s", "0"),
    ],
)
def test_a_cut_has_an_id_and_keeps_a_number_of_snapshots(request_):
    with pytest.raises(ProtocolError):
        codec.decode_call(codec.encode_call(m.CallFrame(1, 2, 0, request_)))


def test_a_part_without_a_hold_is_refused_and_writes_nothing(node):
    refused = node.part()
    assert (refused.error, refused.text[:74]) == (
        "DeadlineExceeded",
        "part of a cut refused: this coordinator did not wait for it any more, sinc",
    )
    node.hold()
    assert node.part(OTHER).error == "DeadlineExceeded", "it holds for another cut"
    node.leader.ask(m.EndHold(OTHER))
    assert node.coordinator.cut_hold.session
    node.leader.ask(m.EndHold(CUT))
    assert node.part().error == "DeadlineExceeded"
    node.hold(cut=OTHER)
    node.pass_time(CUT_HOLD_S)
    assert node.part(OTHER).error == "DeadlineExceeded"
    assert node.leader.ask(m.HoldRequests(OTHER, 1.0)).error == "DeadlineExceeded", "there was a break"
    assert list(node.root.iterdir()) == []


def test_one_client_holds_at_a_time_and_none_while_a_snapshot_is_written(node):
    third = local(node)
    node.hold()
    call = third.post(m.HoldRequests(OTHER, 1.0))
    assert third.take(call) is None, "it waits as everything of others does"
    node.hold()
    refused = node.leader.ask(m.HoldRequests("2" * 32, 1.0))
    assert refused.error == "Full"
    assert "somebody takes another snapshot of all coordinators at this moment" in refused.text
    node.leader.ask(m.EndHold(CUT))
    assert third.take(call) == m.DoneReply()
    third.ask(m.EndHold(OTHER))
    node.hold(cut="3" * 32)
    work = node.part("3" * 32).work
    refused = node.leader.ask(m.HoldRequests("4" * 32, 1.0))
    assert refused.error == "Full"
    assert "is being written or read" in refused.text
    node.leader.ask(m.EndPart(work, finish=False))


def test_a_server_without_snapshots_does_not_hold():
    bench = Bench()
    refused = local(bench).ask(m.HoldRequests(CUT, 1.0))
    assert refused.error == "UsageError"
    assert not bench.coordinator.cut_hold.session
    bench.close()


def test_parts_and_other_jobs_are_told_apart(node):
    work = node.leader.ask(m.SnapshotRequest("s")).work
    for request in (m.WatchPart(work), m.EndPart(work, finish=True)):
        refused = node.leader.ask(request)
        assert (refused.error, refused.text) == (
            "UsageError",
            f"work {work} is no part of a cut; ask for it with Follow",
        )
    assert "work 99 is not known" in node.leader.ask(m.EndPart(99, finish=True)).text
    node.coordinator.operations.snapshots.stop()
    node.hold(cut=OTHER)
    work = node.part(OTHER).work
    assert "is part of a cut; ask for it with WatchPart" in node.leader.ask(m.WatchJob(work)).text


def test_a_hold_that_is_asked_for_again_lasts_no_longer(node):
    node.hold()
    waiting = node.other.post(node.other.put(1))
    node.pass_time(CUT_HOLD_S - 1)
    node.hold()
    node.pass_time(1)
    assert node.other.take(waiting) == m.PutRows(0, 1)
    assert node.leader.ask(m.HoldRequests(CUT, CUT_HOLD_S)).error == "DeadlineExceeded", "there was a break"


# ---------------------------------------------------------------- what is held back


def test_an_ack_that_came_in_time_is_in_time(node):
    node.other.ask(node.other.put(2))
    leased = node.other.ask(lease(2))
    node.pass_time(leased.lease_s - 1)
    node.hold()
    ack = node.other.post(m.Ack("t", leased.lease, leased.token))
    node.pass_time(2)  # the lease would have ended a second ago
    work = node.part().work
    assert node.other.take(ack) == m.DoneReply(2)
    node.leader.ask(m.EndPart(work, finish=False))


@pytest.mark.parametrize("waits", [False, True])
def test_a_lease_that_was_held_back_begins_when_it_is_handed_out(node, waits):
    """One that waited before, too, and is served by a put that was held back."""
    node.other.ask(m.CreateTable("s", fields=[Field("x", "int64")], tasks=[Task("train", needs=["x"], lease_s=1.0)]))
    columns = m.Columns(fields=[Field("x", "int64")], inline=[m.Inline("x", bytes(8))])
    wanted, row = m.LeaseRequest("s", "train", rows=1, wait_s=30.0), m.PutRequest("s", 1, columns)
    if waits:
        call = node.other.post(wanted)
        node.hold()
        node.leader.post(row)
    else:
        node.other.ask(row)
        node.hold()
        call = node.other.post(wanted)
    node.pass_time(CUT_HOLD_S - 0.5)
    node.leader.post(m.ListTables())
    node.leader.ask(m.EndHold(CUT))
    leased = node.other.take(call)
    assert leased.lease_s == 1.0
    node.pass_time(0.9)
    assert node.coordinator.ledger.has_leased("s", "train")
    node.pass_time(0.2)
    assert not node.coordinator.ledger.has_leased("s", "train")


def test_a_lease_that_is_asked_for_again_during_a_hold_gets_its_answer_though_it_has_ended(node):
    node.other.ask(node.other.put(2))
    call = node.other.post(lease(2))
    leased = node.other.take(call)
    node.other.ask(m.Ack("t", leased.lease, leased.token))
    node.hold()
    node.other.post(lease(2), call=call)
    node.pass_time(1)
    node.leader.ask(m.EndHold(CUT))
    assert node.other.take(call) == leased


def test_whom_one_event_serves_comes_before_the_next(node):
    """Also where a put serves one waiter at a time, and where what is kept begins another hold."""
    waiting = [local(node) for _ in range(3)]
    leases = [client.post(lease(1, wait_s=30.0)) for client in waiting]
    node.coordinator.waiters_at_once = 1
    third = local(node)
    node.hold()
    node.other.post(node.other.put(3))
    held = third.post(m.HoldRequests(OTHER, 1.0))
    node.leader.ask(m.EndHold(CUT))
    assert third.take(held) == m.DoneReply()
    assert all(client.take(call) is not None for client, call in zip(waiting, leases, strict=True))
    third.ask(m.EndHold(OTHER))


def test_a_hold_ends_with_its_session(node):
    node.hold()
    waiting = node.other.post(node.other.put(1))
    node.coordinator._failed_sessions.append((node.leader.session, "a defect"))
    node.leader.post(m.HoldRequests(CUT, 1.0))
    assert not node.coordinator.cut_hold.session
    assert node.other.take(waiting) == m.PutRows(0, 1)


def test_nothing_of_a_stranger_is_kept(node):
    node.hold()
    for _ in range(3):
        node.receive(KeyedPeer(b"nobody", "unknown"), b"no message")
    assert not node.coordinator.cut_hold.kept
    assert node.coordinator.counters.strangers == 3


def test_a_part_that_was_given_up_is_not_completed(node, monkeypatch):
    monkeypatch.setattr(snapshot_job, "PART_DECISION_S", 0.2)
    node.hold()
    work = node.part().work
    assert isinstance(node.ended(work), m.Failed), "nobody decided"
    refused = node.leader.ask(m.EndPart(work, finish=True))
    assert isinstance(refused, m.Failed)
    assert list(node.root.glob("s/0*")) == []


def test_what_others_ask_and_what_the_leader_asks_besides_waits_in_order(node):
    node.hold()
    puts = [
        node.other.post(node.other.put(2)),
        node.leader.post(node.leader.put(1)),
        node.other.post(node.other.put(3)),
    ]
    broken = node.receive(node.other.peer, b"no message")
    assert node.rows() == 0
    assert broken is None
    assert node.coordinator.next_deadline() == CUT_HOLD_S
    work = node.part().work
    first, second, third = (
        client.take(call) for client, call in zip((node.other, node.leader, node.other), puts, strict=True)
    )
    assert [(put.first, put.rows) for put in (first, second, third)] == [(0, 2), (2, 1), (3, 3)]
    assert node.coordinator.counters.garbage == 1
    assert node.ended(work, "ready").ready
    node.leader.ask(m.EndPart(work, finish=True))
    assert node.ended(work).path == str(node.root / "s/000001")


def test_a_cut_has_nothing_that_was_held_back(tmp_path):
    first, second = Node(tmp_path / "a", "1/2"), Node(tmp_path / "b", "2/2")
    first.other.ask(m.CreateTable("t"))
    for node in (first, second):
        node.hold()
    calls = [(node, node.other.post(m.CreateTable("u0" if node is first else "u1"))) for node in (first, second)]
    for node in (first, second):
        work = node.part().work
        assert node.ended(work, "ready").ready
        node.leader.ask(m.EndPart(work, finish=True))
        node.ended(work)
    assert all(node.other.take(call) is not None for node, call in calls)
    texts = [(path / "s/000001/MANIFEST.json").read_text() for path in (tmp_path / "a", tmp_path / "b")]
    assert all('"u' not in text for text in texts)
    assert all(f'"id": "{CUT}"' in text for text in texts)
    for node in (first, second):
        node.close()


def test_nothing_expires_and_nobody_dies_during_a_hold(node):
    worker = local(node)
    worker.ask(worker.put(2))
    leased = worker.ask(lease(2))
    gone = local(node)
    node.pass_time(leased.lease_s - 0.1)
    node.hold()
    node.pass_time(0.2)
    node.coordinator.process_exited(gone.session, node.now)
    node.coordinator.peer_lost(node.other.peer, node.now)
    node.coordinator.keys_changed(node.now)
    assert node.coordinator.ledger.has_leased("t", "train")
    open_now = {session.number for session in node.coordinator.sessions}
    assert {gone.session, node.other.session} <= open_now
    node.leader.ask(m.EndHold(CUT))
    node.pass_time(0)
    assert not node.coordinator.ledger.has_leased("t", "train")
    open_now = {session.number for session in node.coordinator.sessions}
    assert not {gone.session, node.other.session} & open_now


@pytest.mark.parametrize("end", ["time", "process", "connection"])
def test_a_hold_ends_without_its_leader(node, end):
    node.hold(1.0)
    call = node.other.post(node.other.put(2))
    match end:
        case "time":
            node.pass_time(0.9)
            assert node.other.take(call) is None
            node.pass_time(0.2)
        case "process":
            node.coordinator.process_exited(node.leader.session, node.now)
        case _:
            node.coordinator.peer_lost(node.leader.peer, node.now)
    node.deliver()
    assert node.other.take(call).rows == 2
    assert not node.coordinator.cut_hold.session


@pytest.mark.parametrize("bound", ["CUT_HELD_EVENTS", "CUT_HELD_BYTES"])
def test_too_much_ends_a_hold_and_none_of_it_is_lost(node, bound, monkeypatch):
    monkeypatch.setattr(cut_hold, bound, 2)
    node.hold()
    calls = [node.other.post(node.other.put(1)) for _ in range(3)]
    assert not node.coordinator.cut_hold.session
    assert [node.other.take(call).first for call in calls] == [0, 1, 2]
    assert node.part().error == "DeadlineExceeded"


def test_a_hold_that_was_held_back_holds_what_came_after_it(node):
    third = local(node)
    node.hold()
    calls = [third.post(m.HoldRequests(OTHER, 1.0)), node.other.post(node.other.put(1))]
    node.leader.ask(m.EndHold(CUT))
    assert third.take(calls[0]) == m.DoneReply()
    assert node.other.take(calls[1]) is None
    third.ask(m.EndHold(OTHER))
    assert node.other.take(calls[1]).rows == 1


# ---------------------------------------------------------------- parts


def test_a_part_that_is_asked_for_again_is_begun_once(node):
    node.hold()
    call = node.leader.post(m.SnapshotPart("s", CUT))
    work = node.leader.take(call).work
    assert node.leader.take(node.leader.post(m.SnapshotPart("s", CUT), call)).work == work
    refused = node.leader.ask(m.EndPart(work, finish=True))
    if isinstance(refused, m.Failed):
        assert "is not ready, so it cannot be completed" in refused.text
    node.ended(work, "ready")
    for _ in range(2):
        node.leader.ask(m.EndPart(work, finish=True))
    node.leader.ask(m.EndPart(work, finish=False))
    assert node.ended(work).ended
    assert [path.name for path in (node.root / "s").iterdir()] == ["000001"]


def test_a_part_that_is_given_up_leaves_nothing(node):
    node.hold()
    work = node.part().work
    node.leader.ask(m.EndPart(work, finish=False))
    failed = node.ended(work)
    assert (failed.error, "was given up: another part of the cut failed" in failed.text) == ("PeerError", True)
    assert list((node.root / "s").iterdir()) == []
    node.hold(cut=OTHER)
    assert node.part(OTHER).cut == OTHER


def test_a_part_that_nobody_asks_for_is_given_up(node, monkeypatch):
    monkeypatch.setattr(snapshot_job, "PART_DECISION_S", 0.02)
    node.hold()
    work = node.part().work
    node.coordinator.operations.snapshots._jobs[work].asked_at -= 1
    while node.coordinator.operations.snapshots._running() is not None:
        assert node.stirred.wait(ENDED_S)
        node.stirred.clear()
        node.coordinator.tick(node.now)
    failed = node.ended(work)
    assert failed.error == "DeadlineExceeded"
    assert "it was ready, and nobody asked for it for 0.02 s" in failed.text
    assert list((node.root / "s").iterdir()) == []


def test_a_part_ends_with_the_session_that_began_it(node):
    node.hold()
    work = node.part().work
    node.ended(work, "ready")
    path = node.coordinator.operations.snapshots._jobs[work].path
    node.coordinator.process_exited(node.leader.session, node.now)
    node.leader = local(node)
    failed = node.ended(work)
    assert (failed.error, failed.text) == ("PeerError", f"{path} was given up: the session that began it is over")
    assert list((node.root / "s").iterdir()) == []
    plain = local(node)
    work = plain.ask(m.SnapshotRequest("p")).work
    node.coordinator.process_exited(plain.session, node.now)
    while not (reply := node.leader.ask(m.WatchJob(work))).ended:
        assert node.stirred.wait(ENDED_S)
        node.stirred.clear()
        node.coordinator.tick(node.now)
    assert reply.path == str(node.root / "p/000001")


def test_a_restored_part_is_visible_only_when_it_is_completed(node, tmp_path):
    node.other.ask(node.other.put(3))
    node.hold()
    work = node.part().work
    node.ended(work, "ready")
    node.leader.ask(m.EndPart(work, finish=True))
    node.ended(work)
    other = Node(tmp_path)
    for finish in (False, True):
        part = other.leader.ask(m.RestorePart("s"))
        ready = other.ended(part.work, "ready")
        assert (ready.cut, ready.ready) == (CUT, True)
        assert other.coordinator.ledger.table_names == []
        other.leader.ask(m.EndPart(part.work, finish=finish))
        other.ended(part.work)
    assert other.rows() == 3
    other.close()


# ---------------------------------------------------------------- older snapshots


def names(node):
    return sorted(path.name for path in node.root.glob("s/*"))


def take(node, number):
    """A part that is completed; whether others are is not said."""
    cut = f"{number:032x}"
    node.hold(cut=cut)
    work = node.part(cut).work
    assert node.ended(work, "ready").ready
    node.leader.ask(m.EndPart(work, finish=True))
    assert node.ended(work).ended
    return work


def test_older_parts_go_only_when_the_cut_is_known_to_be_whole(node):
    for number in range(4):
        work = take(node, number)
    assert names(node) == ["000001", "000002", "000003", "000004"], "each might be the last one that is whole"
    for _ in range(2):
        node.leader.ask(m.EndPart(work, finish=True, keep=2))
        assert node.ended(work).path == str(node.root / "s/000004")
        assert names(node) == ["000003", "000004"]
    later = take(node, 5)
    node.leader.ask(m.EndPart(work, finish=True, keep=1))
    node.ended(work)
    assert names(node) == ["000003", "000004", "000005"], "it was told before"
    node.leader.ask(m.EndPart(later, finish=True, keep=1))
    node.ended(later)
    assert names(node) == ["000005"]


def test_what_is_no_complete_part_removes_nothing(node):
    take(node, 4)
    node.hold()
    work = node.part().work
    assert node.ended(work, "ready").ready
    for finish in (True, False):
        refused = node.leader.ask(m.EndPart(work, finish, keep=1))
        assert (refused.error, "complete all parts first" in refused.text) == ("UsageError", True)
    assert names(node)[1:] == ["000001"], "and the one that is ready has no name yet"


class Seat:
    """What the steps of a cut know of the session with one coordinator. fails: whether this request finds nobody there."""

    def __init__(self, node, number, of, fails):
        self.node, self.seat, self.address, self.fails = node, CoordinatorIndex(number, of), f"c{number}", fails

    def run(self, operation):
        """The result of an operation, or the error that it raised."""
        step, value = operation.send, None
        while True:
            try:
                wanted = step(value)
            except StopIteration as end:
                return end.value
            if isinstance(wanted, Within):
                step, value = operation.send, Deadline(lambda: 0.0, wanted.wait_s)
                continue
            reply = Disconnected("it was killed") if self.fails(wanted) else outcome(self.ask(wanted))
            step, value = (operation.throw if isinstance(reply, Exception) else operation.send), reply

    def ask(self, request):
        if type(request) is m.WatchPart:
            return self.node.ended(request.work, "ready", "ended")
        return self.node.leader.ask(request)


def lead(steps):
    """Carry out the steps of a cut."""
    value = None
    while True:
        try:
            seat, operation = steps.throw(value) if isinstance(value, Exception) else steps.send(value)
        except StopIteration as end:
            return end.value
        try:
            value = seat.run(operation)
        except TransferQueueError as error:
            value = error


def test_torn_cuts_in_a_row_leave_the_last_whole_one(tmp_path):
    """The first coordinator completes its part of each, and the second one dies before it does."""
    nodes = [Node(tmp_path / name, f"{name}/2") for name in "12"]
    torn = False
    seats = [
        Seat(nodes[0], 1, 2, lambda _: False),
        Seat(nodes[1], 2, 2, lambda wanted: torn and type(wanted) is m.EndPart and wanted.finish),
    ]
    for number, torn in enumerate((False, True, True, True), 1):
        try:
            lead(cuts.snapshot_of_all(seats, "s", 2, f"{number:032x}", 60.0, None))
        except Disconnected:
            assert torn
            nodes[0].ended(number)
            lead(cuts._give_up({seats[1]: m.PartProgress(number, "", 0, 0, "", ready=True, ended=False)}))
    assert [path.name for path in sorted((tmp_path / "1/s/1-of-2").iterdir())] == [
        "000001",
        "000002",
        "000003",
        "000004",
    ]
    assert [path.name for path in (tmp_path / "2/s/2-of-2").iterdir()] == ["000001"], "the cut that both have"
    torn = False
    lead(cuts.snapshot_of_all(seats, "s", 2, "5" * 32, 60.0, None))
    assert [path.name for path in sorted((tmp_path / "1/s/1-of-2").iterdir())] == ["000004", "000005"]
    assert [path.name for path in sorted((tmp_path / "2/s/2-of-2").iterdir())] == ["000001", "000002"]
    for node in nodes:
        node.close()
