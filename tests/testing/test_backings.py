"""The kits of backings and stores find what is broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from transferqueue.adapters.protocols import Unsupported
from transferqueue.errors import NotFound
from transferqueue.limits import MIB
from transferqueue.storage.elements.dtypes import U8
from transferqueue.storage.memory.backing import Backing, Range
from transferqueue.storage.memory.object_store import ObjectBacking
from transferqueue.testing.conformance.backings import BACKING_CHECKS
from transferqueue.testing.conformance.report import Verdict, run
from transferqueue.testing.conformance.stores import STORE_CHECKS


class Plain:
    """A store that is right, as far as one of this process can be."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, key: str, content: memoryview) -> None:
        self.kept[key] = bytes(content)

    def get(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        for key, into in wanted:
            if len(self.kept.get(key, b"")) != into.nbytes:
                raise NotFound(f"object {key} is not there")
            into[:] = self.kept[key]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def sweep(self, prefix: str) -> None:
        self.remove([key for key in self.kept if key.startswith(prefix)])

    def close(self) -> None:
        pass


class Keeps(Plain):
    def remove(self, keys: Sequence[str]) -> None:
        pass


class Shortens(Plain):
    def put(self, key: str, content: memoryview) -> None:
        super().put(key, content[: 16 * MIB])


class SweepsAll(Plain):
    def sweep(self, prefix: str) -> None:
        self.kept.clear()


class Fills(Plain):
    """What is missing comes as zeros."""

    def get(self, wanted: Sequence[tuple[str, memoryview]]) -> None:
        for key, into in wanted:
            into[:] = self.kept.get(key, b"").ljust(into.nbytes, b"\0")[: into.nbytes]


class OneOf:
    """A store as a subject, and `ObjectBacking` over it."""

    def __init__(self, store: Plain, kind: type[ObjectBacking] = ObjectBacking) -> None:
        self.store, self.kind = store, kind

    def fill(self) -> None:
        raise Unsupported("memory of this process")

    end = fill


class StoreOf(OneOf):
    def open(self) -> Plain:
        return self.store

    def used_bytes(self) -> int:
        return sum(map(len, self.store.kept.values()))


class BackingOf(OneOf):
    @contextmanager
    def open(self) -> Iterator[Backing]:
        objects = self.kind(self.store, "tq-", 64 * MIB, object_bytes=MIB, kept_bytes=0)
        yield objects
        objects.close()

    def used_bytes(self, backing: Backing) -> int:
        return sum(map(len, self.store.kept.values()))

    def lose(self, backing: Backing) -> None:
        self.store.kept.clear()


class Unordered(ObjectBacking):
    def read(self, ranges: Sequence[Range]) -> list[U8]:
        return super().read(sorted(ranges))


class Reuses(ObjectBacking):
    """Every reader gets the same memory."""

    _memory = np.zeros(64 * MIB, np.uint8)

    def read(self, ranges: Sequence[Range]) -> list[U8]:
        for one, found in zip(ranges, super().read(ranges), strict=True):
            self._memory[one.offset % (16 * MIB) :][: one.nbytes] = found
        return [self._memory[one.offset % (16 * MIB) :][: one.nbytes] for one in ranges]


class Forgetful(ObjectBacking):
    def forget(self, extent: int) -> None:
        self.forget_others(1 << 62, [])


def test_what_is_right_passes() -> None:
    found = [outcome.verdict for outcome in run(STORE_CHECKS, StoreOf(Plain()))]
    assert found == [Verdict.PASSED] * 5 + [Verdict.UNSUPPORTED] * 2
    assert {outcome.verdict for outcome in run(BACKING_CHECKS, BackingOf(Plain()))} == {Verdict.PASSED}


@pytest.mark.parametrize("kind", [Keeps, Shortens, SweepsAll, Fills])
def test_a_store_that_is_not_right_fails(kind: type[Plain]) -> None:
    assert Verdict.FAILED in {outcome.verdict for outcome in run(STORE_CHECKS, StoreOf(kind()))}


@pytest.mark.parametrize("kind", [Unordered, Reuses, Forgetful])
def test_a_backing_that_is_not_right_fails(kind: type[ObjectBacking]) -> None:
    assert Verdict.FAILED in {outcome.verdict for outcome in run(BACKING_CHECKS, BackingOf(Plain(), kind))}


def test_a_store_that_removes_nothing_is_no_backing() -> None:
    assert Verdict.FAILED in {outcome.verdict for outcome in run(BACKING_CHECKS, BackingOf(Keeps()))}


def test_a_backing_does_not_believe_its_store() -> None:
    assert {outcome.verdict for outcome in run(BACKING_CHECKS, BackingOf(Fills()))} == {Verdict.PASSED}
