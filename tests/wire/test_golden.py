"""The frames of this protocol are the ones that were recorded: whoever changes one raises the number of the
protocol."""

import json
import typing

import pytest
from msgspec import inspect

from tests.server.nodes import Bench
from tests.wire import examples, golden, session
from transferqueue.errors import ProtocolError
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import codec
from transferqueue.wire import messages as m

FRAMES = examples.frames()


def test_there_is_an_example_of_every_message_and_of_every_part_of_one():
    made = examples.structs([*examples.REQUESTS, *examples.REPLIES, *examples.HEADS, examples.FIELDS])
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
    recorded = golden.recorded()["frames"]
    assert {name: frame.hex() for name, frame in FRAMES.items()} == recorded, golden.REMEDY


@pytest.mark.parametrize("name", FRAMES)
def test_every_recorded_message_is_read(name):
    frame = bytes.fromhex(golden.recorded()["frames"][name])
    number = int(name.split()[1]) - 1
    match name.split()[0]:
        case "call":
            assert codec.decode_call(frame).request == examples.REQUESTS[number], golden.REMEDY
        case "answer":
            assert codec.decode_answer(frame).reply == examples.REPLIES[number], golden.REMEDY
        case _:
            assert either(frame) == examples.HEADS[number], golden.REMEDY


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
    assert [outline(answer) for answer in said] == [outline(answer) for answer in was], golden.REMEDY


def outline(answer):
    """An answer without the words of an error, which may become better."""
    failed = isinstance(answer.reply, m.Failed)
    return answer.epoch, answer.id, answer.reply.error if failed else answer.reply


def test_the_file_is_of_this_protocol_and_small():
    assert len(json.dumps(golden.recorded())) < 100_000
