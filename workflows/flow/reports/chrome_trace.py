"""Spans of a flow as a Chrome trace: open it at https://ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format", Google, 2016: complete events (``ph`` X) in microseconds. Each process of the flow is a
process of the trace, with separate tracks for busy and waiting time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from transferqueue.workflows.flow.events import WAIT, WORK, Figures, TimeSpan

_TRACKS: Final = {WORK: 1, WAIT: 2}
_OTHER_TRACK: Final = 3
_TRACK_NAMES: Final = {1: "busy", 2: "waiting", 3: "within"}


def write_chrome_trace(path: Path, spans: Mapping[str, Sequence[TimeSpan]], counters: Iterable[Figures] = ()) -> None:
    """Write the spans of each process, and counters over time, to `path`. Time 0 is the earliest of them."""
    counters = list(counters)
    zero = min(
        (*(span.start for of_one in spans.values() for span in of_one), *(figures.at for figures in counters)),
        default=0.0,
    )
    events = [
        event for number, name in enumerate(spans, start=1) for event in _process(number, name, spans[name], zero)
    ]
    events += [event for figures in counters for event in _counters(figures, zero)]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def _process(number: int, name: str, spans: Sequence[TimeSpan], zero: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
    tracks = sorted({_track(span) for span in spans})
    for track in tracks:
        yield {"ph": "M", "pid": number, "tid": track, "name": "thread_name", "args": {"name": _TRACK_NAMES[track]}}
    for span in spans:
        yield {
            "ph": "X",
            "pid": number,
            "tid": _track(span),
            "name": span.name,
            "ts": round((span.start - zero) * 1e6),
            "dur": max(1, round((span.end - span.start) * 1e6)),
            "args": {key: value for key, value in (("rows", span.rows), ("version", span.version)) if value >= 0},
        }


def _track(span: TimeSpan) -> int:
    return _TRACKS.get(span.name, _OTHER_TRACK)


def _counters(figures: Figures, zero: float) -> Iterator[dict[str, Any]]:
    at = round((figures.at - zero) * 1e6)
    for name, value in figures.values.items():
        if isinstance(value, int | float):
            yield {"ph": "C", "pid": 0, "name": name, "ts": at, "args": {name: value}}
