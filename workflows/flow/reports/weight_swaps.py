"""How long generation stands still for new weights, measured from the spans of its processes.

A generating process changes weights between two requests. Each change has two times:

- *swap*: from requesting the version until it is loaded. There are rows to generate, and none is generated.
- *gap*: from the end of the request before until the end of the swap. It includes the time in which the process
  waited for rows; if the trainer is the slower side, that wait comes from the pacing and not from the weights.

Generation does not pause when the longest swap is shorter than one request.

The *publish lag* of a change is the time from the publication of its version until a generating process has loaded it;
rows that begin in between are one version behind. It includes the rest of the request before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from transferqueue.workflows.flow.events import PUBLISH, SWAP, WEIGHTS, WORK, TimeSpan


@dataclass(frozen=True, kw_only=True)
class Swaps:
    """Changes of weights over all processes, in seconds; all 0 if there were none. request_s: median duration of a
    request."""

    count: int
    swap_s_max: float
    gap_s_max: float
    request_s: float

    def text(self) -> str:
        """Return one line."""
        return (
            f"{1000 * self.swap_s_max:.1f} ms at most to take weights ({1000 * self.gap_s_max:.1f} with waiting for "
            f"rows); a request takes {1000 * self.request_s:.1f} ms"
        )


NO_SWAPS: Final = Swaps(count=0, swap_s_max=0.0, gap_s_max=0.0, request_s=0.0)


def swaps_of(processes: Iterable[Sequence[TimeSpan]]) -> Swaps:
    """Measure the changes of weights of ``processes``, the spans of each in the order in which they ended.

    >>> spans = [TimeSpan(name="work", start=0.0, end=2.0), TimeSpan(name="swap", start=2.5, end=2.6)]
    >>> spans += [TimeSpan(name="work", start=2.5, end=5.0)]
    >>> swaps_of([spans])
    Swaps(count=1, swap_s_max=0.1, gap_s_max=0.6, request_s=2.25)
    """
    processes = list(processes)
    changes = [pair for spans in processes for pair in _changes(spans)]
    requests = [span.end - span.start for spans in processes for span in spans if span.name == WORK]
    return Swaps(
        count=len(changes),
        swap_s_max=round(max((swap for swap, _ in changes), default=0.0), 4),
        gap_s_max=round(max((gap for _, gap in changes), default=0.0), 4),
        request_s=round(median(requests), 4) if requests else 0.0,
    )


def _changes(spans: Sequence[TimeSpan]) -> Iterator[tuple[float, float]]:
    work_end: float | None = None
    for span in spans:
        if span.name == WORK:
            work_end = span.end
        elif span.name == SWAP and work_end is not None:
            yield span.end - span.start, span.end - work_end


def publish_lag_s(generators: Iterable[Sequence[TimeSpan]], trainers: Iterable[Sequence[TimeSpan]]) -> float:
    """Return the median publish lag over all changes of weights, in seconds; 0 if none is known. A version counts from
    its first publication.

    >>> swap = TimeSpan(name="swap", start=2.5, end=3.0, version=1)
    >>> publish_lag_s([[swap]], [[TimeSpan(name="publish", start=1.0, end=1.5, version=1)]])
    1.5
    """
    published: dict[int, float] = {}
    for span in (span for spans in trainers for span in spans if span.name == PUBLISH):
        published.setdefault(span.version, span.end)
    applied = [span for spans in generators for span in spans if span.name in (SWAP, WEIGHTS)]
    lags = [max(0.0, span.end - published[span.version]) for span in applied if span.version in published]
    return round(median(lags), 4) if lags else 0.0
