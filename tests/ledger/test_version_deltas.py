"""Differences in versions of weights: chains that lead nowhere are refused, and those that no version needs can go."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import SchemaError, ShardLost, UsageError
from transferqueue.ledger.persistence.snapshot_checks import check
from transferqueue.ledger.reports.statistics import channel_stats
from transferqueue.limits import COUNT_MAX
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.answers.stats import ChannelStats

W = Field("w", "float32", (4, 16))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    return world.client()


def whole(client: Driver, content: int) -> m.WrittenBlock:
    return msgspec.structs.replace(client.block([W], 1), checksum=content)


def delta(
    client: Driver,
    version: int,
    before: int,
    after: int,
    of: str = "w",
    dtype: str = "uint8",
    ends: tuple[int, ...] = (64,),
) -> Any:
    new = Field(f"w/delta-{version}", dtype, (64,))
    return new, client.block([new], 1), m.TensorDelta(new.name, of, version, before, after, list(ends))


def publish(client: Driver, version: int, blocks: list[m.WrittenBlock], deltas: list[Any], **terms: Any) -> None:
    fields = ([W] if any(block.fields == ["w"] for block in blocks) else []) + [new for new, _, _ in deltas]
    placed = [*blocks, *(block for _, block, _ in deltas)]
    client.apply(m.Publish("policy", version, fields, placed, ranges=[one for *_, one in deltas], **terms))


def figures(world: World) -> ChannelStats:
    return channel_stats(world.ledger.state.channels["policy"], world.now)


def places(client: Driver) -> dict[str, int]:
    reply = client.apply(m.GetLatestVersion("policy"))
    return {block.fields[0]: block.block for block in reply.blocks}


BAD: dict[str, tuple[list[tuple[int, int, int]], dict[str, Any], str]] = {
    "no whole field": ([(2, 10, 20)], {"of": "v"}, 'differences of field "v"; that is in the version, whole'),
    "of itself": ([(2, 10, 20)], {"of": "w/delta-2"}, "whole, and differences are uint8"),
    "not of bytes": ([(2, 10, 20)], {"dtype": "int32"}, "differences are uint8"),
    "sections that overlap": ([(2, 10, 20)], {"ends": (40, 40, 64)}, "end at 40, 40, 64, and it has 64 bytes"),
    "sections beyond it": ([(2, 10, 20)], {"ends": (65,)}, "end at 65, and it has 64 bytes"),
    "gap": ([(2, 10, 20), (3, 21, 30)], {}, r"after versions 2, 3 do not follow each other; publish it whole"),
    "other content": ([(2, 11, 20), (3, 20, 30)], {}, "are of other contents than its bytes in this part"),
}


@pytest.mark.parametrize("name", BAD)
def test_differences_that_lead_nowhere_are_refused_and_change_nothing(name: str, world: World, client: Driver) -> None:
    publish(client, 1, [whole(client, 10)], [])
    chain, terms, why = BAD[name]
    deltas = [delta(client, *one, **terms) for one in chain]
    with pytest.raises(SchemaError, match=why):
        publish(client, 3, [whole(client, 10)], deltas)
    channel = world.ledger.state.channels["policy"]
    assert (channel.latest, list(channel.versions)) == (1, [1])


def test_a_version_keeps_the_whole_field_of_its_base_and_adds_a_difference(world: World, client: Driver) -> None:
    publish(client, 1, [whole(client, 10)], [])
    publish(client, 2, [], [delta(client, 2, 10, 20)], base=1, kept=list(places(client).values()))
    publish(client, 3, [], [delta(client, 3, 20, 30)], base=2, kept=list(places(client).values()))
    reply = client.apply(m.Pull("policy"))
    assert sorted(block.fields[0] for block in reply.blocks) == ["w", "w/delta-2", "w/delta-3"]
    assert sorted((one.before, one.after) for one in reply.ranges) == [(10, 20), (20, 30)]
    check(world.ledger.take_snapshot(world.now))
    assert figures(world).deltas == 2


def test_differences_before_the_whole_field_are_dropped_and_a_publication_that_kept_them_goes_on(
    world: World, client: Driver
) -> None:
    publish(client, 1, [whole(client, 10)], [])
    publish(client, 2, [], [delta(client, 2, 10, 20)], base=1, kept=list(places(client).values()))
    assert client.apply(m.DropDeltas("policy")).rows == 0, "the version needs it"
    earlier = places(client)["w/delta-2"]
    publish(client, 3, [whole(client, 30)], [delta(client, 3, 20, 30)], base=2, kept=[earlier])
    kept = list(places(client).values())
    assert client.apply(m.DropDeltas("policy")).rows == 2
    assert list(places(client)) == ["w"]
    publish(client, 4, [], [delta(client, 4, 30, 40)], base=3, kept=kept)
    assert sorted(places(client)) == ["w", "w/delta-4"]
    with pytest.raises(UsageError, match="name blocks of it"):
        publish(client, 5, [whole(client, 50)], [], base=4, kept=[earlier])
    assert client.apply(m.DropDeltas("nowhere")).rows == 0


def test_a_reader_that_found_a_wrong_result_is_counted_for_the_publisher(world: World, client: Driver) -> None:
    publish(client, 1, [whole(client, 10)], [])
    client.apply(m.Pull("policy", refused=2))
    assert client.apply(m.GetLatestVersion("policy")).refused == 2
    assert figures(world).deltas_refused == 2
    client.apply(m.Pull("policy", refused=COUNT_MAX))  # the sum is what a reply can carry
    assert client.apply(m.GetLatestVersion("policy")).refused == COUNT_MAX


def test_a_version_whose_whole_field_or_difference_is_lost_is_named_and_the_next_is_whole(
    world: World, client: Driver
) -> None:
    for version, gone in ((1, "w"), (3, f"w/delta-{4}")):
        publish(client, version, [whole(client, 10)], [])
        publish(client, version + 1, [], [delta(client, version + 1, 10, 20)], base=version, kept=[places(client)["w"]])
        world.ledger.blocks_lost([places(client)[gone]], world.now)
        with pytest.raises(ShardLost, match=f"version {version + 1} .* is gone .*; pull the newest, or wait"):
            client.apply(m.Pull("policy", version=version + 1))
        latest = client.apply(m.GetLatestVersion("policy"))
        assert (latest.version, latest.blocks, bool(latest.lost)) == (version + 1, [], True), "so nothing is kept of it"
    publish(client, 5, [whole(client, 30)], [])
    assert client.apply(m.Pull("policy")).version == 5
