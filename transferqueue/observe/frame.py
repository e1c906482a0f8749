"""What `top` shows at one moment: a snapshot, and the rates since the one before it."""

from __future__ import annotations

import msgspec

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
