"""Versions that several sessions publish together: whole or not at all, and every wait for a part ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import (
    AlreadyExists,
    DeadlineExceeded,
    NotFound,
    SchemaError,
    TransferQueueError,
    UsageError,
    VersionGivenUp,
)
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.ledger import Ledger
from transferqueue.ledger.persistence.snapshot_checks import check
from transferqueue.schema import Field
from transferqueue.wire import messages as m

WIDTH = 16


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    return world.client()


def a_slice(
    tensor: str, first: int, count: int, rows: int, dtype: str = "float32", width: int = WIDTH
) -> tuple[Any, Any]:
    name = f"{tensor}.{first}"
    return Field(name, dtype, (count, width)), m.TensorSlice(name, tensor, first, rows)


def begin(client: Driver, version: int = 1, parts: int = 2, length_s: float = 60.0) -> int:
    return client.apply(m.BeginVersion("policy", version, parts, length_s)).pending


def part(client: Driver, slices: list[tuple[Any, Any]], version: int = 1, **terms: Any) -> Any:
    fields = [field for field, _ in slices]
    blocks = [client.block([field], 1) for field in fields]
    return client.apply(m.Publish("policy", version, fields, blocks, ranges=[one for _, one in slices], **terms))


def state_of(world: World) -> Any:
    channel = world.ledger.state.channels.get("policy")
    return None if channel is None else (channel.latest, dict(channel.versions), channel.pending, channel.usage.bytes)


# ---------------------------------------------------------------- bad input


BAD: dict[str, tuple[list[tuple[Any, Any]], str]] = {
    "overlap": ([a_slice("w", 3, 3, 8)], 'row 3 of tensor "w" is in two slices'),
    "twice": ([a_slice("w", 0, 4, 8)], "needs fields, each named once"),
    "dtype": (
        [a_slice("w", 4, 4, 8, "bfloat16")],
        r"slices of tensor \"w\" are bfloat16\[4, 16\] of 8 rows, and float32",
    ),
    "width": ([a_slice("w", 4, 4, 8, width=32)], "the same other sizes"),
    "rows": ([a_slice("w", 4, 4, 9)], "of 9 rows, and .* of 8"),
    "past the end": ([a_slice("w", 6, 4, 8)], "end within their tensor"),
    "no row": ([a_slice("w", 4, 0, 8)], "1 row or more"),
    "scalar": ([(Field("w.4", "bfloat16"), m.TensorSlice("w.4", "w", 4, 8))], "1 row or more"),
    "ragged": ([(Field("w.4", "float32", (None,)), m.TensorSlice("w.4", "w", 4, 8))], "no count|1 row or more|take"),
    "whole too": ([(Field("w", "float32", (4, WIDTH)), m.TensorSlice("v", "v", 0, 4))], "each slice is one field"),
    "another field": (
        [(Field("w.4", "float32", (4, WIDTH)), m.TensorSlice("v.4", "w", 4, 8))],
        "each slice is one field",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_part_that_does_not_fit_is_refused_and_changes_nothing(name: str, world: World, client: Driver) -> None:
    pending = begin(client)
    part(world.client(), [a_slice("w", 0, 4, 8)], pending=pending, part=1)
    before = state_of(world)
    slices, why = BAD[name]
    with pytest.raises(TransferQueueError, match=why):
        part(client, slices, pending=pending, wait_s=9)
    assert state_of(world) == before


def test_a_tensor_is_whole_or_in_slices(world: World, client: Driver) -> None:
    pending = begin(client)
    part(world.client(), [a_slice("w", 0, 4, 8)], pending=pending, part=1)
    field = Field("w", "float32", (8, WIDTH))
    with pytest.raises(SchemaError, match='tensor "w" whole and in slices'):
        client.apply(m.Publish("policy", 1, [field], [client.block([field], 1)], pending=pending))


@pytest.mark.parametrize(
    ("terms", "error", "why"),
    [
        ({"pending": 0, "part": 1}, UsageError, "part 1 of version 1 .* names no pending version; begin one"),
        ({"pending": 9, "part": 1}, NotFound, 'number 9 is of no version of channel "policy" that was begun'),
        ({"part": 2}, UsageError, "part 2 of version 1 .*, which has parts 0 to 1"),
        ({"part": 1, "version": 2}, UsageError, "was begun as number 1; version 2 is not it"),
        ({"part": 0}, UsageError, "was begun by another session, which publishes part 0"),
    ],
)
def test_a_part_of_another_version_is_refused(
    terms: dict[str, Any], error: type[Exception], why: str, world: World, client: Driver
) -> None:
    pending = begin(client)
    before = state_of(world)
    with pytest.raises(error, match=why):
        part(world.client(), [a_slice("w", 0, 8, 8)], **{"pending": pending, **terms})
    assert state_of(world) == before


def test_a_part_comes_once(world: World, client: Driver) -> None:
    pending, other = begin(client), world.client()
    part(other, [a_slice("w", 0, 4, 8)], pending=pending, part=1)
    with pytest.raises(AlreadyExists, match=r"part 1 of version 1 .* has come"):
        part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)


def test_a_version_that_is_not_next_is_not_begun(client: Driver) -> None:
    part(client, [a_slice("w", 0, 8, 8)], version=3)
    for version, error in ((3, AlreadyExists), (2, UsageError), ((1 << 53) + 1, UsageError)):
        with pytest.raises(error):
            begin(client, version)


def test_rows_that_no_part_has_are_named(world: World, client: Driver) -> None:
    pending = begin(client)
    part(world.client(), [a_slice("w", 5, 3, 8)], pending=pending, part=1)
    with pytest.raises(SchemaError, match='lacks row 4 of tensor "w", which has 8; its slices begin at 0, 5'):
        part(client, [a_slice("w", 0, 4, 8)], pending=pending)
    with pytest.raises(SchemaError, match='lacks row 4 of tensor "v"'):
        part(client, [a_slice("v", 0, 4, 8)], version=2)


# ---------------------------------------------------------------- whole, or not at all


def test_a_version_is_visible_when_all_parts_have_come(world: World, client: Driver) -> None:
    reader, others = world.client(), [world.client(), world.client()]
    pending = begin(client, parts=3)
    assert isinstance(part(client, [a_slice("w", 0, 4, 10)], pending=pending, wait_s=9), Blocked)
    with pytest.raises(DeadlineExceeded, match=r"version 1 .* lacks parts 1, 2 of 3"):
        part(client, [a_slice("w", 0, 4, 10)], pending=pending)
    for number, other in enumerate(others, 1):
        assert isinstance(reader.apply(m.Pull("policy", wait_s=9)), Blocked)
        part(other, [a_slice("w", 4 * number, 4 if number == 1 else 2, 10)], pending=pending, part=number)
        assert ("parts", "policy") in world.woken
    part(client, [a_slice("w", 0, 4, 10)], pending=pending)
    reply = reader.apply(m.Pull("policy"))
    assert [(one.tensor, one.first, one.rows) for one in reply.ranges] == [("w", first, 10) for first in (0, 4, 8)]
    assert len(reply.blocks) == 3
    assert world.ledger.state.channels["policy"].pending is None


def test_the_bytes_of_parts_end_with_their_version(world: World, client: Driver) -> None:
    for version in (1, 2, 3):
        pending = begin(client, version)
        part(world.client(), [a_slice("w", 4, 4, 8)], version, pending=pending, part=1)
        part(client, [a_slice("w", 0, 4, 8)], version, pending=pending, keep=1)
        assert world.ledger.state.channels["policy"].usage.bytes == 8 * WIDTH * 4


def test_slices_of_the_version_before_are_kept(world: World, client: Driver) -> None:
    pending, other = begin(client), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    part(client, [a_slice("w", 0, 4, 8)], pending=pending, keep=1)
    held = {block.fields[0]: block.block for block in other.apply(m.GetLatestVersion("policy")).blocks}
    pending = begin(client, 2)
    kept = m.Publish("policy", 2, [], [], base=1, kept=[held["w.4"]], pending=pending, part=1)
    other.apply(kept)
    part(client, [a_slice("w", 0, 4, 8)], 2, pending=pending, keep=1)
    reply = world.client().apply(m.Pull("policy"))
    assert held["w.4"] in [block.block for block in reply.blocks]
    assert sorted(one.first for one in reply.ranges) == [0, 4]


# ---------------------------------------------------------------- given up


def given_up(world: World, client: Driver, pending: int, why: str) -> None:
    world.collect()
    assert ("parts", "policy") in world.woken
    channel = world.ledger.state.channels["policy"]
    assert (channel.pending, channel.usage.bytes, channel.latest) == (None, 0, -1)
    with pytest.raises(VersionGivenUp, match=why):
        part(client, [a_slice("w", 0, 4, 8)], pending=pending, part=2)


def test_a_rank_that_never_comes_ends_the_version(world: World, client: Driver) -> None:
    pending, other = begin(client, parts=3, length_s=5.0), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    assert world.ledger.next_deadline() == world.now + 5.0
    world.pass_time(5.0)
    given_up(world, other, pending, r"version 1 .* was given up without parts 2 of 3: 5 s have passed; begin it again")


def test_the_death_of_the_session_that_began_it_ends_the_version(world: World, client: Driver) -> None:
    pending, other = begin(client), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    world.ledger.close_session(client.session, world.now)
    given_up(world, other, pending, "which began it, is gone")


def test_another_begin_ends_the_version_before(world: World, client: Driver) -> None:
    pending, other = begin(client, parts=3), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    begin(other)
    given_up_number = pending
    with pytest.raises(VersionGivenUp, match="version 1 was begun instead"):
        part(other, [a_slice("w", 0, 4, 8)], pending=given_up_number, part=2)


def test_its_session_gives_it_up(world: World, client: Driver) -> None:
    pending, other = begin(client, parts=3), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    assert other.apply(m.GiveUpVersion("policy", pending)).rows == 0
    assert client.apply(m.GiveUpVersion("policy", pending)).rows == 1
    assert client.apply(m.GiveUpVersion("policy", pending)).rows == 0
    given_up(world, other, pending, "gave it up")


def test_lost_bytes_of_a_part_end_the_version(world: World, client: Driver) -> None:
    pending, other = begin(client, parts=3), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    world.ledger.blocks_lost([world.ledger.blocks_committed], world.now)
    given_up(world, other, pending, "damaged bytes")


def test_doctor_names_the_parts_that_a_version_lacks(world: World, client: Driver) -> None:
    part(world.client(), [a_slice("w", 4, 4, 8)], pending=begin(client, parts=4), part=2)
    lines = world.ledger.observe(m.Observe("doctor"), world.now).channels["policy"]
    assert any("version 1 of channel" in line and "lacks parts 1, 3 of 4" in line for line in lines)


# ---------------------------------------------------------------- state


def test_an_image_goes_on_with_a_pending_version(world: World, client: Driver) -> None:
    pending, other = begin(client), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    again = Ledger.from_image(world.ledger.image())
    assert again.image() == world.ledger.image()
    assert again.state.channels["policy"].pending is not None


def test_a_snapshot_has_slices_and_no_pending_version(world: World, client: Driver) -> None:
    pending, other = begin(client), world.client()
    part(other, [a_slice("w", 4, 4, 8)], pending=pending, part=1)
    part(client, [a_slice("w", 0, 4, 8)], pending=pending)
    part(other, [a_slice("w", 4, 4, 8)], 2, pending=begin(client, 2), part=1)
    snapshot = world.ledger.take_snapshot(world.now)
    check(snapshot)
    (version,) = snapshot.channels[0].versions
    assert [one.first for one in version.slices] == [0, 4]
