"""Parking against a reference of plain lists, and each rule of its law by name."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.server.nodes import Bench
from transferqueue.policies import TagIs, Task
from transferqueue.server.sessions.waiting import WaitQueue, lane_of
from transferqueue.wire import messages as m


def lease(rows=1, wait_s=10.0, **terms):
    return m.LeaseRequest("t", "train", rows=rows, wait_s=wait_s, **terms)


def put(rows=1, wait_s=10.0, **terms):
    return m.PutRequest("t", rows, m.Columns(), wait_s=wait_s, **terms)


KEY = ("task", "t", "train")


def park(parking, call, request, now=0.0, session=1, keys=(KEY,)):
    """What the node does with a newcomer that cannot proceed."""
    ahead = parking.count_ahead(request)
    parked = parking.join(session, call, request, now)
    parking.wait_on(parked, () if ahead else keys)
    return parked


def due(parking):
    """Calls that are due, in the order in which they are tried; each is put back to rest."""
    found = []
    while (parked := parking.next_due()) is not None:
        found.append(parked.call)
        parking.wait_on(parked, (KEY,))
    return found


def test_what_shares_a_lane():
    assert lane_of(lease()) == lane_of(lease(rows=64)) == ("lease", "t", "train")
    assert lane_of(put()) == ("put", "t")
    assert lane_of(m.Reserve("t", 4)) == ("reserve", "t")
    for alone in (
        lease(where=[TagIs("a", 1)]),
        lease(world=2),
        lease(replicas=2),
        put(reservation=3),
        m.Reserve("t", 4, policy_version=2),
        m.Grant(4096),
        m.Pull("c"),
        m.OpenTable("t"),
    ):
        assert lane_of(alone) is None


def test_only_the_first_of_a_lane_is_tried():
    parking = WaitQueue()
    for call in (1, 2, 3):
        park(parking, call, lease())
    parking.wake(KEY)
    assert due(parking) == [1]


def test_a_newcomer_sees_that_others_wait_before_it():
    parking = WaitQueue()
    assert parking.count_ahead(lease()) == 0
    first = park(parking, 1, lease(rows=64))
    second = park(parking, 2, lease(rows=1))
    assert parking.count_ahead(lease()) == 2
    assert parking.count_ahead(lease(where=[TagIs("a", 1)])) == 0
    assert (parking.ahead_of(first), parking.ahead_of(second)) == (0, 1)


def test_requests_with_conditions_are_each_tried_in_order_of_arrival():
    parking = WaitQueue()
    park(parking, 1, lease(where=[TagIs("a", 1)]))
    park(parking, 2, lease())
    park(parking, 3, lease(world=2))
    park(parking, 4, lease())
    parking.wake(KEY)
    assert due(parking) == [1, 2, 3]


def test_when_the_first_leaves_the_next_is_due_at_once():
    parking = WaitQueue()
    first = park(parking, 1, lease())
    park(parking, 2, lease())
    parking.remove(first)
    assert due(parking) == [2]
    parking.wake(KEY)
    assert due(parking) == [2]


def test_a_wake_of_another_key_wakes_nobody():
    parking = WaitQueue()
    park(parking, 1, lease())
    parking.wake(("task", "t", "other"))
    assert due(parking) == []


def test_a_session_that_ends_takes_its_waits_along():
    parking = WaitQueue()
    park(parking, 1, lease(), session=1)
    park(parking, 1, lease(), session=2)
    assert parking.holds(1, 1)
    assert [parked.session for parked in parking.remove_session(1)] == [1]
    assert not parking.holds(1, 1)
    assert parking.count(1) == 0
    assert parking.count(2) == 1
    assert due(parking) == [1]


def test_deadlines_come_in_their_order():
    parking = WaitQueue()
    park(parking, 1, lease(wait_s=5.0), now=1.0)
    park(parking, 2, lease(wait_s=1.0), now=2.0)
    assert parking.next_deadline() == 3.0
    assert parking.next_expired(2.9) is None
    second = parking.next_expired(3.0)
    assert second is not None
    assert second.call == 2
    parking.remove(second)
    assert parking.next_deadline() == 6.0


def test_a_wait_may_be_cut_short_but_not_drawn_out():
    parking = WaitQueue()
    first = park(parking, 1, lease(wait_s=9.0))
    park(parking, 2, lease(wait_s=5.0))
    parking.shorten_wait(1, 1, deadline=20.0)
    parking.shorten_wait(1, 7, deadline=0.0)
    assert parking.next_deadline() == 5.0
    parking.shorten_wait(1, 1, deadline=1.0)
    assert parking.next_expired(1.0) is first
    parking.remove(first)
    assert parking.next_deadline() == 5.0
    assert due(parking) == [2]


def test_the_deadlines_do_not_grow_with_those_who_left():
    parking = WaitQueue()
    for call in range(10_000):
        parking.remove(park(parking, call, lease(wait_s=1e6)))
    assert len(parking._deadlines) < 200
    assert parking.next_deadline() is None


KEYS = [("task", "t", "train"), ("room", "t"), ("clock", "t"), ("memory",)]
REQUESTS = [
    lease(),
    lease(rows=64),
    lease(where=[TagIs("a", 1)]),
    put(),
    put(rows=9),
    m.Reserve("t", 4),
    m.Grant(8),
]


class ParkingMachine(RuleBasedStateMachine):
    """The reference: one list in order of arrival, searched every time."""

    def __init__(self):
        super().__init__()
        self.parking = WaitQueue()
        self.waits = []  # dicts: parked, keys, due
        self.calls = 0
        self.now = 0.0

    def first_in_lane(self, wait):
        lane = wait["parked"].lane
        return lane is None or next(w for w in self.waits if w["parked"].lane == lane) is wait

    def take_out(self, wait):
        was_first = self.first_in_lane(wait)
        self.waits.remove(wait)
        lane = wait["parked"].lane
        if was_first and lane is not None:
            for other in self.waits:
                if other["parked"].lane == lane:
                    other["due"] = True
                    break

    @rule(
        request=st.sampled_from(REQUESTS),
        wait_s=st.integers(1, 9),
        session=st.integers(1, 3),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2),
    )
    def newcomer(self, request, wait_s, session, keys):
        import msgspec

        request = msgspec.structs.replace(request, wait_s=float(wait_s))
        self.calls += 1
        ahead = self.parking.count_ahead(request)
        assert ahead == sum(w["parked"].lane == lane_of(request) for w in self.waits if w["parked"].lane is not None)
        keys = [] if ahead else keys
        parked = self.parking.join(session, self.calls, request, self.now)
        self.parking.wait_on(parked, keys)
        self.waits.append({"parked": parked, "keys": set(keys), "due": False})

    @rule(key=st.sampled_from(KEYS))
    def wake(self, key):
        self.parking.wake(key)
        for wait in self.waits:
            wait["due"] |= key in wait["keys"]

    @rule(served=st.booleans(), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    def attempt(self, served, keys):
        wait = next((w for w in self.waits if w["due"]), None)
        parked = self.parking.next_due()
        assert parked is (wait and wait["parked"])
        if wait is None:
            return
        assert self.first_in_lane(wait)
        if served:
            self.parking.remove(parked)
            self.take_out(wait)
        else:
            self.parking.wait_on(parked, keys)
            wait["due"], wait["keys"] = False, set(keys)

    @precondition(lambda self: self.waits)
    @rule(place=st.integers(0, 100), seconds=st.integers(0, 9))
    def hurry(self, place, seconds):
        parked = self.waits[place % len(self.waits)]["parked"]
        expected = min(parked.deadline, self.now + seconds)
        self.parking.shorten_wait(parked.session, parked.call, self.now + seconds)
        assert parked.deadline == expected

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds):
        self.now += seconds
        while (parked := self.parking.next_expired(self.now)) is not None:
            wait = next(w for w in self.waits if w["parked"] is parked)
            assert parked.deadline == min(w["parked"].deadline for w in self.waits) <= self.now
            self.parking.remove(parked)
            self.take_out(wait)

    @precondition(lambda self: self.waits)
    @rule(session=st.integers(1, 3))
    def session_ends(self, session):
        gone = self.parking.remove_session(session)
        mine = [w for w in self.waits if w["parked"].session == session]
        assert gone == [w["parked"] for w in mine]
        for wait in mine:
            self.take_out(wait)

    @invariant()
    def nothing_is_lost_or_left_behind(self):
        assert list(self.parking) == [w["parked"] for w in self.waits]
        assert len(self.parking) == len(self.waits)
        assert self.parking.next_deadline() == min((w["parked"].deadline for w in self.waits), default=None)
        for session in (1, 2, 3):
            assert self.parking.count(session) == sum(w["parked"].session == session for w in self.waits)
        for wait in self.waits:
            assert self.parking.holds(wait["parked"].session, wait["parked"].call)
        if not self.waits:
            assert not self.parking._by_key
            assert not self.parking._lanes
            assert not self.parking._by_session
            assert not self.parking._by_call


TestParking = ParkingMachine.TestCase


@pytest.mark.timeout(10)
def test_a_due_request_that_ended_does_not_keep_the_server_busy():
    """Its session ended before it was tried again, and nobody else waits."""
    bench = Bench()
    client = bench.client()
    client.post(m.CreateTable(name="t", fields=[], tasks=[Task("train", needs=["x"])]))
    client.post(m.LeaseRequest("t", "train", rows=1, wait_s=9.0))
    waiting = bench.coordinator.waiting
    waiting._make_due(next(iter(waiting.requests)))
    bench.coordinator.peer_lost(client.peer, bench.now)
    other = bench.client()
    assert other.take(other.post(m.ListTables())).names == ["t"]
    bench.close()
