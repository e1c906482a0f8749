"""The profile of a job: what a planner is told, from TOML or from the timeline of a real run.

Seconds are those of one instance. A device count is of one instance, too::

    batch_rows = 512            # rows of a trainer's step
    devices = 64                # the budget
    depths = [0, 1]             # batches ahead that may be tried; 0 is synchronous

    [generation]
    devices = 4
    slots = 32                  # rows that the memory of one instance holds at once
    token_ms = [[1, 8.3], [32, 10.2], [512, 36.9]]   # milliseconds of a token of all, by rows at once
    lengths = [812, 3200, 12900]                     # observed output lengths, tokens

    [[stages]]
    name = "reward"
    row_s = 0.2
    call_s = 0.0
    devices = 0                 # 0: it needs none of the budget

    [train]
    row_s = 0.9                 # of one unit; units share a batch
    call_s = 1.0                # of every micro-batch, however many units
    devices = 8
    update_s = 2.0
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.events import WORK


class GenerationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation instance."""

    devices: int
    slots: int
    token_ms: list[tuple[int, float]]
    lengths: list[int]

    def token_s(self, rows: int) -> float:
        """Seconds of one token of each of ``rows`` rows; interpolated, and as at the end beyond it."""
        at, ms = zip(*self.token_ms, strict=True)
        return float(np.interp(rows, at, ms)) / 1000


class StageProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage, or one unit of the trainer. Seconds."""

    row_s: float
    name: str = "train"
    call_s: float = 0.0
    devices: int = 0
    update_s: float = 0.0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job costs, and what it may use; the module shows it as TOML."""

    batch_rows: int
    devices: int
    generation: GenerationProfile
    train: StageProfile
    stages: list[StageProfile] = []
    depths: tuple[int, ...] = (0, 1)


def load(path: Path) -> Profile:
    """Read and check a profile. `NotFound` for no such file, `UsageError` for what is not a profile."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError as error:
        raise NotFound(f"profile {path} does not exist; docs/SIMULATION.md shows one") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"profile {path} is not one: {error}; docs/SIMULATION.md shows one") from error
    check(found)
    return found


def check(profile: Profile) -> None:
    """`UsageError` for numbers with which no plan exists."""
    generation = profile.generation
    _need(profile.batch_rows > 0, "batch_rows", profile.batch_rows, "a positive number of rows")
    _need(bool(profile.depths) and min(profile.depths) >= 0, "depths", list(profile.depths), "numbers from 0 on")
    _need(bool(generation.lengths) and min(generation.lengths) > 0, "generation.lengths", "", "positive tokens")
    _need(generation.slots > 0, "generation.slots", generation.slots, "a positive number of rows")
    rows = [at for at, _ in generation.token_ms]
    rising = bool(rows) and rows == sorted(set(rows)) and min(ms for _, ms in generation.token_ms) > 0
    _need(rising, "generation.token_ms", generation.token_ms, "pairs of rows, ascending, and positive milliseconds")
    for one in (*profile.stages, profile.train):
        _need(min(one.row_s, one.call_s, one.update_s) >= 0, one.name, one.row_s, "seconds that are not negative")
        _need(one.devices >= 0, f"{one.name}.devices", one.devices, "a number from 0 on")
    _need(profile.train.row_s > 0, "train.row_s", profile.train.row_s, "positive seconds")
    least = generation.devices + profile.train.devices + sum(one.devices for one in profile.stages)
    _need(min(generation.devices, profile.train.devices) > 0, "devices", 0, "positive for generation and train")
    _need(least <= profile.devices, "devices", profile.devices, f"at least {least}: one instance of everything")


def _need(holds: bool, subject: str, value: object, rule: str) -> None:
    if not holds:
        raise UsageError(f"profile: {subject}={value} is not {rule}")


def calibrated(profile: Profile, timeline: Path) -> tuple[Profile, dict[str, float]]:
    """``profile`` with ``row_s`` of every stage that ``timeline`` (`write_chrome_trace`) shows at work, and what was found.

    The seconds a row are the busy time over the rows; ``call_s`` of such a stage becomes 0, since it is in them.
    """
    try:
        events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
        found = dict(_row_seconds(events))
    except FileNotFoundError as error:
        raise NotFound(f"timeline {timeline} does not exist; a run of a flow writes one") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"timeline {timeline} is not a trace of a flow: {error}") from error
    known = [one.name for one in (*profile.stages, profile.train)]
    if not set(found) & set(known):
        raise UsageError(
            f"timeline {timeline} shows {sorted(found)} at work, but none of {known}; name the stages alike"
        )

    def measured(work: StageProfile) -> StageProfile:
        return msgspec.structs.replace(work, row_s=found[work.name], call_s=0.0) if work.name in found else work

    stages = [measured(one) for one in profile.stages]
    return msgspec.structs.replace(profile, stages=stages, train=measured(profile.train)), found


def _row_seconds(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Seconds a row of each stage; processes ``name-0``, ``name-1`` are replicas of one."""
    names = {one["pid"]: one["args"]["name"] for one in events if one.get("name") == "process_name"}
    busy: dict[str, list[float]] = {}
    for one in events:
        if one.get("ph") == "X" and one["name"] == WORK and one["args"].get("rows", 0) > 0:
            sums = busy.setdefault(_stage(names[one["pid"]]), [0.0, 0.0])
            sums[0] += one["dur"] / 1e6
            sums[1] += one["args"]["rows"]
    for name, (seconds, rows) in busy.items():
        yield name, seconds / rows


def _stage(label: str) -> str:
    name, _, number = label.rpartition("-")
    return name if name and number.isdigit() else label
