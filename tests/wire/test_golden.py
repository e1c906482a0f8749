"""The frames of this protocol are the recorded ones: a change of one needs a new protocol number."""

import json
import typing

import msgspec
import pytest
from msgspec import inspect

from tests.server.nodes import Bench
from tests.wire import examples, golden, session
from transferqueue.errors import ProtocolError
from transferqueue.policies import Selector
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.versions import PROTOCOL

FRAMES = examples.frames()


def test_there_is_an_example_of_every_message_and_of_every_part_of_one():
    made = examples.structs(
        [*examples.REQUESTS, *examples.REPLIES, *examples.SELECTORS, *examples.HEADS, examples.FIELDS]
    )
    roots = (m.Request, m.Reply, b.ToShard, b.ToClient)
    assert {kind.__name__ for kind in declared(*roots)} == {kind.__name__ for kind in made}
    for root in roots:
        assert set(typing.get_args(root)) <= made


def declared(*roots):
    """Types of all structs that a message may have in it."""
    found, todo = set(), [inspect.type_info(root) for root in roots]
    while todo:
        kind = todo.pop()
        if isinstance(kind, inspect.StructType) and kind.cls not in found:
            found.add(kind.cls)
            todo += [field.type for field in kind.fields]
        todo += [getattr(kind, name) for name in ("item_type", "key_type", "value_type") if hasattr(kind, name)]
        todo += getattr(kind, "types", ()) or getattr(kind, "item_types", ())
    return found


def test_every_message_is_sent_as_it_was_recorded():
    recorded, sent = golden.recorded(), golden.sent()
    assert golden.changed(recorded, sent) == [], golden.REMEDY
    assert sent["frames"].keys() == recorded["frames"].keys(), "new frames: run python -m tests.wire.golden"


def test_only_frames_of_the_present_protocol_are_kept():
    assert [*golden.FOLDER.iterdir()] == [golden.file_of(PROTOCOL)]


CHANGES = {
    "a further item, even with a default": [("table", str), ("more", int, 0)],
    "an item less": [],
    "another type": [("table", int)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_message_is_refused_until_the_number_grows(change, tmp_path):
    seal = msgspec.defstruct("Seal", CHANGES[change], tag="Seal", array_like=True)
    values = {"table": "t", "more": 0} if change != "another type" else {"table": 7}
    request = seal(**{name: values[name] for name in seal.__struct_fields__})
    old = golden.recorded()
    (name,) = [name for name in old["frames"] if name.endswith(" Seal")]
    call = m.CallFrame(5, int(name.split()[1]), int(name.split()[1]) - 1, request)
    new = old | {"frames": old["frames"] | {name: msgspec.msgpack.encode(call).hex()}}
    golden.record(old, 1, tmp_path)
    with pytest.raises(SystemExit, match=f"frames of protocol 1 changed .{name}.: .* Raise PROTOCOL"):
        golden.record(new, 1, tmp_path)
    assert json.loads(golden.file_of(1, tmp_path).read_text()) == old
    golden.record(new, 2, tmp_path)
    assert [*tmp_path.iterdir()] == [golden.file_of(2, tmp_path)]


def test_a_removed_message_is_refused_and_a_new_one_is_not(tmp_path):
    old = golden.recorded()
    golden.record(old, 1, tmp_path)
    golden.record(old | {"frames": old["frames"] | {"call 999 New": "95"}}, 1, tmp_path)
    with pytest.raises(SystemExit, match=r"changed .call 999 New."):
        golden.record(old, 1, tmp_path)


@pytest.mark.parametrize("name", FRAMES)
def test_every_recorded_message_is_read(name):
    frame = bytes.fromhex(golden.recorded()["frames"][name])
    kind, number, *_ = name.split()
    match kind:
        case "call":
            assert codec.decode_call(frame).request == examples.REQUESTS[int(number) - 1], golden.REMEDY
        case "answer":
            assert codec.decode_answer(frame).reply == examples.REPLIES[int(number) - 1], golden.REMEDY
        case "selector":
            assert msgspec.msgpack.decode(frame, type=Selector) in examples.SELECTORS, golden.REMEDY
        case _:
            assert either(frame) == examples.HEADS[int(number) - 1], golden.REMEDY


def either(head):
    """A head of the bulk protocol, for whichever end it is."""
    try:
        return b.to_shard(head)
    except ProtocolError:
        return b.to_client(head)


def test_a_recorded_client_is_answered_as_it_was():
    bench, said, was = Bench(tickets=TicketIssuer(bytes(32))), [], []
    for name, frame in golden.recorded()["session"].items():
        if name.endswith("call"):
            said += [codec.decode_answer(answer) for answer in session.answers(bench, bytes.fromhex(frame))]
        else:
            was.append(codec.decode_answer(bytes.fromhex(frame)))
    bench.close()
    assert [*map(golden.outline, said)] == [*map(golden.outline, was)], golden.REMEDY


def test_the_file_is_of_this_protocol_and_small():
    assert len(json.dumps(golden.recorded())) < 100_000
