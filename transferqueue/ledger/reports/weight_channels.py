"""Texts about a weight channel: the latest version, who generates with which, who never applied one, who updates
now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from transferqueue.ledger.requests.weight_channels import WeightChannelState
from transferqueue.limits import HEARTBEAT_S

if TYPE_CHECKING:
    from transferqueue.ledger.table_state import SharedState

NAMES_SHOWN: Final = 4
_SILENT_S: Final = 2 * HEARTBEAT_S
"""A live client sends something every `HEARTBEAT_S`; one late message is not reported."""


def channel_lines(channel: WeightChannelState, core: SharedState, now: float) -> list[str]:
    """Sentences about the channel. Those about replicas are grouped by version, newest first."""
    return [
        _latest(channel, now),
        *_applied(channel, core, now),
        *_never_applied(channel, core, now),
        *_update_slots(channel, core, now),
        *([channel.pending.explain()] if channel.pending is not None and channel.pending.is_coming else ()),
    ]


def _latest(channel: WeightChannelState, now: float) -> str:
    newest = channel.versions.get(channel.latest)
    if newest is None:
        return "nothing was published yet"
    return f"version {channel.latest} is the latest, published {now - newest.at:.0f} s ago"


def _applied(channel: WeightChannelState, core: SharedState, now: float) -> Iterator[str]:
    if channel.versions and not channel.applied:
        yield "no reader has applied a version"
    versions = sorted({applied.version for applied in channel.applied.values()}, reverse=True)
    for version in versions:
        mine = {session: applied for session, applied in channel.applied.items() if applied.version == version}
        since = min(applied.at for applied in mine.values())
        behind = f", {channel.latest - version} behind" if version < channel.latest else ""
        verb = "generates" if len(mine) == 1 else "generate"
        yield f"{_names(mine, core, now)} {verb} with version {version}{behind}, for {now - since:.0f} s"


def _never_applied(channel: WeightChannelState, core: SharedState, now: float) -> Iterator[str]:
    """Sessions that hold bytes of a version and never reported that they generate with one."""
    blocks = {block for version in channel.versions.values() for block in version.blocks}
    sessions = [
        session for session, pins in core.blocks.pins.items() if session not in channel.applied and blocks & pins.keys()
    ]
    if sessions:
        verb = "has" if len(sessions) == 1 else "have"
        yield f"{_names(sessions, core, now)} {verb} pulled a version and never applied one"


def _update_slots(channel: WeightChannelState, core: SharedState, now: float) -> Iterator[str]:
    for session, turn in channel.update_slots.items():
        left = "" if turn.deadline is None else f", for {max(turn.deadline - now, 0):.0f} s more at most"
        yield f"{_names([session], core, now)} has an update slot{left}"


def _names(sessions: Iterable[int], core: SharedState, now: float) -> str:
    known = list(sessions)
    names = ", ".join(_name(session, core, now) for session in known[:NAMES_SHOWN])
    return names + (f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else "")


def _name(session: int, core: SharedState, now: float) -> str:
    silent = core.silent_s(session, now)
    return (core.labels.get(session) or f"session {session}") + (
        f" (silent {silent:.0f} s)" if silent >= _SILENT_S else ""
    )
