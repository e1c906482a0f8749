"""A node under requests that no good client would send: it answers each, and the books balance."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import examples
from tests.server.nodes import Bench, lease, numbers
from transferqueue.policies import Compare, TagIs, VersionBetween
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer
from transferqueue.wire.versions import PROTOCOL

names = st.sampled_from(["t", "u", "train", "x", "big", "no such", ""])
small = st.integers(-1, 5)
counts = st.one_of(st.integers(0, 5), st.just(1 << 40))
waits = st.sampled_from([0.0, 1.0])
ids = st.binary(max_size=24)
rows = st.one_of(
    st.none(),
    ids,
    st.lists(st.integers(-2, 9), max_size=3).map(
        lambda found: b"".join(row.to_bytes(8, "little", signed=True) for row in found)
    ),
)
predicates = st.lists(
    st.one_of(
        st.builds(TagIs, names, small),
        st.builds(VersionBetween, st.none() | small, st.none() | small),
        st.builds(Compare, names, st.sampled_from(["<", "=="]), st.floats(width=32)),
    ),
    max_size=2,
)
facts = st.builds(m.RowFacts, group_id=st.none() | ids, group_size=st.none() | ids, tokens=st.none() | ids)
columns = st.one_of(
    st.integers(0, 3).map(numbers),
    st.builds(
        m.Columns,
        fields=st.lists(st.sampled_from([Field("x", "int64"), Field("big", "uint8", (None,))]), max_size=2),
        blocks=st.lists(
            st.builds(
                m.WrittenBlock,
                counts,
                counts,
                counts,
                counts,
                st.lists(names, max_size=2),
                st.lists(counts, max_size=2),
            ),
            max_size=2,
        ),
        inline=st.lists(st.builds(m.Inline, names, ids), max_size=2),
        facts=facts,
    ),
)
read = st.builds(
    m.RowsRead,
    st.lists(st.builds(m.Inline, names, ids), max_size=2),
    st.lists(st.builds(m.BlocksRead, st.lists(names, max_size=2), ids), max_size=2),
    st.none() | st.lists(st.just({}), max_size=2),
)
requests = st.one_of(
    st.builds(m.CreateTable, names),
    st.builds(m.OpenTable, names, wait_s=waits),
    st.builds(m.Seal, names),
    st.builds(m.AdvanceClock, names, small, wait_s=waits),
    st.builds(m.Grant, st.sampled_from([1, 5000, 1 << 20, 1 << 50]), wait_s=waits),
    st.builds(m.ReturnGrant, small),
    st.builds(m.Unpin, ids, ids),
    st.builds(m.PutRequest, names, st.integers(1, 3), columns, reservation=small, wait_s=waits),
    st.builds(m.Update, names, ids, columns, overwrite=st.booleans(), if_unchanged=st.none() | read),
    st.builds(
        m.LeaseRequest, names, names, rows=counts, tokens=counts, groups=counts, at_least=counts, wait_s=waits,
        where=predicates, rank=st.integers(0, 2), world=st.integers(1, 2), replica=st.integers(0, 2),
        replicas=st.integers(1, 2), fields=st.none() | st.lists(names, max_size=2),
    ),
    st.builds(m.Ack, names, small, small, rows, st.none() | columns, drop=names),
    st.builds(m.AckLeases, names, ids, ids, st.integers(-1, 3)),
    st.builds(m.ReleaseRequest, names, small, small, rows, failed=st.booleans()),
    st.builds(m.Renew, names, small, small),
    st.builds(m.Reserve, names, st.integers(1, 3), policy_version=small, wait_s=waits),
    st.builds(m.Unreserve, names, small, small.map(abs)),
    st.builds(m.Drop, names, ids, names),
    st.builds(m.Delete, names, ids),
    st.builds(m.Find, names, st.lists(names, max_size=2)),
    st.builds(m.ReadRequest, names, rows, where=predicates, limit=counts),
    st.builds(m.Pull, names, above=small, version=small, wait_s=waits),
    st.builds(m.ReportApplied, names, counts),
    st.builds(m.GetLatestVersion, names),
    st.builds(m.AcquireUpdateSlot, names, st.integers(1, 2), st.floats(0.1, 5), waits),
    st.builds(m.ReleaseUpdateSlot, names),
    st.builds(m.Observe, st.sampled_from(["stats", "audit", "row", "doctor", "sessions", "x"]), names, small),
    st.builds(m.ListEvents, names, small, counts),
    st.builds(lease, st.integers(1, 3), waits),
    st.just(m.Heartbeat()),
)  # fmt: skip


def check(bench, witness):
    bench.pass_time(3)
    assert bench.coordinator.counters.internal_errors == 0
    assert len(bench.coordinator.waiting) == 0
    audit = codec.decode_observed(witness.ask(m.Observe("audit")), AuditAnswer)
    assert audit.balanced, audit


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 1), requests), max_size=30))
def test_any_request_is_answered_and_the_books_balance(calls):
    bench = Bench()
    clients = [bench.client(), bench.client()]
    clients[0].create_table()
    clients[0].ask(clients[0].put(3))
    open_calls = []
    for who, request in calls:
        call = clients[who].post(request)
        if not isinstance(request, m.Heartbeat | m.Unpin):
            open_calls.append((clients[who], call))
    check(bench, clients[1])
    for client, call in open_calls:
        assert client.take(call) is not None
        assert client.take(call) is None
    bench.close()


@settings(max_examples=examples(60))
@given(requests, st.data())
def test_a_mutated_call_of_an_open_session_never_breaks_the_node(request, data):
    bench = Bench()
    client, witness = bench.client(), bench.client()
    client.create_table()
    frame = bytearray(codec.encode_call(m.CallFrame(client.session, 9, 0, request)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(min_size=1, max_size=3))
    bench.receive(b"stranger", bytes(frame))
    check(bench, witness)
    bench.close()


def test_numbers_of_any_size_are_answered():
    bench = Bench()
    client = bench.client()
    for session, call, seen in [
        (client.session, 1 << 63, 0),
        (client.session, 5, 1 << 63),
        (-1, -1, -1),
        (1 << 63, 0, 0),
    ]:
        frame = msgspec.msgpack.encode([PROTOCOL, session, call, seen, ["ListTables"]])
        bench.receive(client.peer, frame)
    assert [m.tag_of(reply) for _, reply in bench.answered[client.peer]] == ["Tables", "Failed", "Failed"]
    bench.close()
