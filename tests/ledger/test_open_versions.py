"""Versions whose parts nobody counts, and readers that get parts before the whole: each part once, none of a version
that is given up for whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import DeadlineExceeded, NotFound, SchemaError, UsageError, VersionGivenUp
from transferqueue.ledger.effects import Blocked
from transferqueue.ledger.ledger import Ledger
from transferqueue.limits import VERSION_PARTS_MAX
from transferqueue.schema import Field
from transferqueue.wire import messages as m

BYTES = 64


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def relay(world: World) -> Driver:
    return world.client("relay")


@pytest.fixture
def reader(world: World) -> Driver:
    return world.client("reader")


def begin(relay: Driver, version: int = 1, length_s: float = 60.0) -> int:
    return relay.apply(m.BeginVersion("policy", version, 0, length_s)).pending


def publish(relay: Driver, pending: int, part: int, *names: str, version: int = 1, **terms: Any) -> Any:
    fields = [Field(name, "int64", (BYTES // 8,)) for name in names]
    blocks = [relay.block([field], 1) for field in fields]
    return relay.apply(m.Publish("policy", version, fields, blocks, pending=pending, part=part, **terms))


def ask(reader: Driver, pending: int = 0, have: int = 0, **terms: Any) -> Any:
    return reader.apply(m.Pull("policy", parts=True, pending=pending, have=have, **terms))


def names(reply: m.WeightsReply) -> list[str]:
    return [field.name for field in reply.fields]


def numbers(reply: m.WeightsReply) -> list[int]:
    return [block.block for block in reply.blocks]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("part", [0, 1])
def test_all_parts_come_from_the_session_that_began_it(part: int, world: World, relay: Driver) -> None:
    pending = begin(relay)
    with pytest.raises(UsageError, match="was begun by another session, which publishes all its parts"):
        publish(world.client(), pending, part, "w")
    assert world.ledger.state.channels["policy"].pending.kept == {}


def test_the_number_of_parts_is_bounded(relay: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, VERSION_PARTS_MAX - 1, "v")
    with pytest.raises(UsageError, match=f"which has parts 0 to {VERSION_PARTS_MAX - 1}"):
        publish(relay, pending, VERSION_PARTS_MAX, "w")


def test_a_tensor_comes_once(relay: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, 1, "w")
    with pytest.raises(SchemaError, match="w came twice"):
        publish(relay, pending, 2, "w")


# ---------------------------------------------------------------- parts before the whole


def test_each_part_is_given_once_in_the_order_in_which_it_came_and_then_the_whole(
    world: World, relay: Driver, reader: Driver
) -> None:
    pending = begin(relay)
    waiting = ask(reader, wait_s=9)
    assert waiting == Blocked((("channel", "policy"), ("parts", "policy")))
    publish(relay, pending, 1, "a", "b")
    assert ("parts", "policy") in world.woken
    first = ask(reader, wait_s=9)
    assert (first.version, first.pending, first.have, names(first)) == (1, pending, 1, ["a", "b"])
    assert isinstance(ask(reader, pending, 1, wait_s=9), Blocked)
    publish(relay, pending, 2, "c")
    publish(relay, pending, 3, "d")
    second = ask(reader, pending, 1, wait_s=9)
    assert (second.have, names(second)) == (3, ["c", "d"])
    with pytest.raises(
        DeadlineExceeded, match=r"nothing was published yet; version 1 .* is on its way: parts that have come: 3"
    ):
        reader.apply(m.Pull("policy"))
    publish(relay, pending, 0, "e")
    whole = ask(reader, pending, 3, wait_s=9)
    assert (whole.pending, whole.have, names(whole)) == (0, 0, list("abcde"))
    assert set(numbers(first) + numbers(second)) < set(numbers(whole))


def test_the_last_part_may_be_empty(relay: Driver, reader: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, 1, "a")
    publish(relay, pending, 0)
    assert names(reader.apply(m.Pull("policy"))) == ["a"]


def test_only_a_version_that_is_waited_for_is_given_in_parts(relay: Driver, reader: Driver) -> None:
    pending = begin(relay, 5)
    publish(relay, pending, 1, "a", version=5)
    for terms in ({"above": 5}, {"version": 6}, {"version": 4}):
        assert isinstance(ask(reader, wait_s=9, **terms), Blocked)
    assert isinstance(reader.apply(m.Pull("policy", wait_s=9)), Blocked), "it takes no parts"
    assert ask(reader, version=5).pending == ask(reader, above=4).pending == pending


def test_blocks_that_the_newest_version_has_are_given_with_their_part(relay: Driver, reader: Driver) -> None:
    relay.apply(m.Publish("policy", 0, [Field("a", "int64")], [relay.block([Field("a", "int64")], 1)]))
    held = numbers(reader.apply(m.Pull("policy")))
    pending = begin(relay)
    relay.apply(m.Publish("policy", 1, [], [], base=0, kept=held, pending=pending, part=1))
    assert numbers(ask(reader, above=0)) == held


# ---------------------------------------------------------------- given up


def test_a_reader_with_parts_of_a_version_that_is_given_up_hears_why(
    world: World, relay: Driver, reader: Driver
) -> None:
    pending = begin(relay)
    publish(relay, pending, 1, "a")
    have = ask(reader)
    world.ledger.close_session(relay.session, world.now)
    world.collect()
    assert ("parts", "policy") in world.woken
    with pytest.raises(VersionGivenUp, match="relay, which began it, is gone"):
        ask(reader, pending, have.have, wait_s=9)
    assert isinstance(ask(reader, wait_s=9), Blocked)
    assert world.taken, "the reader has it pinned"
    reader.unpin(numbers(have))
    assert not world.taken


def test_a_newer_version_takes_the_place_of_one_that_is_on_its_way(relay: Driver, reader: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, 1, "a")
    ask(reader)
    newer = begin(relay, 2)
    publish(relay, newer, 1, "b", version=2)
    with pytest.raises(VersionGivenUp, match="version 2 was begun instead"):
        ask(reader, pending, 1, wait_s=9)
    assert names(ask(reader, wait_s=9)) == ["b"]


def test_a_number_of_another_life_of_the_server_begins_anew(relay: Driver, reader: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, 1, "a")
    assert names(ask(reader, pending + 7, 3)) == ["a"]


def test_each_part_starts_the_length_anew(world: World, relay: Driver, reader: Driver) -> None:
    pending = begin(relay, length_s=5.0)
    for part in (1, 2, 3):
        world.pass_time(4.0)
        publish(relay, pending, part, f"w{part}")
    world.pass_time(5.0)
    with pytest.raises(VersionGivenUp, match="5 s have passed"):
        ask(reader, pending, 3)


def test_lost_bytes_of_a_part_end_it(world: World, relay: Driver, reader: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, 1, "a")
    world.ledger.blocks_lost([world.ledger.blocks_committed], world.now)
    with pytest.raises(VersionGivenUp, match="damaged bytes"):
        ask(reader, pending, 0)


def test_a_number_that_is_not_known_is_no_part(relay: Driver) -> None:
    with pytest.raises(NotFound, match="number 9 is of no version"):
        publish(relay, 9, 1, "a")


# ---------------------------------------------------------------- state


def test_an_image_goes_on_with_an_open_version(world: World, relay: Driver, reader: Driver) -> None:
    pending = begin(relay)
    publish(relay, pending, 2, "a")
    publish(relay, pending, 1, "b")
    again = Ledger.from_image(world.ledger.image())
    assert again.image() == world.ledger.image()
    kept = again.state.channels["policy"].pending
    assert [field.name for field in kept.after(1).fields] == ["b"], "in the order in which they came"


def test_doctor_says_that_it_is_on_its_way(world: World, relay: Driver) -> None:
    publish(relay, begin(relay), 1, "a")
    lines = world.ledger.observe(m.Observe("doctor"), world.now).channels["policy"]
    assert any("parts that have come: 1" in line for line in lines)
