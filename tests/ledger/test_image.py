"""A ledger read from an image continues as the first one would; damaged images are refused."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import textwrap

import msgspec
import numpy as np
import pytest

from tests.ledger.driver import World
from tests.ledger.test_determinism import Fuzz, run
from transferqueue.errors import Corruption, InternalError, NotFound, UsageError
from transferqueue.ledger import Ledger
from transferqueue.ledger.persistence.image import _KNOWN, _Header
from transferqueue.ledger.table_state import TableState
from transferqueue.ledger.tasks.group_task import GroupTaskState
from transferqueue.ledger.tasks.task_state import TaskState
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
    heap = msgspec.msgpack.decode(msgspec.msgpack.decode(world.ledger.image(), type=_Header).state)
    states = {number for number, form in enumerate(_KNOWN.forms) if form.cls in (TableState, TaskState, GroupTaskState)}
    assert not states & {number for number, _, _ in heap[2]}
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
    return msgspec.msgpack.encode(msgspec.structs.replace(header, **changes))


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
    with pytest.raises(InternalError, match=r"builtins.object cannot be written to an image of the state"):
        ledger.image()
    ledger.state.dropped_tables["t"] = 1 << 70
    with pytest.raises(InternalError, match="cannot be written"):
        ledger.image()


def classes_held_by(cls: type) -> set[type]:
    """The classes of this package that its attributes are declared as, or are made of."""
    held = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.AnnAssign):
            names: list[ast.AST] = [node.annotation]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names = [node.value.func] if any(isinstance(target, ast.Attribute) for target in node.targets) else []
        else:
            continue
        for name in (inner.id for outer in names for inner in ast.walk(outer) if isinstance(inner, ast.Name)):
            value = getattr(sys.modules[cls.__module__], name, None)
            if isinstance(value, type) and value.__module__.startswith("transferqueue."):
                held.add(value)
    return held


def test_each_class_that_a_state_may_hold_has_a_form() -> None:
    """Also those that it holds at few moments, such as between two acks."""
    known = {*_KNOWN.form_of, *_KNOWN.struct_of, *_KNOWN.tuple_of}
    lacking = {one for cls in _KNOWN.form_of for one in classes_held_by(cls) if one not in known}
    omitted = {"Absence", "BlockPart", "Cold"}  # made anew; `Expiring` is a protocol, of classes that have forms
    assert {cls.__name__ for cls in lacking} == omitted | {"Expiring"}


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
    np.full((4, 4096), -1)  # what is allocated next may find these bytes
    world = World()
    client = world.client()
    client.create(tasks=[Task("t", selector=Priority())])
    client.put(2)
    client.put(2)
    (run,) = world.table().tasks["t"].ready._runs
    assert run.tail is not None
    assert not run.tail[:, run.tail_used :].any()
