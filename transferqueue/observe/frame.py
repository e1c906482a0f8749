"""What `top` shows at one moment: a snapshot, and the rates since the one before it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from transferqueue.observe.coordinators import Silent
from transferqueue.observe.rates import TableRates, rates
from transferqueue.observe.stats import Stats


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame. interval_s: what the rates were measured over, None in the first frame, which has none."""

    address: str
    interval_s: float | None
    stats: Stats
    rates: dict[str, TableRates]


def frame(address: str, before: Stats | None, after: Stats) -> Frame:
    """The frame of `after`, with rates since `before`."""
    if before is None:
        return Frame(address=address, interval_s=None, stats=after, rates={})
    return Frame(address=address, interval_s=after.now_s - before.now_s, stats=after, rates=rates(before, after))


def frames(before: Mapping[str, Stats | Silent], after: Mapping[str, Stats | Silent]) -> list[Frame | Silent]:
    """The frame of each coordinator, by address; rates of those that were seen before."""
    return [
        now if isinstance(now, Silent) else _since(address, before.get(address), now) for address, now in after.items()
    ]


def _since(address: str, before: Stats | Silent | None, after: Stats) -> Frame:
    return frame(address, None if isinstance(before, Silent) else before, after)
