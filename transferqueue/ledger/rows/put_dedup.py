"""Which call put which rows, so that a put that is sent again, even after its client was gone for a while, adds
nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from transferqueue.ledger.rows.row_pages import SHIFT
from transferqueue.limits import BLOCK_ROWS_MAX

_COUNT_BITS: Final = BLOCK_ROWS_MAX.bit_length()
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1


class KnownPuts:
    """The puts of a table whose last row is in a page that exists.

    An entry is one bytes object (client and call) and one integer (first row and number of rows): neither is looked at
    by Python's garbage collector, and a table of rows that were put one by one has one for each.
    """

    __slots__ = ("_by_call", "_of_page")

    def __init__(self) -> None:
        self._by_call: dict[bytes, int] = {}
        self._of_page: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        """Number of puts that are known."""
        return len(self._by_call)

    def find(self, client: bytes, call: int) -> tuple[int, int] | None:
        """The first row and the number of rows of this put; None: it is not known."""
        entry = self._by_call.get(client + call.to_bytes(8, "little"))
        return None if entry is None else (entry >> _COUNT_BITS, entry & _COUNT_MASK)

    def add(self, client: bytes, call: int, first: int, rows: int) -> None:
        """Remember a put of at least one row."""
        key = client + call.to_bytes(8, "little")
        self._by_call[key] = first << _COUNT_BITS | rows
        self._of_page.setdefault((first + rows - 1) >> SHIFT, []).append(key)

    @property
    def stored(self) -> dict[bytes, int]:
        """The puts as an image has them. Set it to have them back."""
        return self._by_call

    @stored.setter
    def stored(self, by_call: dict[bytes, int]) -> None:
        """The puts as an image has them. The setter restores them."""
        self._by_call = by_call
        for key, entry in by_call.items():
            last = (entry >> _COUNT_BITS) + (entry & _COUNT_MASK) - 1
            self._of_page.setdefault(last >> SHIFT, []).append(key)

    def forget(self, pages: Iterable[int]) -> None:
        """Forget the puts whose last rows were in these pages."""
        for page in pages:
            for key in self._of_page.pop(page, ()):
                self._by_call.pop(key, None)

    def forget_all(self) -> None:
        """Forget every put."""
        self._by_call.clear()
        self._of_page.clear()
