"""Whatever interrupts an operation, wherever: the ledger is as before it, or torn."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.ledger.driver import World
from tests.ledger.test_determinism import Fuzz
from tests.scale import sizes
from tests.simulator.interrupts import DEFECTS, Interrupt
from transferqueue.errors import Full, LedgerTorn, TransferQueueError
from transferqueue.ledger import Blocked, Ledger
from transferqueue.ledger import table_state as ledger_table
from transferqueue.limits import MEMORY_MARGIN_BYTES, NEW_ROW_MEMORY_BYTES, PAGE_ROWS, ROW_MEMORY_BYTES, Limits
from transferqueue.policies import Task
from transferqueue.wire import messages as m


class Interrupted(Fuzz):
    """Before each request is carried out, copies of the ledger carry it out with an exception planted at some of its
    lines."""

    def __init__(self, seed: int, places: int) -> None:
        self.places = places
        self.chance = random.Random(seed)
        self.torn = self.whole = self.no_memory = 0
        super().__init__(seed)

    def apply(self, request: m.Request) -> None:
        session = self.session_for(request)
        before = self.ledger.image()
        self.session_for = lambda _: session  # type: ignore[method-assign]
        terms: dict[str, Any] = {"session": session, "call": self.calls[session] + 1, "now": self.now}
        lines = self.lines_of(before, request, terms)
        for line in self.chance.sample(range(1, lines + 1), min(self.places, lines)):
            self.interrupt(before, request, terms, line)
        super().apply(request)
        del self.session_for

    def lines_of(self, before: bytes, request: m.Request, terms: dict[str, Any]) -> int:
        count = Interrupt(MemoryError, -1)
        ledger = Ledger.from_image(before)
        with count.planted():
            outcome_of(ledger, request, terms)
        return count.lines

    def interrupt(self, before: bytes, request: m.Request, terms: dict[str, Any], line: int) -> None:
        ledger = Ledger.from_image(before)
        planted = Interrupt(self.chance.choice(DEFECTS), line)
        try:
            with planted.planted():
                ledger.apply(request, **terms)
        except LedgerTorn:
            assert ledger.torn
        except Full:
            self.no_memory += planted.raised
        except (TransferQueueError, planted.error):
            pass
        if ledger.torn:
            self.torn += 1
            with pytest.raises(LedgerTorn):
                ledger.apply(m.ListTables(), **terms)
        elif planted.raised:
            self.whole += 1
            reference = Ledger.from_image(before)
            assert outcome_of(ledger, request, terms) == outcome_of(reference, request, terms), (request, planted.line)
            assert state_of(ledger, self.now) == state_of(reference, self.now), (request, planted.line)


def outcome_of(ledger: Ledger, request: m.Request, terms: dict[str, Any]) -> object:
    try:
        reply = ledger.apply(request, **terms)
    except TransferQueueError as error:
        return repr(error)
    return repr(reply) if isinstance(reply, Blocked) else msgspec.msgpack.encode(reply)


def state_of(ledger: Ledger, now: float) -> object:
    """What can be seen of a ledger, and what it has for its server to do."""
    seen = [ledger.observe(m.Observe(what), now) for what in ("stats", "audit", "sessions")]
    tables = ledger.state.tables.values()
    resident = [(table.rows.pages, table.rows.pages.resident_rows()) for table in tables]
    rows = [
        [pages.next_row, here.tobytes(), *(column.a[pages.index(here)].tobytes() for column in pages._columns)]
        for pages, here in resident
    ]
    return (
        seen,
        rows,
        sorted(map(repr, ledger.take_effects())),
        sorted(map(repr, ledger.state.core.blocks.pins.items())),
    )


@pytest.mark.parametrize("places", sizes(3, 40))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_an_operation_that_is_interrupted_changes_nothing_or_tears_the_ledger(seed: int, places: int) -> None:
    fuzz = Interrupted(seed, places)
    for _ in range(150):
        fuzz.step()
    fuzz.check()
    assert fuzz.torn > 30
    assert fuzz.whole > 30
    assert fuzz.no_memory > 5


def test_an_operation_for_which_there_is_no_memory_is_refused_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    client = world.client()
    client.create(tasks=[Task("t")], limits=Limits(rows=1 << 20))
    client.put(1)
    before, asked = world.ledger.image(), []

    def none_left(nbytes: int, dtype: Any) -> Any:
        asked.append(nbytes)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ledger_table.np, "empty", none_left)
        with pytest.raises(
            Full, match=r"memory of the server process is exhausted.*this request \(\d+\.\d MiB\).*ulimit"
        ):
            client.put(2 * PAGE_ROWS)
    assert world.ledger.image() == before
    rows = 2 * PAGE_ROWS * (ROW_MEMORY_BYTES + NEW_ROW_MEMORY_BYTES)
    assert rows + MEMORY_MARGIN_BYTES < asked[0] < 2 * rows + MEMORY_MARGIN_BYTES, "with what the columns grow by"
    assert len(client.put(2 * PAGE_ROWS)) == 2 * PAGE_ROWS
