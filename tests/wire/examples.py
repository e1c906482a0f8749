"""One message of each kind, with every field set, and every kind of part, policy and order in some message: what the
golden frames are of."""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from transferqueue import policies as p
from transferqueue.limits import Limits
from transferqueue.schema import Field
from transferqueue.transport.bulk import protocol as b
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.home_coordinator import CoordinatorIndex

TWO: Final = bytes.fromhex("01000000000000000200000000000000")
"""Two int64."""
FIELDS: Final = [Field("x", "int64", (None,)), Field("y", "float32"), Field("z", "int32", (3, 4))]
PLACED: Final = m.WrittenBlock(
    3, 4096, 128, 2, ["x", "z"], [5, 0], bytes(8), 2**64 - 1, [m.WrittenCopy(4, 8192)], bytes(16)
)
FACTS: Final = m.RowFacts(
    TWO, bytes(8), TWO, TWO, TWO, TWO, TWO, ["k", "l"], [{"a": "b", "c": 1}, {"d": 0.5, "e": True}]
)
COLUMNS: Final = m.Columns(FIELDS, [PLACED], [m.Inline("y", bytes(8))], FACTS)
SLICE: Final = m.TensorSlice("x", "y", 4, 8)
DELTA: Final = m.TensorDelta("z", "x", 7, 2**64 - 1, 5, [900, 2**40])
BLOCK: Final = m.BlockLocation(
    9, 0, 3, 4096, 128, 2, ["x", "z"], [5, 0], 2**64 - 1, bytes(16), [m.CopyLocation(1, 4, 8192)]
)
CONTENT: Final = m.ReplyRows(
    TWO, TWO, TWO, TWO, bytes(8), TWO, TWO, TWO, ["k", "l"], [{"a": 1}, {}], [m.Inline("y", bytes(8))],
    [m.ReplyColumns(["x", "z"], [BLOCK], bytes(8), bytes(8))], codec.encode_fields(FIELDS),
)  # fmt: skip
TREE: Final = m.ReplyTree(["x"], [BLOCK], bytes(8), bytes(8), bytes(8), bytes(8))
TASKS: Final = [
    p.Task("train", ["x"], ["r"], p.TokenBalanced(inner=p.Priority(), equal_counts=False),
    p.Complete(min_size=2, deadline_s=9.5), 30.0, p.Retry(first_s=0.5, attempts=3), "now", 45.0),
    p.Task("oldest", ["x"], selector=p.OldestVersionFirst(), groups=p.Complete(incomplete=p.Refill())),
    p.Task("fresh", selector=p.Freshest(), groups=p.Complete(min_size=1, incomplete=p.DeliverPartial())),
    p.Task("long", selector=p.LongestFirst()),
    p.Task("in_order", selector=p.PutOrder()),
    p.Task("mine", selector=p.Plugin("mine", {"a": "b", "c": 1, "d": 0.5, "e": True})),
]  # fmt: skip
WHERE: Final = [p.TagIs("a", "b"), p.VersionBetween(1, 2), p.Compare("y", "<=", 0.5)]
PACING: Final = p.Pacing("train", 64, 0.25, 2, p.Requeue("oldest"), "weights")
OFFER: Final = m.ShardOffer("/dev/shm/a", 1 << 30, "tcp://h:1", "9f" * 32, bytes(range(32)), 2)

REQUESTS: Final[list[m.Request]] = [
    m.Hello(bytes(range(16)), 4711, "host", "/run/sessions/a", "0.1.0", "worker", True, OFFER),
    m.Heartbeat(),
    m.Goodbye(),
    m.Unpin(TWO, TWO),
    m.CreateTable("t", FIELDS, TASKS, Limits(rows=64, bytes="8MiB"), PACING, p.Manual(), True, 2),
    m.CreateTable("u", pacing=p.Pacing("train", 4, on_stale=p.HoldClock()), retention=p.Acked()),
    m.CreateTable("v", pacing=p.Pacing("train", 4, on_stale=p.KeepStale())),
    m.OpenTable("t", 1.5),
    m.CreateTable("w", tasks=[p.Task("first")], pacing=p.Pacing("first", 4)),
    m.AddTask("t", TASKS[3]),
    m.AddFields("t", FIELDS),
    m.DropTable("t", True),
    m.ListTables(),
    m.Seal("t"),
    m.AdvanceClock("t", 7, 1.5),
    m.Grant(4096, 1.5, [1, 2], "weights"),
    m.ReturnGrant(3),
    m.PutRequest("t", 2, COLUMNS, 5, 1.5),
    m.Update("t", TWO, COLUMNS, True),
    m.LeaseRequest("t", "train", 1, 2, 3, 1, 1.5, 30.0, WHERE, ["x"], 1, 2, 1, 2, TWO, True),
    m.Ack("t", 4, 9, TWO, COLUMNS, "old", 3),
    m.CommitCheckpoint("t", 3, "train"),
    m.Rollback("t", 2, "train", 1),
    m.Cursor("t", 5),
    m.ReleaseRequest("t", 4, 9, TWO, True, "why", COLUMNS),
    m.Renew("t", 4, 9, 30.0),
    m.Reserve("t", 4, 2, 1.5),
    m.Unreserve("t", 5, 2),
    m.Drop("t", TWO, "old"),
    m.ListDropped("t", 7),
    m.RetryRows("t", TWO),
    m.Delete("t", TWO),
    m.Find("t", ["k", "l"]),
    m.ReadRequest("t", TWO, ["x"], WHERE, 9),
    m.Publish("weights", 7, FIELDS, [PLACED], 3, 1.5, 6, [9], [SLICE, DELTA], 2, 1),
    m.BeginVersion("weights", 7, 2, 60.0),
    m.GiveUpVersion("weights", 2),
    m.GetLatestVersion("weights"),
    m.DropDeltas("weights"),
    m.Pull("weights", 6, 7, 1.5, True, 3, 2, 1),
    m.ReportApplied("weights", 7),
    m.AcquireUpdateSlot("weights", 2, 9.5, 1.5),
    m.ReleaseUpdateSlot("weights"),
    m.SnapshotRequest("kept", 3),
    m.Restore("kept"),
    m.WatchJob(1, 4096, 1.5),
    m.Observe("row", "t", 3),
    m.ListShards(),
    m.Drain(1),
    m.PollCommands(7, 4, [3], 1.5, (1 << 33, 5), (7, 1 << 33)),
    m.CreateTable("x", FIELDS, extra_fields=True),
    m.AckLeases("t", TWO, TWO, 3),
    m.FreeColumns("t", TWO, ["x"], True),
    m.CreateTable("y", retention=p.AckedColumns()),
    m.CreateTable("z", retention=p.ManualColumns()),
    m.Update(
        "t", TWO, COLUMNS, True, m.RowsRead([m.Inline("r", bytes(16))], [m.BlocksRead(["x"], bytes(8))], [{"a": 1}, {}])
    ),
    m.TakeCopies(7, [9, 10], 1.5),
    m.ListEvents("t", 3, 64),
    m.ExplainWait(7),
    m.CreateTable("r", retention=p.Recorded("run", bytes="1GiB", age_s=60.0, required=False)),
    m.ContinueRequest("t", 2, COLUMNS, 5, 1.5, TWO, ["x"]),
]
REPLIES: Final[list[m.Reply]] = [
    m.Welcome(5, 7, "0.1.0", "/run", {0: "/dev/shm/a"}, 1 << 30, 7071, True, "9f" * 32, CoordinatorIndex(1, 2, "d")),
    m.TableTerms("t", FIELDS, TASKS, Limits(rows=64, bytes="8MiB"), PACING, p.Acked(), True, 7, 2),
    m.Tables(["t", "u"]),
    m.Granted(3, 0, 4096, 4096, bytes(16)),
    m.PutRows(10, 2),
    m.Leased(4, 9, 30.0, 7, CONTENT),
    m.Renewed(30.0),
    m.Reserved(5, 4, 7, [(1, 2)]),
    m.DroppedRows([m.DroppedRow(3, "key", "reward", "attempts", "KeyError: 'answer'", "reward-0", 1.5)]),
    m.Found(TWO),
    m.ReadRows(CONTENT),
    m.WeightsReply(7, FIELDS, [BLOCK], [SLICE, DELTA], 3, 2),
    m.VersionBegun(2),
    m.LatestVersion(7, FIELDS, [BLOCK], {3: 4096}, "a shard", [SLICE, DELTA], 2),
    codec.encode_observed({"a": [1, 2.5, None, {"b": "c"}]}),
    m.WaitExplained("x"),
    m.CursorValue(8),
    m.JobProgress(1, "/s/kept", 4096, 8192, True),
    m.ShardList([m.ShardEndpoint(1, "/dev/shm/b", 1 << 20, "tcp://h:1", "9f" * 32)]),
    m.ShardCommands(7, 4,
    [m.AllocatePages(0, 4096), m.FreePages(4096, 4096), m.Revoke(3), m.CloseTransfers(5), m.LiveSet(9, TWO, 8, TWO),
    m.ShutDownShard()]),
    m.DoneReply(3),
    m.Failed("Full", "no room"),
    m.Welcome(5, 7, "0.1.0", "/run", {}, 1 << 30, seat=CoordinatorIndex(2, 2, "d"), checksums=True),
    m.TableTerms("x", FIELDS, [], Limits(), None, p.Acked(), False, 0, 1, extra_fields=False),
    m.OrdinalsEnded(TWO),
    m.CopyOrder(1, m.Granted(3, 1, 4096, 4096, bytes(16)), [BLOCK], [4096]),
    m.ReadRows(msgspec.structs.replace(CONTENT, parts=[TREE])),
]  # fmt: skip
SELECTORS: Final = [kind() for kind in get_args(p.RowOrder)]
"""Each is a frame of its own, so that a new one changes no other."""
LOCATED: Final = b.BulkBlock(9, 3, 4096, 128, 2, 0, [5, 0], bytes(16))
HEADS: Final[list[b.ToShard | b.ToClient]] = [
    b.ReadColumns(
        1,
        5,
        0,
        FIELDS,
        [
            b.RowSelection(
                ["x"],
                [["x", "z"]],
                [LOCATED],
                bytes(8),
                bytes(8),
                {"x": b.BulkCut([0, 2, 1], [[4, 8], [1, 4, 0]])},
                [9],
            )
        ],
    ),
    b.WriteExtent(2, 5, 0, 3, 4096, 4096, bytes(16), 4096, 128),
    b.WriteFrame(2, 1),
    b.FlowAck(2, 2, True),
    b.ReadFrame(1, 0, [b.PartHead(0, [5])], True),
    b.TransferFailed(1, "NotFound", "no such block"),
    b.ReadRanges(3, 5, 0, FIELDS, [b.RowSelection(["x"], [["x", "z"]], [LOCATED], b"", bytes(4))], "agent", 1, 2),
    b.RangesFrame(
        3,
        0,
        [b.PartHead(0, [5])],
        True,
        [b.ByteRange(1 << 46, 1 << 16, bytes(8)), b.ByteRange(0, 64)],
        "agent",
        1,
        2,
        b"m",
    ),
    b.WriteRanges(
        4, 5, 0, 3, 4096, 4096, bytes(16), 4096, 128, "agent", 1, 2, b"m", [b.ByteRange(1 << 46, 64, bytes(8))]
    ),
    b.WriteRangesFrame(4, 1, [b.ByteRange((1 << 46) + 64, 64, bytes(8))]),
]


def tag(message: msgspec.Struct) -> object:
    """What a message is called on the wire, whatever its class is called."""
    return message.__struct_config__.tag


def frames() -> dict[str, bytes]:
    """Name of each example, by tag, and its frame."""
    found: dict[str, bytes] = {}
    for number, request in enumerate(REQUESTS, 1):
        found[f"call {number} {tag(request)}"] = codec.encode_call(m.CallFrame(5, number, number - 1, request))
    for number, reply in enumerate(REPLIES, 1):
        found[f"answer {number} {tag(reply)}"] = codec.encode_answer(m.AnswerFrame(7, number, reply))
    for selector in SELECTORS:
        found[f"selector {tag(selector)}"] = msgspec.msgpack.encode(selector)
    for number, head in enumerate(HEADS, 1):
        found[f"head {number} {tag(head)}"] = b.message(head, (b"content",))[0]
    return found


def structs(value: object) -> set[type]:
    """Types of all structs in a value."""
    if isinstance(value, msgspec.Struct):
        parts = [getattr(value, name) for name in value.__struct_fields__]
        return {type(value)}.union(*map(structs, parts))
    if isinstance(value, dict):
        return structs([*value.values()])
    return set().union(*map(structs, value)) if isinstance(value, list | tuple) else set()
