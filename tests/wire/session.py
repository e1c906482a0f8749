"""A session with a node whose every byte is the same each time: what a client of this protocol said, and what it was
answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.server.nodes import Bench
from tests.wire import examples
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.server.shards.tickets import TicketIssuer
from transferqueue.wire import codec
from transferqueue.wire import messages as m

PEER: Final = b"peer"
REWARD: Final = Field("r", "float64")
STEPS: Final[list[m.Request]] = [
    m.Hello(bytes(range(16)), host="elsewhere", version="0.1.0", label="recorded"),
    m.CreateTable("t", [REWARD], [Task("train", ["r"])]),
    m.Grant(4096),
    m.PutRequest(
        "t",
        2,
        m.Columns(
            [REWARD],
            inline=[m.Inline("r", bytes(8) + bytes.fromhex("000000000000f03f"))],
            facts=m.RowFacts(keys=["a", "b"]),
        ),
    ),
    m.PutRequest("t", 1, m.Columns([Field("x", "int32", (16,))], blocks=[m.WrittenBlock(1, 0, 64, 1, ["x"], [0])])),
    m.Find("t", ["b", "c"]),
    m.LeaseRequest("t", "train", rows=2),
    m.Ack("t", 1, 1, step=3),
    m.ReadRequest("t"),
    m.CommitCheckpoint("t", 3),
    m.Reserve("t", 4),
    m.Seal("t"),
    m.LeaseRequest("t", "train", rows=1),
    m.Goodbye(),
]


def play() -> Iterator[tuple[str, bytes]]:
    """Each call and its answer."""
    bench = Bench(tickets=TicketIssuer(bytes(32)))  # random otherwise
    session = 0
    for number, request in enumerate(STEPS, 1):
        call = codec.encode_call(m.CallFrame(session, number, number - 1, request))
        yield f"{examples.tag(request)} call", call
        for answer in answers(bench, call):
            reply = codec.decode_answer(answer).reply
            if isinstance(reply, m.Welcome):
                session = reply.session
            yield f"{examples.tag(reply)} answer", answer
    bench.close()


def answers(bench: Bench, call: bytes) -> list[bytes]:
    """What the node says to a frame."""
    bench.coordinator.receive(PEER, call, bench.now)
    said = [frame for _, frame in bench.coordinator.answers.outbox]
    bench.coordinator.answers.outbox = []
    return said
