"""Every request declares what client and server must know of it, and what it declares is true."""

import typing

import pytest

import transferqueue as tq
from tests.server.nodes import Bench
from transferqueue.ledger.dispatch import HANDLERS
from transferqueue.wire import messages as m
from transferqueue.wire.messages.declarations import CHANNEL, DECLARED, TABLE
from transferqueue.wire.requests import undo

REQUESTS = typing.get_args(m.Request)
REPLIES = typing.get_args(m.Reply)


def tags(condition):
    return {m.tag_of(kind) for kind, declared in DECLARED.items() if condition(declared)}


def test_every_request_is_declared_and_nothing_else_is():
    assert set(DECLARED) == set(REQUESTS)
    assert len(REQUESTS) == len(DECLARED)


def test_every_reply_answers_a_request_or_refuses_it():
    declared = {one.reply for one in DECLARED.values() if one.reply is not None}
    assert declared | {m.Failed, m.OrdinalsEnded} == set(REPLIES)  # which a lease may get instead of rows


def test_every_request_is_carried_out_by_the_ledger_or_by_the_server():
    bench = Bench()
    own = bench.coordinator.operations.by_type
    bench.close()
    assert set(HANDLERS) | set(own) | {m.Hello, m.Goodbye} == set(REQUESTS)


@pytest.mark.parametrize("kind", [kind for kind in REQUESTS if DECLARED[kind].verb], ids=m.tag_of)
def test_the_verb_that_sends_a_request_is_in_both_apis(kind):
    owner, _, verb = DECLARED[kind].verb.rpartition(".")
    if not owner:
        assert callable(getattr(tq, verb))
        assert callable(getattr(tq, f"a{verb}"))
        return
    for name in (owner, f"Async{owner}"):
        assert callable(getattr(getattr(tq, name), verb)), f"{name}.{verb}"


def test_requests_without_a_verb_are_sent_by_the_client_itself():
    assert tags(lambda one: not one.verb) == {
        "Heartbeat",
        "Unpin",
        "ReturnGrant",
        "ListShards",
        "TakeOrders",
        "TakeCopies",
        "ExplainWait",
    }


def test_what_has_a_name_at_home_says_where_it_is():
    named = {TABLE: "name", CHANNEL: "channel"}
    for kind, declared in DECLARED.items():
        if declared.home is not None:
            assert named[declared.home] in kind.__struct_fields__, kind
        assert ("channel" in kind.__struct_fields__) == (declared.home == CHANNEL), kind
    assert tags(lambda one: one.home == TABLE) == {"CreateTable", "OpenTable"}


def test_what_a_repeated_request_does():
    assert tags(lambda one: one.repeat == "by_put") == {"Put", "Continue"}
    again = {"Hello", "Heartbeat", "Drain", "TakeOrders", "TakeCopies"}
    assert tags(lambda one: one.repeat == "again" and not one.reads) == again
    assert tags(lambda one: one.reply is None) == {"Heartbeat", "Unpin"}


def test_what_a_late_reply_leaves_behind():
    assert tags(lambda one: one.undo is not None) == {"Lease", "Reserve", "Grant", "Read", "Pull", "Begin"}
    assert tags(lambda one: one.reads and one.repeat != "again") == {"Basis"}
    for kind, declared in DECLARED.items():
        assert not (declared.reads and declared.undo), kind


def test_a_reply_that_gave_nothing_needs_no_undoing():
    refused = m.Failed("Full", "")
    for request in (
        m.Grant(1),
        m.LeaseRequest("t", "train", rows=1),
        m.Reserve("t", 1),
        m.ReadRequest("t"),
        m.Pull("c"),
    ):
        assert undo(request, refused, "abandoned wait") == []
    assert undo(m.Seal("t"), m.DoneReply(3), "abandoned wait") == []


def test_what_a_grant_and_a_reservation_gave_goes_back():
    assert undo(m.Grant(8), m.Granted(4, 0, 0, 8), "") == [m.ReturnGrant(4)]
    assert undo(m.Reserve("t", 2), m.Reserved(9, 2, 0, []), "") == [m.Unreserve("t", 9)]
