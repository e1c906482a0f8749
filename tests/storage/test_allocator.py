from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.scale import examples
from transferqueue.errors import InternalError, UsageError
from transferqueue.limits import PAGE_BYTES
from transferqueue.storage import Allocator

PAGES = 32


class Extents(RuleBasedStateMachine):
    """Against the plainest model: the set of pages that are lent, and those that are warm."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(PAGES * PAGE_BYTES)
        self.lent: dict[int, int] = {}
        self.warm: set[int] = set()

    def pages(self) -> set[int]:
        return {page for at, count in self.lent.items() for page in range(at, at + count)}

    def longest(self) -> int:
        taken, best, run = self.pages(), 0, 0
        for page in range(PAGES):
            run = 0 if page in taken else run + 1
            best = max(best, run)
        return best

    @rule(nbytes=st.integers(1, 12 * PAGE_BYTES))
    def allocate(self, nbytes: int) -> None:
        count, longest, before = -(-nbytes // PAGE_BYTES), self.longest(), self.pages()
        offset = self.allocator.allocate(nbytes)
        assert (offset is None) == (count > longest)
        if offset is None:
            return
        at = offset // PAGE_BYTES
        mine = set(range(at, at + count))
        assert offset % PAGE_BYTES == 0
        assert not mine & before
        assert mine <= set(range(PAGES))
        self.lent[at] = count
        self.warm -= mine

    @rule(count=st.integers(1, 12), warm=st.booleans())
    def allocate_of_one_temperature(self, count: int, warm: bool) -> None:
        free = set(range(PAGES)) - self.pages()
        of_it = free & self.warm if warm else free - self.warm
        fits = any(set(range(at, at + count)) <= of_it for at in range(PAGES))
        allocate = self.allocator.allocate_warm if warm else self.allocator.allocate_cold
        offset = allocate(count * PAGE_BYTES)
        assert (offset is not None) == fits
        if offset is not None:
            at = offset // PAGE_BYTES
            assert set(range(at, at + count)) <= of_it
            self.lent[at] = count
            self.warm -= set(range(at, at + count))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.lent)))
        count = self.lent.pop(at)
        self.allocator.free(at * PAGE_BYTES, count * PAGE_BYTES)
        self.warm |= set(range(at, at + count))

    @rule(page=st.integers(0, PAGES), count=st.integers(1, 4))
    def free_what_is_not_lent(self, page: int, count: int) -> None:
        if self.lent.get(page) != count:
            with pytest.raises(InternalError):
                self.allocator.free(page * PAGE_BYTES, count * PAGE_BYTES)

    @rule(share=st.floats(0.1, 1))
    def chill(self, share: float) -> None:
        found = list(self.allocator.coldest())
        if not found:
            return
        offset, nbytes = found[0]
        pages = max(int(nbytes // PAGE_BYTES * share), 1)
        self.allocator.chill(offset, pages * PAGE_BYTES)
        self.warm -= set(range(offset // PAGE_BYTES, offset // PAGE_BYTES + pages))

    @invariant()
    def accounts(self) -> None:
        assert self.allocator.used == len(self.pages()) * PAGE_BYTES
        assert self.allocator.warm == len(self.warm) * PAGE_BYTES
        assert self.allocator.largest == self.longest() * PAGE_BYTES
        listed = {
            page for at, size in self.allocator.coldest() for page in range(at // PAGE_BYTES, (at + size) // PAGE_BYTES)
        }
        assert listed == self.warm


TestExtents = Extents.TestCase
TestExtents.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_warm_memory_is_taken_before_fresh() -> None:
    allocator = Allocator(1 << 20)
    first, second = allocator.allocate(8192), allocator.allocate(8192)
    assert first is not None
    allocator.free(first, 8192)
    assert allocator.allocate(4096) == first
    assert second is not None


def test_the_latest_freed_of_equals_is_taken() -> None:
    allocator = Allocator(1 << 20)
    extents = [allocator.allocate(4096) for _ in range(7)]
    for at in (1, 5, 3):
        allocator.free(extents[at] or 0, 4096)
    assert [allocator.allocate(4096) for _ in range(3)] == [extents[3], extents[5], extents[1]]


def test_the_smallest_fit_is_taken() -> None:
    allocator = Allocator(1 << 20)
    large, _, small, _ = (allocator.allocate(size) for size in (32768, 4096, 12288, 4096))
    assert large is not None
    assert small is not None
    allocator.free(small, 12288)
    allocator.free(large, 32768)
    assert allocator.allocate(10000) == small


def test_neighbours_of_both_temperatures_are_joined_when_nothing_else_fits() -> None:
    allocator = Allocator(4 * PAGE_BYTES)
    first = allocator.allocate(2 * PAGE_BYTES)
    assert first == 0
    allocator.free(0, 2 * PAGE_BYTES)
    assert allocator.allocate(4 * PAGE_BYTES) == 0
    assert allocator.allocate(1) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda a: Allocator(100), "an arena of 100 bytes is smaller than one page"),
        (lambda a: a.allocate(0), "an extent of 0 bytes is invalid"),
        (lambda a: a.free(4096, 4096), "is not lent: freed twice, or never lent"),
        (lambda a: a.free(0, 4096), "was lent with 8192 bytes, but 4096 are freed"),
        (lambda a: a.chill(0, 4096), "is not warm and free"),
    ],
)
def test_what_is_refused_changes_nothing(wrong: object, message: str) -> None:
    allocator = Allocator(1 << 20)
    assert allocator.allocate(8000) == 0
    with pytest.raises((InternalError, UsageError), match=message):
        wrong(allocator)  # type: ignore[operator]
    assert allocator.used == 8192


def test_freeing_twice_is_refused() -> None:
    allocator = Allocator(1 << 20)
    assert allocator.allocate(8000) == 0
    allocator.free(0, 8000)
    with pytest.raises(InternalError, match="freed twice"):
        allocator.free(0, 8000)
    assert allocator.used == 0
