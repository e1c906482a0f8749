"""A ledger read from an image continues as the first one would; damaged images are refused."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from tests.ledger.driver import World
from tests.ledger.test_determinism import Fuzz, run
from transferqueue.errors import Corruption, InternalError, NotFound, UsageError
from transferqueue.ledger import Ledger
from transferqueue.ledger.persistence.image import _decoder, _Header, _State, _Table
from transferqueue.ledger.persistence.snapshot import TableCounters
from transferqueue.ledger.rows import groups
from transferqueue.ledger.rows.blocks import StoredBlocks
from transferqueue.ledger.rows.row_pages import LIVE, StateColumn
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks import group_task
from transferqueue.ledger.tasks.task_state import ATTRIBUTES, LiveTask
from transferqueue.limits import PAGE_ROWS, Limits
from transferqueue.policies import Complete, Plugin, Priority, Retry, Task
from transferqueue.wire import messages as m


@pytest.mark.parametrize("seed", range(4))
def test_images_at_random_moments_change_nothing(seed: int) -> None:
    wanted, _ = run(seed, 400)
    fuzz, dice = Fuzz(seed), random.Random(seed)
    for step in range(400):
        if dice.random() < 0.1:
            fuzz.ledger = Ledger.from_image(fuzz.ledger.image())
        fuzz.step()
        if step % 20 == 0:
            fuzz.check()
    assert fuzz.log.hexdigest() == wanted


def test_the_image_of_a_copy_is_the_same_image() -> None:
    image = run(3, 300)[1].ledger.image()
    assert Ledger.from_image(image).image() == image


def test_an_image_is_as_large_as_what_is_resident() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("t")], limits=Limits(rows=1 << 20))
    empty = len(world.ledger.image())
    assert empty < 20_000
    for _ in range(20):
        client.put(PAGE_ROWS)
        client.ack(client.lease("t", PAGE_ROWS))
    world.ledger.forget_replies(client.session, client.call)
    world.table().history.__init__()  # type: ignore[misc]
    assert len(world.ledger.image()) < empty + PAGE_ROWS * 150


class Shortest:
    def __init__(self, options: object) -> None:
        self.options = options

    def keys(self, units: object) -> object:
        return units.tokens  # type: ignore[attr-defined]


def test_nothing_keeps_the_state_of_a_dropped_table() -> None:
    world = World()
    client = world.client()
    late = Complete(deadline_s=3600.0)
    client.create(tasks=[Task("g", groups=late), Task("t", retry=Retry(attempts=9, first_s=60.0))])
    client.put(3, group_id=1, group_size=4)
    client.put(4, group_id=2, group_size=4)
    client.release(client.lease("t", 2), failed=True)
    client.lease("t", 1)
    client.lease("g", 4)
    client.apply(m.DropTable("t"))
    state = _decoder.decode(msgspec.msgpack.decode(world.ledger.image(), type=_Header).state)
    assert [*state.tables, *state.leases.by_id, *state.due] == []
    world.ledger.tick(7200.0)


def test_selectors_are_given_anew() -> None:
    world = World(Ledger(epoch=7, selectors={"shortest": Shortest}))
    client = world.client()
    client.create(tasks=[Task("t", selector=Plugin("shortest"))])
    client.put(3, tokens=[9, 1, 5])
    image = world.ledger.image()
    with pytest.raises(NotFound, match='selector plugin "shortest" is not installed on the server; it has none'):
        Ledger.from_image(image)
    world.ledger = Ledger.from_image(image, selectors={"shortest": Shortest})
    assert world.ledger.epoch == 7
    assert client.lease("t", 3).rows == [1, 2, 0]
    client.put(2, tokens=[2, 1])
    assert client.lease("t", 2).rows == [4, 3]


def test_a_damaged_image_is_reported() -> None:
    image = run(1, 100)[1].ledger.image()
    dice = random.Random(1)
    for cut in (0, 1, 40, len(image) // 2, len(image) - 1):
        with pytest.raises(Corruption, match="no image of a ledger"):
            Ledger.from_image(image[:cut])
    for _ in range(50):
        damaged = bytearray(image)
        damaged[dice.randrange(100, len(image))] ^= 1 << dice.randrange(8)
        with pytest.raises(Corruption, match="is damaged: its digest differs; restore a snapshot"):
            Ledger.from_image(bytes(damaged))


def reheaded(image: bytes, **changes: object) -> bytes:
    header = msgspec.msgpack.decode(image, type=_Header)
    return msgspec.msgpack.encode(header._replace(**changes))


def test_the_image_of_another_version_is_refused() -> None:
    image = Ledger().image()
    for changes in ({"fingerprint": bytes(16)}, {"magic": "transferqueue ledger image 99"}):
        with pytest.raises(UsageError, match="has the state of another version of this package; start that version"):
            Ledger.from_image(reheaded(image, **changes))


def test_a_heap_that_makes_no_sense_is_corruption_whatever_it_says() -> None:
    """With a right digest too: each byte of the heap is spoiled in turn, and nothing but `Corruption` comes out."""
    from transferqueue.ledger.persistence.image import _digest

    image = Ledger().image()
    state = msgspec.msgpack.decode(image, type=_Header).state
    for at in range(len(state)):
        spoiled = bytearray(state)
        spoiled[at] ^= 0x15
        try:
            Ledger.from_image(reheaded(image, state=bytes(spoiled), digest=_digest(bytes(spoiled))))
        except (Corruption, UsageError):
            continue


def test_what_has_no_form_is_said_so() -> None:
    ledger = Ledger()
    ledger.state.dropped_tables["t"] = object()  # type: ignore[assignment]
    with pytest.raises(InternalError, match=r"cannot be written: .*builtins.object has no stored form"):
        ledger.image()
    ledger.state.dropped_tables["t"] = 1 << 70
    with pytest.raises(InternalError, match="cannot be written"):
        ledger.image()


FOLLOWS: Final = {
    "TableState": {
        "core",
        "holders",
        "to_drop",
        "column_groups",
        "versions",
        "ordinals",
        "keeps_ended",
        "latest_fields",
    },
    "RowStore": {"_masks", "_reply_fields", "words", "freed", "columns", "facts", "number"},
    "RowPages": {"_columns", "_frames", "_base", "_spare", "_capacity"},
    "GroupIndex": {"_rows", "_sizes"},
    "TaskState": {"rows", "ready", "views", "stepped", "_mask", "ranker", "required_results"},
    "GroupTaskState": {
        "rows",
        "ready",
        "views",
        "stepped",
        "_mask",
        "ranker",
        "required_results",
        "_deadlines",
        "groups",
    },
    "SharedState": {"plugins", "absence", "deadlines", "recorded_block_max"},
    "BlockRegistry": {"parts", "_effects", "_latest"},
    "LeaseState": {"_sorter"},
}
"""By class, the attributes that an image lacks: they follow from others, or are compared elsewhere."""


def attributes(one: object) -> list[str]:
    names = [name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())]
    names += [*getattr(one, "__struct_fields__", ()), *getattr(one, "__dict__", ())]
    return [name for name in dict.fromkeys(names) if name not in FOLLOWS.get(type(one).__name__, ())]


def differences(one: Any, other: Any, path: str, rows: Any = None) -> list[str]:
    """Where two values of ledgers differ, by the attributes of their classes."""
    if type(one) is not type(other) and not isinstance(one, np.generic):
        return [f"{path}: {type(one).__name__} {type(other).__name__}"]
    if isinstance(one, StateColumn):
        return []  # `differing_columns` compares them
    if isinstance(one, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return [] if same else [f"{path}: {one} {other}"]
    if isinstance(one, dict):
        if list(one) != list(other):
            return [f"{path}: {list(one)} {list(other)}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}[{key}]")]
    if isinstance(one, list | tuple | deque):
        if len(one) != len(other):
            return [f"{path}: {len(one)} {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for at, pair in pairs for found in differences(*pair, f"{path}[{at}]")]
    if type(one).__module__.startswith("transferqueue.ledger"):
        return [
            found
            for name in attributes(one)
            for found in differences(getattr(one, name), getattr(other, name), f"{path}.{name}")
        ]
    return [] if one == other else [f"{path}: {one} {other}"]


def differing_columns(one: TableState, other: TableState) -> list[str]:
    rows = one.rows.pages.resident_rows()
    at, there = one.rows.pages.index(rows), other.rows.pages.index(rows)
    columns = {"tasks_left": (one.rows.tasks_left, other.rows.tasks_left)}
    for name in one.rows.columns:
        columns[name] = one.rows.columns[name], other.rows.columns[name]
    for number, pair in enumerate(zip(one.rows.words, other.rows.words, strict=True)):
        columns[f"word {number}"] = pair
    for name, task in one.tasks.items():
        again = other.tasks[name]
        columns |= {f"{name}: {column}": (task.columns[column], again.columns[column]) for column in task.columns}
        columns[f"{name}: hold"] = task.hold, again.hold
    parts, again_parts = one.column_groups._by_fields, other.column_groups._by_fields
    assert list(parts) == list(again_parts)
    for fields, part in parts.items():
        columns |= {f"block {fields}": (part.block, again_parts[fields].block)}
        assert part.entries == again_parts[fields].entries
    assert one.rows.tasks_left.a[at[one.rows.pages.fate.a[at] == LIVE]].tolist() == (
        other.rows.tasks_left.a[there[other.rows.pages.fate.a[there] == LIVE]].tolist()
    )
    del columns["tasks_left"]  # of live rows alone
    return [name for name, (left, right) in columns.items() if left.a[at].tobytes() != right.a[there].tobytes()]


@pytest.mark.parametrize("seed", range(4))
def test_an_image_lacks_no_attribute_of_the_state(seed: int) -> None:
    """A class of the state that gets another attribute has it in images, or in `FOLLOWS`."""
    fuzz = Fuzz(seed)
    for step in range(300):
        fuzz.step()
        if step % 15 == 0:
            state, again = fuzz.ledger.state, Ledger.from_image(fuzz.ledger.image()).state
            assert differences(state, again, "state") == []
            for name, table in state.tables.items():
                assert differing_columns(table, again.tables[name]) == []


TERMS: Final = {"name", "limits", "pacing", "retention", "extra_fields", "sealed", "clock"}
STORED: Final = {
    "LedgerState": {*_State.__struct_fields__, "core", "records"},
    "SharedState": {*_State.__struct_fields__, "writing"},
    "TableState": {*_Table.__struct_fields__, *TableCounters.__struct_fields__, *TERMS, "rows", "groups", "history"}
    | {"group_tasks", "keeps_ended"},
    "TaskState": {
        *LiveTask.__struct_fields__,
        "_stamp",
        "counters",
        "task",
        "needs",
        "columns",
        *(one.name for one in ATTRIBUTES),
    },
    "FormingGroup": {*group_task.ATTRIBUTES, "stamp", "ready", "table", "task"},
    "GroupState": {*groups.ATTRIBUTES, "rows"},
    "BlockRegistry": {*StoredBlocks.__struct_fields__, "_next_extent", "_next_block"},
}
"""By class, the attributes that an image has, or that follow from those: of classes with a stored form of their own.
The others are stored as they are declared."""


def test_each_attribute_of_the_state_is_stored_or_follows() -> None:
    """Also one that no test changes."""
    state = run(3, 300)[1].ledger.state
    table = state.tables["t"]
    task = next(task for task in table.group_tasks if task.forming)
    group = next(iter(table.groups._by_id.values()))
    objects = (
        state,
        state.core,
        table,
        table.tasks["roll"],
        next(iter(task.forming.values())),
        group,
        state.core.blocks,
    )
    lacking = {type(one).__name__: {*attributes(one)} - STORED[type(one).__name__] for one in objects}
    assert {name: names for name, names in lacking.items() if names} == {}


def test_arrays_of_a_copy_are_its_own_and_can_be_written() -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("t")])
    client.put(5)
    copy = Ledger.from_image(world.ledger.image())
    copied = copy.state.tables["t"].rows.version.a
    assert not np.shares_memory(copied, world.table().rows.version.a)
    copied[:5] = 3
    assert world.table().rows.version.a[:5].tolist() == [-1] * 5


def test_an_image_holds_no_memory_that_was_never_written() -> None:
    """Such memory has what lay there before, which may be anybody's, and makes two images of one state differ."""

    def image() -> bytes:
        np.full((4, 4096), -1)  # what is allocated next may find these bytes
        world = World()
        client = world.client()
        client.create(tasks=[Task("t", selector=Priority())])
        client.put(2, inline={"x": 1.0})
        client.put(2)
        return world.ledger.image()

    assert image() == image()
