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
        """Seconds to decode one token of each of `rows` rows: interpolated, and constant beyond the ends."""
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
    """Costs and budget of a job; the module docstring shows one as TOML."""

    batch_rows: int
    devices: int
    generation: GenerationProfile
    train: StageProfile
    stages: list[StageProfile] = []
    depths: tuple[int, ...] = (0, 1)


def load(path: Path) -> Profile:
    """Read and check a profile. Raises `NotFound` if the file does not exist, `UsageError` if it is no valid profile."""
    try:
        profile = msgspec.toml.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError as error:
        raise NotFound(f"profile {path} does not exist; `transferqueue docs simulation` shows one") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"profile {path} is not one: {error}; `transferqueue docs simulation` shows one") from error
    check(profile)
    return profile


def check(profile: Profile) -> None:
    """Raise `UsageError` for values with which no plan exists."""
    generation = profile.generation
    _need(profile.batch_rows > 0, "batch_rows", profile.batch_rows, "a positive number of rows")
    _need(bool(profile.depths) and min(profile.depths) >= 0, "depths", list(profile.depths), "numbers from 0 on")
    _need(bool(generation.lengths) and min(generation.lengths) > 0, "generation.lengths", "", "positive tokens")
    _need(generation.slots > 0, "generation.slots", generation.slots, "a positive number of rows")
    rows = [at for at, _ in generation.token_ms]
    rising = bool(rows) and rows == sorted(set(rows)) and min(ms for _, ms in generation.token_ms) > 0
    _need(rising, "generation.token_ms", generation.token_ms, "pairs of rows, ascending, and positive milliseconds")
    for stage in (*profile.stages, profile.train):
        _need(
            min(stage.row_s, stage.call_s, stage.update_s) >= 0,
            stage.name,
            stage.row_s,
            "seconds that are not negative",
        )
        _need(stage.devices >= 0, f"{stage.name}.devices", stage.devices, "a number from 0 on")
    _need(profile.train.row_s > 0, "train.row_s", profile.train.row_s, "positive seconds")
    least = generation.devices + profile.train.devices + sum(stage.devices for stage in profile.stages)
    _need(min(generation.devices, profile.train.devices) > 0, "devices", 0, "positive for generation and train")
    _need(least <= profile.devices, "devices", profile.devices, f"at least {least}: one instance of everything")


def _need(holds: bool, subject: str, value: object, rule: str) -> None:
    if not holds:
        raise UsageError(f"profile: {subject}={value} is not {rule}")


def calibrated(profile: Profile, timeline: Path) -> tuple[Profile, dict[str, float]]:
    """Return `profile` with `row_s` of every stage that works in `timeline` (written by `write_chrome_trace`), and these values by stage.

    `row_s` is the busy time over the rows; `call_s` of such a stage becomes 0, since the busy time includes it.
    """
    try:
        events = json.loads(timeline.read_text(encoding="utf-8"))["traceEvents"]
        seconds_by_stage = dict(_row_seconds(events))
    except FileNotFoundError as error:
        raise NotFound(f"timeline {timeline} does not exist; a run of a flow writes one") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"timeline {timeline} is not a trace of a flow: {error}") from error
    stage_names = [stage.name for stage in (*profile.stages, profile.train)]
    if not set(seconds_by_stage) & set(stage_names):
        raise UsageError(
            f"timeline {timeline} shows {sorted(seconds_by_stage)} at work, but none of {stage_names}; name the stages alike"
        )

    def measured(work: StageProfile) -> StageProfile:
        return (
            msgspec.structs.replace(work, row_s=seconds_by_stage[work.name], call_s=0.0)
            if work.name in seconds_by_stage
            else work
        )

    stages = [measured(stage) for stage in profile.stages]
    return msgspec.structs.replace(profile, stages=stages, train=measured(profile.train)), seconds_by_stage


def _row_seconds(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the seconds a row of each stage; the processes ``name-0``, ``name-1`` are replicas of one stage."""
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    busy: dict[str, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and event["name"] == WORK and event["args"].get("rows", 0) > 0:
            sums = busy.setdefault(_stage(names[event["pid"]]), [0.0, 0.0])
            sums[0] += event["dur"] / 1e6
            sums[1] += event["args"]["rows"]
    for name, (seconds, rows) in busy.items():
        yield name, seconds / rows


def _stage(label: str) -> str:
    name, _, number = label.rpartition("-")
    return name if name and number.isdigit() else label
