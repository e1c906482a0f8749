import re

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transferqueue.errors import ProtocolError, UsageError, VersionMismatch
from transferqueue.limits import MESSAGE_BYTES_MAX, Limits
from transferqueue.policies import Acked, Compare, Complete, Pacing, Requeue, TagIs, Task, TokenBalanced
from transferqueue.schema import Field
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.answers.doctor import DoctorAnswer
from transferqueue.wire.answers.stats import TaskStats
from transferqueue.wire.versions import PROTOCOL, VERSION

CALL, ANSWER = bytes([0x95, PROTOCOL]), bytes([0x94, PROTOCOL])
"""The first bytes of each."""
CALLS = [
    m.CallFrame(0, 1, 0, m.Hello(b"x" * 16, pid=7, host="h", lock="/x")),
    m.CallFrame(9, 2, 1, m.Heartbeat()),
    m.CallFrame(9, 3, 1, m.Unpin(b"\x01" * 8, b"\x02" * 8)),
    m.CallFrame(
        9,
        4,
        1,
        m.CreateTable(
            "t",
            tasks=[Task("train", ["a"], selector=TokenBalanced(), groups=Complete(min_size=2))],
            limits=Limits(rows=4, bytes="8MiB"),
            pacing=Pacing("train", 4, on_stale=Requeue("reward")),
        ),
    ),
    m.CallFrame(
        9, 5, 1, m.LeaseRequest("t", "train", rows=4, wait_s=1.5, where=[TagIs("a", 1), Compare("f", "<", 0.5)])
    ),
    m.CallFrame(
        9,
        6,
        1,
        m.PutRequest(
            "t", 2, m.Columns(blocks=[m.WrittenBlock(1, 0, 64, 2, ["a"], [4])], inline=[m.Inline("r", b"12")])
        ),
    ),
    m.CallFrame(9, 7, 1, m.Ack("t", 1, 2, b"\0" * 8, m.Columns(facts=m.RowFacts(keys=["k"], tags=[{"a": True}])))),
    m.CallFrame(9, 8, 1, m.Grant(4096)),
]
ANSWERS = [
    m.AnswerFrame(1, 2, m.Failed("Full", "no room")),
    m.AnswerFrame(1, 3, codec.encode_observed({"a": [1, 2.5, None, {"b": "c"}]})),
    m.AnswerFrame(1, 4, m.TableTerms("t", [], [], Limits(), None, Acked(), False, 0)),
    m.AnswerFrame(1, 5, m.Welcome(1, 2, "s", "/r", {0: "/dev/shm/x"}, 1 << 40)),
]
TERMS = m.tag_of(m.TableTerms)
FRAMES = [codec.encode_call(call) for call in CALLS]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call.request).__name__)
def test_a_call_comes_back_as_it_was(call):
    assert codec.decode_call(codec.encode_call(call)) == call


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer.reply).__name__)
def test_an_answer_comes_back_as_it_was(answer):
    assert codec.decode_answer(codec.encode_answer(answer)) == answer


def test_answers_come_back_and_older_and_newer_ones_are_read():
    task = TaskStats(ready=3, age_s=1.5, holders=["a"])
    assert codec.decode_observed(codec.encode_observed(task), TaskStats) == task
    newer = codec.encode_observed({"ready": 3, "of_a_newer_server": [1]})
    assert codec.decode_observed(newer, TaskStats) == TaskStats(ready=3)


def test_an_answer_of_another_form_is_refused():
    with pytest.raises(ProtocolError, match=r"cannot be read as .*DoctorAnswer.*`tables`; install the same version"):
        codec.decode_observed(codec.encode_observed({"now_s": 1.0}), DoctorAnswer)


def test_fields_travel():
    call = m.CallFrame(1, 1, 0, m.AddFields("t", [Field("a", "float32", (2,))]))
    assert codec.decode_call(codec.encode_call(call)) == call


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"hello",
        b"\x00" * 100,
        FRAMES[0] + b"\x00",
        FRAMES[0][:-1],
        CALL + b"\x01\x02\x00\x91\xa7Nothing",
        CALL + b"\x01\x02\x00\x91\xa7\xff\xff\xff\xff\xff\xff\xff",
        CALL + b"\x01\x02\x00" + b"\x91" * 1_000_000,
        b"\x91" * 1_000_000,
        b"\xdd\xff\xff\xff\xff",  # an array said to have 2**32 - 1 items
        b"\xc6\xff\xff\xff\xff",  # bytes said to be 4 GiB
    ],
)
def test_what_is_no_message_is_refused(frame):
    for decode in (codec.decode_call, codec.decode_answer):
        with pytest.raises(ProtocolError, match="not a message"):
            decode(frame)


def test_depth_is_bounded_where_the_type_is_open():
    deep = ANSWER + b"\x01\x02\x92\xa8Observed" + b"\x91" * 1_000_000 + b"\x01"
    with pytest.raises(ProtocolError, match="nested far deeper"):
        codec.decode_answer(deep)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e10])
def test_a_wait_that_has_no_end_is_refused(seconds):
    frame = codec.encode_call(m.CallFrame(1, 1, 0, m.LeaseRequest("t", "k", rows=1, wait_s=seconds)))
    with pytest.raises(ProtocolError, match=r"Expected `float`"):
        codec.decode_call(frame)


def test_a_lease_of_a_client_that_awaits_no_rows_is_read_as_before():
    frame = "ce0070000107069fa54c65617365a174a5747261696e02000000cb0000000000000000cb000000000000000090c000010001"
    recorded = CALL + bytes.fromhex(frame)
    assert codec.decode_call(recorded).request == m.LeaseRequest("t", "train", rows=2)


def test_size_is_judged_before_content():
    frame = b"\xc1" * (MESSAGE_BYTES_MAX + 1)
    with pytest.raises(ProtocolError, match="not read"):
        codec.decode_call(frame)
    with pytest.raises(ProtocolError, match="not read"):
        codec.decode_answer(frame)
    with pytest.raises(UsageError, match=r"request Unpin takes 67,108,\d+ bytes .* use fewer rows"):
        codec.encode_call(m.CallFrame(1, 1, 0, m.Unpin(bytes(MESSAGE_BYTES_MAX), b"")))
    with pytest.raises(UsageError, match="reply Found takes"):
        codec.encode_answer(m.AnswerFrame(1, 1, m.Found(bytes(MESSAGE_BYTES_MAX))))


def test_what_no_message_can_hold_is_refused_at_the_sender():
    for value, text in ((1 << 64, "integers have at most 64 bits"), ("\ud800", r"'\\ud800' is not Unicode")):
        with pytest.raises(UsageError, match=f"request Lease cannot be sent: .*{text}"):
            codec.encode_call(m.CallFrame(1, 1, 0, m.LeaseRequest("t", "k", where=[TagIs("a", value)])))


def test_a_bad_request_still_names_its_call():
    frame = msgspec.msgpack.encode([PROTOCOL, 5, 77, 3, ["Lease", "t"]])
    with pytest.raises(ProtocolError):
        codec.decode_call(frame)
    assert codec.call_of(frame) == (5, 77)
    assert codec.call_of(b"junk") == (0, 0)


@given(st.sampled_from(FRAMES), st.data())
def test_a_mutated_frame_is_a_message_or_refused(frame, data):
    mutated = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(mutated) - 1, 0)))
        mutated[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    check_total(bytes(mutated))


@given(st.binary(max_size=200))
@example(CALL + b"\x01\x02\x00\x91\xa9Heartbeat")
def test_any_bytes_are_a_message_or_refused(frame):
    check_total(frame)


def check_total(frame):
    """Decoding ends in a call that encodes again, or in ProtocolError; nothing else."""
    codec.call_of(frame)
    try:
        call = codec.decode_call(frame)
    except ProtocolError:
        return
    again = codec.encode_call(call)
    assert codec.encode_call(codec.decode_call(again)) == again  # as bytes: NaN is not equal to itself


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (["Frob", 1], r"does not know 'Frob'; it has Ack, .* and \d+ more: use one of these, or install the client's"),
        (
            ["CreateTable", "t", [], [["a", [], [], ["OfNewerPackage"]]]],
            "'OfNewerPackage'; it has Fifo, Freshest, LongestFirst, ",
        ),
        (["Lease", "t", "x", 1, 0, 0, 0, 0.0, 0.0, [["Like", "a"]]], "'Like'; it has Compare, TagIs, VersionBetween:"),
        (
            ["CreateTable", "t", [], [], [64, None], None, ["Ring"]],
            "'Ring'; it has Acked, AckedColumns, Manual, ManualColumns, Recorded:",
        ),
        (["Grant", 5, 0.0, [], "gpu"], "'gpu'; it has results, rows, weights:"),
        (
            ["CreateTable", "t", [[f"x{at}", "int64", []] for at in range(1024)], [["a", [], [], ["OfNewerPackage"]]]],
            "'OfNewerPackage'; it has Fifo, ",
        ),
        (["Put", "t", 1, ["Columns"], 0, 0.0, 7], "it has more items than the server's package .* knows: install"),
        (["A" * 9000], "does not know 'A{40}'"),
    ],
)
def test_what_a_newer_package_has_is_named(tree, said):
    frame = msgspec.msgpack.encode([PROTOCOL, 1, 2, 0, tree])
    with pytest.raises(ProtocolError) as raised:
        codec.decode_call(frame)
    named = codec.explain_call(frame, raised.value, client_package="0.99.0")
    assert isinstance(named, VersionMismatch)
    assert re.search(said, str(named))
    assert f"the server's package {VERSION} " in str(named)
    assert str(named).endswith("install the client's package 0.99.0, or a later one, for the server")


@pytest.mark.parametrize(
    "tree", [["Lease", "t"], ["Seal", 7], [], 5, [["Frob"]], ["CreateTable", "t", [], [["a", [], [], [b"\xff"]]]]]
)
def test_a_call_that_no_package_sends_is_not_explained(tree):
    frame = msgspec.msgpack.encode([PROTOCOL, 1, 2, 0, tree])
    with pytest.raises(ProtocolError) as raised:
        codec.decode_call(frame)
    assert codec.explain_call(frame, raised.value, client_package="0.99.0") is raised.value


def test_a_reply_of_a_newer_server_ends_its_call_alone():
    tasks = [["a", [], [], ["OfNewerPackage"]]]
    frame = msgspec.msgpack.encode([PROTOCOL, 7, 3, [TERMS, "t", [], tasks, [1, 1], None, ["Acked"], False, 0]])
    with pytest.raises(ProtocolError) as raised:
        codec.decode_answer(frame)
    answer = codec.explain_answer(frame, raised.value, server_package="0.99.0")
    assert (answer.epoch, answer.id, answer.reply.error) == (7, 3, "VersionMismatch")
    assert answer.reply.text.startswith(f"the client's package {VERSION} does not know 'OfNewerPackage'; it has Fifo, ")
    damaged = msgspec.msgpack.encode([PROTOCOL, 7, 3, [TERMS, "t", 5]])
    with pytest.raises(ProtocolError) as raised:
        codec.decode_answer(damaged)
    assert codec.explain_answer(damaged, raised.value, server_package="") is None
