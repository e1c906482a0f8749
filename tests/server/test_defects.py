"""A defect of the code, wherever a frame or the time meets it: one session ends, the server goes on, and what happened
is told once."""

import os
import re

import pytest

from tests.server.nodes import Bench, lease, local, rows_of
from transferqueue.errors import JournalFailed, LedgerTorn
from transferqueue.ledger.requests import ack, put
from transferqueue.ledger.requests import lease as requests_lease
from transferqueue.limits import DEFECT_PAUSE_S
from transferqueue.transport import this_host
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import AuditAnswer, Stats


class Defect(Exception):
    """What no code raises on purpose."""


def broken(*_args, **_kwargs):
    raise Defect("a defect of the test")


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def stats(client):
    return codec.decode_observed(client.ask(m.Observe("stats")), Stats).server


@pytest.mark.parametrize(
    ("target", "name", "request_"),
    [
        ("ledger", "apply", m.ListTables()),
        ("ledger", "forget_replies", m.ListTables()),
        ("ledger", "message_received", m.Heartbeat()),
        ("waiting", "count_ahead", m.ListTables()),
        ("lending", "take", m.Grant(5)),
        ("remote", "issue", m.ListTables()),
    ],
)
def test_a_defect_ends_the_session_that_met_it_and_no_other(bench, monkeypatch, caplog, target, name, request_):
    victim = bench.client(**local(), remote=name == "issue")  # only what a session does not map has tickets
    other = bench.client(**local())
    other.create_table()
    other.ask(other.put(2))
    leased = victim.ask(lease(2))
    waits = victim.post(lease(9, wait_s=60.0))
    victim.seen = 2
    with monkeypatch.context() as patch:
        patch.setattr(bench.remote if target == "remote" else getattr(bench.coordinator, target), name, broken)
        call = victim.post(request_)
    failed = victim.take(call)
    assert failed.error == "InternalError"
    (number,) = re.findall(r"please report defect (\S+) with the server's log", failed.text)
    assert "a defect of the test" in failed.text
    assert victim.take(waits).error == "Disconnected"
    assert victim.session not in {one.number for one in bench.coordinator.sessions}
    logged = [record for record in caplog.records if number in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info
    assert stats(other).internal_errors == 1
    assert rows_of(other.ask(lease(2))) == rows_of(leased), "what the session held came back"
    assert codec.decode_observed(other.ask(m.Observe("audit")), AuditAnswer).balanced


def test_a_request_that_waits_meets_its_defect_for_its_own_session(bench, monkeypatch):
    waiter, other = bench.client(**local()), bench.client(**local())
    other.create_table()
    waits = waiter.post(lease(2, wait_s=60.0))
    apply = bench.coordinator.ledger.apply

    def fails_for_leases(request, **told):
        return broken() if isinstance(request, m.LeaseRequest) else apply(request, **told)

    with monkeypatch.context() as patch:
        patch.setattr(bench.coordinator.ledger, "apply", fails_for_leases)
        assert isinstance(other.ask(other.put(2)), m.PutRows), "who put is not who failed"
    assert waiter.take(waits).error == "InternalError"
    assert {one.number for one in bench.coordinator.sessions} == {other.session}


def test_a_hello_that_meets_a_defect_leaves_no_half_of_a_session(bench, monkeypatch):
    other = bench.client(**local())
    for target, name in [("ledger", "open_session"), ("clients", "watch"), ("remote", "session_opened")]:
        before = set(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            where = bench.remote if target == "remote" else getattr(bench.coordinator, target)
            patch.setattr(where, name, broken)
            assert bench.client(**local()).welcome.error == "InternalError"
        assert len(bench.coordinator.sessions) == len(bench.coordinator.ledger.state.sessions) == 1
        assert set(os.listdir("/proc/self/fd")) == before
    assert stats(other).internal_errors == 3


def test_a_kernel_that_watches_no_more_processes_refuses_the_session(bench, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.watched, "watch", full)
    refused = bench.client(**local()).welcome
    assert (refused.error, refused.text) == (
        "Full", f"session refused: the kernel does not watch process {os.getpid()}: No space left on device",
    )  # fmt: skip
    assert len(bench.coordinator.sessions) == len(bench.coordinator.ledger.state.sessions) == 0


@pytest.mark.parametrize("pid", [1 << 31, 1 << 53, (1 << 63) - 1, (1 << 64) - 1, -1, -(1 << 63)])
def test_a_process_number_beyond_the_kernels_is_refused(bench, pid):
    refused = bench.client(host=this_host(), pid=pid).welcome
    assert refused.error == "ProtocolError"
    assert bench.coordinator.counters.internal_errors == 0


def test_what_is_due_meets_a_defect_and_all_else_that_is_due_happens(bench, monkeypatch):
    client = bench.client(**local())
    client.create_table()
    waits = client.post(lease(1, wait_s=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(bench.coordinator.memory, "trim", broken)
        patch.setattr(bench.coordinator.memory, "due_at", 0.0)
        patch.setattr(bench.coordinator.sessions, "silent", broken)
        bench.now = 2.0
        bench.coordinator.tick(bench.now)
        bench.deliver()
        assert bench.coordinator.next_deadline() == bench.now + DEFECT_PAUSE_S, "not at once again, and again"
        bench.coordinator.tick(bench.now)
        assert bench.coordinator.counters.internal_errors == 2
    assert client.take(waits).error == "DeadlineExceeded"
    assert len(bench.coordinator.sessions) == 1, "time is nobody's request"
    bench.pass_time(DEFECT_PAUSE_S)
    assert bench.coordinator.next_deadline() is None


def test_an_answer_that_cannot_be_told_is_told_so(bench):
    client = bench.client(**local())
    bench.coordinator.answers.send(client.peer, 7, m.Failed("UsageError", "a file named \udcff"))
    bench.deliver()
    assert "cannot be sent" in client.take(7).text


def test_a_journal_that_cannot_be_written_still_ends_the_server(bench, monkeypatch):
    client = bench.client(**local())

    def fails(*_args, **_kwargs):
        raise JournalFailed("full")

    monkeypatch.setattr(bench.coordinator.ledger, "apply", fails)
    with pytest.raises(JournalFailed):
        client.post(m.ListTables())


# ---------------------------------------------------------------- a torn ledger


def half(*_args, **_kwargs):
    raise MemoryError


@pytest.mark.parametrize("what", ["put", "lease", "tick", "end"])
def test_a_torn_ledger_ends_the_server_whatever_tore_it(bench, monkeypatch, what):
    client, other = bench.client(**local()), bench.client(**local())
    other.create_table()
    other.ask(other.put(2))
    leased = client.ask(lease(1))
    acts = {
        "put": lambda: other.post(other.put(1)),
        "lease": lambda: other.post(lease(1)),
        "tick": lambda: bench.pass_time(leased.lease_s + 1),
        "end": lambda: bench.coordinator.process_exited(client.session, 0.0),
    }
    target = {"put": (put, "_add_rows"), "lease": (requests_lease, "_open_lease")}.get(what, (ack, "end_lease"))
    monkeypatch.setattr(*target, half)
    with pytest.raises(LedgerTorn, match="met MemoryError"):
        acts[what]()
    with pytest.raises(LedgerTorn):  # nothing further is done
        bench.coordinator.ledger.apply(m.ListTables(), session=other.session, call=99, now=bench.now)
    bench.coordinator.answers.outbox.clear()
    bench.coordinator.stop("the server has ended: why")
    bench.deliver()
    assert other.take(0).text == "the server has ended: why"


def test_what_follows_a_request_ends_the_server_if_there_is_no_memory_for_it(bench, monkeypatch):
    client = bench.client(**local())
    client.create_table()
    monkeypatch.setattr(bench.coordinator._calls, "_apply_effects", half)
    waits = client.post(lease(1, wait_s=60.0))
    with pytest.raises(LedgerTorn, match=r"what follows .* met MemoryError .* was not done"):
        client.post(client.put(1))
    assert waits


def test_a_message_for_which_there_is_no_memory_is_refused(bench, monkeypatch):
    client = bench.client(**local())
    with monkeypatch.context() as patch:
        patch.setattr(codec, "decode_call", half)
        call = client.post(m.ListTables())
    refused = client.take(call)
    assert refused.error == "Full"
    assert "memory of the server process is exhausted" in refused.text
    assert client.ask(m.ListTables()).names == []


def test_a_request_that_finds_no_memory_before_it_writes_is_refused(bench, monkeypatch):
    client = bench.client(**local())
    client.create_table()
    with monkeypatch.context() as patch:
        patch.setattr(put, "_check_put", half)
        refused = client.ask(client.put(1))
    assert refused.error == "Full"
    assert "memory of the server process is exhausted" in refused.text
    assert isinstance(client.ask(client.put(1)), m.PutRows)
