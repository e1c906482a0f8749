"""Blocks that lost a copy: which are copied next, what counts as a copy, and what happens around an order."""

from __future__ import annotations

import pytest

from tests.ledger.driver import Driver, World
from transferqueue.errors import UsageError
from transferqueue.ledger import Ledger
from transferqueue.ledger.rows import missing_copies
from transferqueue.ledger.rows.missing_copies import CopyChoice, MissingCopies
from transferqueue.limits import (
    COPY_ORDER_BLOCKS,
    COPY_ORDER_BYTES,
    COPY_ORDER_S,
    COPY_POSTPONED_S,
    COPY_RETRY_S,
    MIB,
    PAGE_BYTES,
    Limits,
)
from transferqueue.policies import Task
from transferqueue.schema import Field
from transferqueue.wire import messages as m

TASKS = [Task("train", ["text"])]
ROOM = {0: MIB, 1: MIB, 2: MIB, 3: MIB}


class Shard:
    """The session of a shard process."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.driver = world, number, world.client(f"shard {number}")

    def order(self, rooms: dict[int, int] | None = None) -> m.CopyOrder | None:
        """Begin an order; None if there is nothing for this shard."""
        choice = self.world.ledger.missing_copies.choose(self.number, ROOM if rooms is None else rooms)
        if choice is None:
            return None
        offset, size = self.world.allocate(choice.nbytes, choice.target)
        self.world.ledger.order_copies(self.driver.session, choice.target, offset, size, choice.blocks, self.world.now)
        order = self.world.ledger.copy_order(self.driver.session, self.number)
        assert order is not None
        self.world.taken[order.target.extent] = offset, size
        self.world.shard_of[order.target.extent] = choice.target
        return order

    def report(self, order: m.CopyOrder, blocks: list[int] | None = None) -> int:
        """Report these blocks of the order; None: all."""
        written = [at.block for at in order.blocks] if blocks is None else blocks
        added = self.world.ledger.finish_copies(self.driver.session, order.target.extent, written, self.world.now)
        self.world.collect()
        return added


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Driver:
    """It writes into shards 1 and 2."""
    client = world.client()
    client.shard, client.copies = 1, [2]
    client.create(tasks=TASKS, replicas=2)
    return client


@pytest.fixture
def third(world: World) -> Shard:
    return Shard(world, 3)


def only(world: World) -> m.BlockLocation:
    (block,) = world.ledger.state.core.blocks.blocks.values()
    return block.at


def missing(world: World) -> MissingCopies:
    return world.ledger.state.core.blocks.missing


def one_copy(world: World) -> int:
    return world.stats().rows_one_copy


def given(order: m.CopyOrder | None) -> m.CopyOrder:
    assert order is not None
    return order


# ---------------------------------------------------------------- a loss and its repair


def test_a_copy_counts_when_it_is_reported_and_outlives_the_next_loss(
    world: World, client: Driver, third: Shard
) -> None:
    client.put(2, ["text"])
    assert not world.ledger.missing_copies
    world.lose_shard(1)
    assert ("copies",) in world.woken
    assert one_copy(world) == 2
    order = given(third.order())
    assert [(at.shard, at.nbytes) for at in order.blocks] == [(2, only(world).nbytes)]
    assert (order.shard, order.target.shard, order.offsets) == (3, 3, [order.target.offset])
    assert one_copy(world) == 2, "a copy that is not reported is none"
    assert only(world).copies == []
    assert third.report(order) == 1
    assert (one_copy(world), bool(world.ledger.missing_copies)) == (0, False)
    assert only(world).copies == [m.CopyLocation(3, order.target.extent, order.offsets[0])]
    assert world.lose_shard(2) == {}
    assert (only(world).shard, one_copy(world)) == (3, 2)
    lease = client.lease("train", 2)
    client.ack(lease)
    client.unpin(lease.blocks())
    assert world.freed == [order.target.extent]
    assert not world.ledger.missing_copies


def test_without_replicas_nothing_lacks_a_copy(world: World) -> None:
    client = world.client()
    client.create(tasks=TASKS)
    client.put(1, ["text"])
    world.lose_shard(5)
    assert not world.ledger.missing_copies


@pytest.mark.parametrize("end", ["ack", "drop", "drop_table"])
def test_a_row_that_ends_while_it_is_copied_leaves_nothing(
    world: World, client: Driver, third: Shard, end: str
) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    if end == "ack":
        lease = client.lease("train", 1)
        client.ack(lease)
        client.unpin(lease.blocks())
    elif end == "drop":
        client.drop([0])
    else:
        client.apply(m.DropTable("t"))
    assert order.target.extent not in world.freed, "its shard may still write there"
    assert third.report(order) == 0
    assert order.target.extent in world.freed
    assert not world.ledger.missing_copies
    assert not world.ledger.state.core.blocks.extents


def test_a_row_that_ends_while_it_waits_for_an_order_waits_no_more(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    client.drop([0])
    assert not world.ledger.missing_copies
    assert third.order() is None


def test_a_finished_row_in_view_is_not_copied(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    lease = client.lease("train", 1)
    client.ack(lease)
    world.lose_shard(1)
    assert third.order() is None
    client.unpin(lease.blocks())
    assert not world.ledger.state.core.blocks.blocks


# ---------------------------------------------------------------- further deaths


def test_the_death_of_the_copying_shard_gives_its_blocks_to_another(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    third.driver.close()
    assert world.lose_shard(3) == {}
    assert one_copy(world) == 1
    fourth = Shard(world, 4)
    again = given(fourth.order({4: MIB}))
    assert [at.block for at in again.blocks] == [at.block for at in order.blocks]
    assert fourth.report(again) == 1
    assert third.report(order) == 0, "that order is over"
    assert one_copy(world) == 0


def test_a_lost_target_ends_the_order_before_its_session_does(world: World, client: Driver, third: Shard) -> None:
    """The process of a lost shard may be paused, and hold its session's memory for long."""
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    third.driver.close(pins=False)
    world.lose_shard(3)
    fourth = Shard(world, 4)
    assert fourth.report(given(fourth.order({4: MIB}))) == 1
    world.ledger.end_pins(third.driver.session)
    assert third.report(order) == 0
    assert one_copy(world) == 0


def test_the_death_of_the_last_source_loses_the_rows_and_a_late_report_changes_nothing(
    world: World, client: Driver, third: Shard
) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    assert world.lose_shard(2) == {"t": [0]}
    assert third.report(order) == 0
    assert order.target.extent in world.freed
    assert (world.audit().tables["t"].rows_lost, bool(world.ledger.missing_copies)) == (1, False)


def test_a_copy_of_three_that_is_lost_during_an_order_is_made_after_it(world: World) -> None:
    client = world.client()
    client.shard, client.copies = 0, [1, 2]
    client.create(tasks=TASKS, replicas=3)
    client.put(1, ["text"])
    world.lose_shard(1)
    third, fourth = Shard(world, 3), Shard(world, 4)
    order = given(third.order())
    assert one_copy(world) == 0, "two are left"
    world.lose_shard(2)
    assert one_copy(world) == 1
    assert third.report(order) == 1
    assert (one_copy(world), bool(world.ledger.missing_copies)) == (0, True)
    assert fourth.report(given(fourth.order({4: MIB}))) == 1
    assert not world.ledger.missing_copies
    assert {only(world).shard, *(copy.shard for copy in only(world).copies)} == {0, 3, 4}


def test_a_shard_that_comes_back_is_a_new_one_and_takes_copies(world: World, client: Driver) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    returned = Shard(world, 7)
    assert returned.report(given(returned.order({7: MIB}))) == 1
    assert one_copy(world) == 0


# ---------------------------------------------------------------- reports


def test_what_is_not_reported_as_written_waits_again_behind_the_others(
    world: World, client: Driver, third: Shard
) -> None:
    for _ in range(3):
        client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    newest, *_ = numbers = [at.block for at in order.blocks]
    assert numbers == sorted(numbers, reverse=True), "the newest first"
    assert third.report(order, [newest]) == 1
    assert one_copy(world) == 2
    world.pass_time(COPY_RETRY_S)
    assert [at.block for at in given(third.order()).blocks] == numbers[1:]


def test_only_the_session_of_an_order_reports_it_and_once(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    other = Shard(world, 4)
    assert other.report(order) == 0
    assert world.ledger.finish_copies(third.driver.session, 999, [1], world.now) == 0
    assert world.ledger.copy_order(third.driver.session, 3) == order
    assert third.report(order) == 1
    assert third.report(order) == 0
    assert world.ledger.copy_order(third.driver.session, 3) is None


def test_another_shard_copies_what_is_overdue_and_a_late_report_frees_the_extent(
    world: World, client: Driver, third: Shard
) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    stuck = given(third.order())
    world.pass_time(COPY_ORDER_S - 1)
    fourth = Shard(world, 4)
    assert fourth.order({4: MIB}) is None
    world.pass_time(2)
    assert missing(world).bytes_ordered == 0
    order = given(fourth.order({4: MIB}))
    assert fourth.report(order) == 1
    assert third.report(stuck) == 0
    assert stuck.target.extent in world.freed
    assert (one_copy(world), missing(world).bytes_ordered) == (0, 0)


def test_a_late_report_counts_while_the_copy_is_still_missing(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    world.pass_time(COPY_ORDER_S + 1)
    assert third.report(order) == 1
    assert not world.ledger.missing_copies
    assert missing(world).bytes_ordered == 0


# ---------------------------------------------------------------- failures


def test_a_copy_that_failed_is_read_from_the_other_places_in_turn(world: World) -> None:
    client, fourth = world.client(), Shard(world, 4)
    client.shard, client.copies = 1, [2, 3]
    client.create(tasks=TASKS, replicas=3)
    client.put(1, ["text"])
    world.lose_shard(1)
    sources = []
    for _ in range(2):
        order = given(fourth.order({4: MIB}))
        sources.append(order.blocks[0].shard)
        assert fourth.report(order, []) == 0
    assert sorted(sources) == [2, 3]
    assert fourth.order({4: MIB}) is None, "both places failed"
    world.pass_time(COPY_RETRY_S)
    assert fourth.report(given(fourth.order({4: MIB}))) == 1
    assert (missing(world).failures, missing(world).postponed) == ({}, {})


def test_a_source_that_never_answers_is_not_read_again_first(world: World) -> None:
    client, fourth, fifth = world.client(), Shard(world, 4), Shard(world, 5)
    client.shard, client.copies = 1, [2, 3]
    client.create(tasks=TASKS, replicas=3)
    client.put(1, ["text"])
    world.lose_shard(1)
    stuck = given(fourth.order({4: MIB}))
    world.pass_time(COPY_ORDER_S + 1)
    order = given(fifth.order({5: MIB}))
    assert {stuck.blocks[0].shard, order.blocks[0].shard} == {2, 3}
    assert fifth.report(order) == 1


def test_a_block_that_cannot_be_copied_is_tried_less_and_less_often(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    waits: list[float] = []
    for _ in range(11):
        assert third.report(given(third.order()), []) == 0
        assert third.order() is None
        assert one_copy(world) == 1, "it still lacks one"
        assert world.ledger.missing_copies
        began, due = world.now, world.ledger.next_deadline()
        assert due is not None
        world.pass_time(due - world.now)
        waits.append(world.now - began)
    assert waits == [COPY_RETRY_S * 2**tries for tries in range(9)] + [COPY_POSTPONED_S] * 2
    assert missing(world).bytes_ordered == 0


def test_a_shard_to_which_every_copy_fails_keeps_no_block_from_the_others(
    world: World, client: Driver, third: Shard
) -> None:
    """Its store may be full, or its line down."""
    for _ in range(3):
        client.put(1, ["text"])
    world.lose_shard(1)
    fourth = Shard(world, 4)
    for _ in range(4):
        order = given(third.order())
        assert len(order.blocks) == 3
        third.report(order, [])
        assert third.order() is None
        world.pass_time(missing(world).postponed[order.blocks[0].block][3].delay_s)
    third.report(given(third.order()), [])
    order = given(fourth.order({3: MIB, 4: MIB}))
    assert len(order.blocks) == 3, "at once"
    assert fourth.report(order) == 3
    assert not world.ledger.missing_copies
    assert (missing(world).failures, missing(world).postponed, missing(world).late) == ({}, {}, {})
    world.pass_time(COPY_POSTPONED_S)
    assert third.order() is None


def test_the_coordinator_gets_what_no_other_shard_can_be_given_now(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    client.put(1, ["text"])
    world.lose_shard(1)
    second, rooms = Shard(world, 2), {0: MIB, 2: MIB, 3: MIB}
    assert second.order(rooms) is None, "shard 3 can"
    order = given(third.order({3: 128}))
    third.report(order, [])
    own = given(second.order(rooms))
    assert (own.target.shard, [at.block for at in own.blocks]) == (0, [at.block for at in order.blocks])
    assert second.report(own) == 1
    assert third.report(given(third.order())) == 1
    assert not world.ledger.missing_copies


def test_a_shard_to_which_copies_fail_and_one_whose_source_is_damaged_do_not_hide_the_good_place(world: World) -> None:
    """Copies to shard 4 fail, and what lies in shard 2 is damaged: 5 reads shard 3 in its turn, however often 4 has
    tried."""
    client, fourth, fifth = world.client(), Shard(world, 4), Shard(world, 5)
    client.shard, client.copies = 1, [2, 3]
    client.create(tasks=TASKS, replicas=3)
    client.put(1, ["text"])
    world.lose_shard(1)
    for _ in range(4):
        if (broken := fourth.order({4: MIB, 5: MIB})) is not None:
            fourth.report(broken, [])
        if (order := fifth.order({4: MIB, 5: MIB})) is not None:
            fifth.report(order, [at.block for at in order.blocks if at.shard == 3])
    assert not world.ledger.missing_copies


def test_doctor_tells_that_copies_fail(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    third.report(given(third.order()), [])
    (text,) = [line.text for line in client.observe("doctor").tables["t"] if not line.task]
    assert text.startswith("1 row has one copy left of 2: copies of 1 block failed from each place")
    assert client.observe("stats").bytes.to_copy == only(world).nbytes


@pytest.mark.parametrize("end", ["drop", "lose"])
def test_a_block_that_ends_while_it_is_postponed_leaves_nothing(
    world: World, client: Driver, third: Shard, end: str
) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    third.report(given(third.order()), [])
    if end == "drop":
        client.drop([0])
    else:
        world.lose_shard(2)
    assert not world.ledger.missing_copies
    assert (missing(world).failures, missing(world).postponed) == ({}, {})
    world.pass_time(COPY_POSTPONED_S)
    assert third.order() is None


def test_a_change_of_places_ends_the_wait_of_a_postponed_block(world: World) -> None:
    client, fourth = world.client(), Shard(world, 4)
    client.shard, client.copies = 1, [2, 3]
    client.create(tasks=TASKS, replicas=3)
    client.put(1, ["text"])
    world.lose_shard(1)
    for _ in range(2):
        fourth.report(given(fourth.order({4: MIB})), [])
    assert fourth.order({4: MIB}) is None
    world.lose_shard(2)
    order = given(fourth.order({4: MIB}))
    assert [at.shard for at in order.blocks] == [3]
    world.pass_time(COPY_RETRY_S)
    assert fourth.report(order) == 1, "the end of the earlier wait changes nothing"


def test_an_image_goes_on_with_what_is_postponed(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    third.report(given(third.order()), [])
    world.ledger = Ledger.from_image(world.ledger.image())
    assert third.order() is None
    world.pass_time(COPY_RETRY_S)
    assert third.report(given(third.order())) == 1


def test_a_shard_commits_nothing_into_the_extent_of_its_order_and_does_not_return_it(
    world: World, client: Driver, third: Shard
) -> None:
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order())
    target = order.target
    block = m.WrittenBlock(target.extent, target.offset, 128, 1, ["text"], [1])
    before = world.ledger.image()
    text = Field("text", "int64", (None,))
    for request in (m.PutRequest("t", 1, m.Columns([text], [block])), m.ReturnGrant(target.extent)):
        with pytest.raises(
            UsageError, match=f"extent {target.extent} belongs to a copy order, which ends with its report"
        ):
            third.driver.apply(request)
    assert world.ledger.copy_order(third.driver.session, 3) == order
    assert len(world.ledger.image()) == len(before)
    assert third.report(order) == 1


# ---------------------------------------------------------------- which, how much, where to


def choose(shards: dict[tuple[int, ...], list[int]], shard: int, rooms: dict[int, int]) -> CopyChoice | None:
    """The choice of `shard` among blocks of these sizes; they are numbered from 1."""
    missing, number = MissingCopies(), 0
    for where, sizes in shards.items():
        for size in sizes:
            number += 1
            missing.add(number, size, where)
    return missing.choose(shard, rooms)


def test_blocks_with_fewer_copies_are_copied_first() -> None:
    choice = choose({(0, 2): [64, 64], (2,): [64]}, 1, {1: MIB})
    assert choice == CopyChoice(1, [3, 1, 2], 192)


def test_an_order_is_bounded_in_bytes_and_blocks() -> None:
    choice = choose({(2,): [COPY_ORDER_BYTES // 4 * 3, COPY_ORDER_BYTES // 2, 64]}, 1, {1: 1 << 40})
    assert choice == CopyChoice(1, [1, 3], COPY_ORDER_BYTES // 4 * 3 + 64)
    choice = choose({(2,): [3 * COPY_ORDER_BYTES, 64]}, 1, {1: 1 << 40})
    assert choice == CopyChoice(1, [1], 3 * COPY_ORDER_BYTES), "a block is copied whole"
    choice = choose({(2,): [64] * (COPY_ORDER_BLOCKS + 1)}, 1, {1: 1 << 40})
    assert choice is not None
    assert len(choice.blocks) == COPY_ORDER_BLOCKS


def test_what_does_not_fit_is_passed_over() -> None:
    assert choose({(2,): [8192, 4096, 8192]}, 1, {1: 4096}) == CopyChoice(1, [2], 4096)
    assert choose({(2,): [8192]}, 1, {1: 4096}) is None
    assert choose({(2,): [64]}, 1, {2: 4096}) is None, "a shard without room copies nothing"


def test_a_shard_copies_to_the_coordinator_only_what_no_other_shard_can_take() -> None:
    rooms = {0: MIB, 1: MIB, 2: MIB}
    assert choose({(1,): [64]}, 1, rooms) is None, "shard 2 copies it"
    assert choose({(1,): [64]}, 2, rooms) == CopyChoice(2, [1], 64)
    assert choose({(1,): [4096]}, 1, {0: MIB, 1: MIB, 2: 64}) == CopyChoice(0, [1], 4096)
    assert choose({(1, 2): [64]}, 1, rooms) == CopyChoice(0, [1], 64)
    assert choose({(0, 1): [64]}, 1, {0: MIB, 1: MIB}) is None
    assert choose({(1,): [64]}, 1, {1: MIB}) is None, "the coordinator has no room"


def test_looking_for_blocks_that_fit_is_bounded() -> None:
    sizes = [8192] * missing_copies.SCANNED_MAX + [64]
    assert choose({(2,): sizes}, 1, {1: 4096}) is None


# ---------------------------------------------------------------- what is told, kept and counted


def test_the_bytes_of_a_lost_copy_stay_counted_so_that_there_is_room_for_the_next(world: World) -> None:
    client, third = world.client(), Shard(world, 3)
    client.shard, client.copies = 1, [2]
    client.create(tasks=TASKS, replicas=2, limits=Limits(bytes=256))
    client.put(1, ["text"])
    assert world.stats().bytes == 256
    world.lose_shard(1)
    assert world.stats().bytes == 256
    third.report(given(third.order()))
    assert world.stats().bytes == 256
    client.drop([0])
    assert world.stats().bytes == 0


def test_doctor_tells_how_many_rows_are_at_risk_and_what_is_done(world: World, client: Driver, third: Shard) -> None:
    client.put(3, ["text"])
    world.lose_shard(1)

    def texts() -> list[str]:
        return [line.text for line in client.observe("doctor").tables["t"] if not line.task]

    assert texts() == [
        (
            "3 rows have one copy left of 2: no shard has room for a copy: start a further one (transferqueue shard), "
            "or consume rows"
        )
    ]
    order = given(third.order())
    assert texts() == [f"3 rows have one copy left of 2: shards copy {PAGE_BYTES:,} bytes now"]
    assert client.observe("stats").bytes.being_copied == PAGE_BYTES
    third.report(order)
    assert texts() == []


def test_rows_with_one_copy_are_counted_once_however_many_values_lie_there(world: World, client: Driver) -> None:
    client.put(2, ["text"])
    client.update([0], ["more"])
    world.lose_shard(1)
    assert one_copy(world) == 2


def test_an_image_goes_on_in_the_middle_of_an_order(world: World, client: Driver, third: Shard) -> None:
    client.put(1, ["text"])
    client.put(1, ["text"])
    world.lose_shard(1)
    order = given(third.order({3: 128}))
    assert len(order.blocks) == 1
    world.ledger = Ledger.from_image(world.ledger.image())
    assert world.ledger.copy_order(third.driver.session, 3) == order
    assert third.report(order) == 1
    assert third.report(given(third.order())) == 1
    assert not world.ledger.missing_copies


def test_restored_rows_of_a_table_with_replicas_lack_their_copies(world: World, client: Driver) -> None:
    client.put(2, [Field("text", "int64", (None,))])
    contents = world.ledger.take_snapshot(world.now)
    for at in list(contents.blocks):
        contents.blocks[at] = m.BlockLocation(
            at,
            0,
            0,
            4096 * at,
            *(getattr(contents.blocks[at], name) for name in ("nbytes", "rows", "fields", "counts")),
        )
    other = World()
    other.ledger.restore_snapshot(contents, 0.0)
    assert other.stats().rows_one_copy == 2
    assert other.stats().bytes == world.stats().bytes
    shard = Shard(other, 1)
    order = given(shard.order({1: MIB}))
    assert shard.report(order) == 1
    assert other.stats().rows_one_copy == 0
