"""The profile of a job, the planner's input. `transferqueue profile` measures and writes it; the timeline of a real run
may replace parts.

Seconds are those of one instance. A device count is of one instance, too::

    batch_rows = 512            # rows of a trainer's step
    devices = 64                # the budget
    depths = [0, 1]             # batches ahead that may be tried; 0 is synchronous
    by_length = false           # engines take the longest rows first (dispatch.kind = "length")

    [generation]
    devices = 4
    slots = 32                  # rows that the memory of one instance holds at once
    slots_tried = [16, 32]      # numbers of rows to choose from (none: slots)
    prompt_ms = 4.0             # of one prompt, before its first token; the other rows wait
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
    step_s = 0.5                # of every step, after its last row: the optimizer
    update_s = 2.0              # until the new weights generate; the trainer goes on meanwhile
    instances_max = 0           # units that may share a batch (0: as many as there are devices)

Times between two points of `token_ms` are interpolated; beyond the last point they grow in proportion to the rows.

A trial run of the whole job measures how much its processes slow each other, by depth (the nearest depth counts;
without a trial, not at all)::

    [[trials]]
    depth = 0
    generation = 1.4            # times the time of generation alone
    train = 1.1
    wait_s = 0.05               # of a step, in which neither works

Devices of several kinds replace `devices`. A kind may have its own costs; `price` is of one device for an hour, in any
currency::

    link_s = 5.0                # until a version has reached another site

    [[kinds]]
    name = "h20"
    devices = 32
    price = 1.3
    site = "a"
    [kinds.generation]          # as above; lengths and slots_tried may be left out
    [kinds.train]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.events import WORK
from transferqueue.workflows.planner.engine_times import DecodeCurve


class GenerationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation instance."""

    devices: int
    slots: int
    token_ms: list[tuple[int, float]]
    lengths: list[int] = []
    slots_tried: list[int] = []
    prompt_ms: float = 0.0

    @property
    def curve(self) -> DecodeCurve:
        """Milliseconds of a token by rows at once."""
        rows, ms = zip(*self.token_ms, strict=True)
        return DecodeCurve(tuple(map(float, rows)), tuple(map(float, ms)))


class StageProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage, or one unit of the trainer. Seconds."""

    row_s: float
    name: str = "train"
    call_s: float = 0.0
    devices: int = 0
    step_s: float = 0.0
    update_s: float = 0.0
    instances_max: int = 0


class TrialFactors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Factors that a trial run showed.

    Args:
        depth: of the trial.
        generation: busy time of generation over that of the same plan predicted from generation alone; default 1.0.
        train: the same of training; default 1.0.
        wait_s: seconds of a step beyond that; default 0.0.
    """

    depth: int
    generation: float = 1.0
    train: float = 1.0
    wait_s: float = 0.0

    def generating(self, alone: GenerationProfile) -> GenerationProfile:
        """Return the costs of generation in the whole job.

        Args:
            alone: costs of generation alone.
        """
        token_ms = [(rows, ms * self.generation) for rows, ms in alone.token_ms]
        return msgspec.structs.replace(alone, token_ms=token_ms, prompt_ms=alone.prompt_ms * self.generation)

    def training(self, alone: StageProfile) -> StageProfile:
        """Return the costs of training in the whole job. A step waits before its weights generate.

        Args:
            alone: costs of training alone.
        """
        return msgspec.structs.replace(
            alone,
            row_s=alone.row_s * self.train,
            call_s=alone.call_s * self.train,
            step_s=alone.step_s * self.train,
            update_s=alone.update_s + self.wait_s,
        )


class DeviceKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices of one kind at one site.

    Args:
        name: of the kind.
        devices: their number.
        price: of one device for an hour, in any currency; default 1.0.
        site: name of the site; default "".
        generation: costs on them; default None: those of the profile.
        train: costs on them; default None: those of the profile.
    """

    name: str
    devices: int
    price: float = 1.0
    site: str = ""
    generation: GenerationProfile | None = None
    train: StageProfile | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs and budget of a job; the module docstring shows one as TOML. group_rows: of a prompt. streams: a step may
    begin with a part of its rows. by_length: engines take the longest rows first.
    """

    batch_rows: int
    generation: GenerationProfile
    train: StageProfile
    stages: list[StageProfile] = []
    depths: tuple[int, ...] = (0, 1)
    devices: int = 0
    kinds: list[DeviceKind] = []
    link_s: float = 0.0
    group_rows: int = 1
    streams: bool = True
    by_length: bool = False
    trials: list[TrialFactors] = []

    def factors(self, depth: int) -> TrialFactors:
        """The trial at the nearest depth; no factor without a trial."""
        return min(self.trials, key=lambda trial: abs(trial.depth - depth), default=TrialFactors(depth))

    @property
    def all_kinds(self) -> list[DeviceKind]:
        """The kinds, each with its costs; without any, the devices are of one kind."""
        kinds = self.kinds or [DeviceKind(name="", devices=self.devices)]
        return [
            msgspec.structs.replace(kind, generation=self._generation(kind.generation), train=kind.train or self.train)
            for kind in kinds
        ]

    def _generation(self, own: GenerationProfile | None) -> GenerationProfile:
        generation = own or self.generation
        return msgspec.structs.replace(
            generation,
            lengths=generation.lengths or self.generation.lengths,
            slots_tried=generation.slots_tried or [generation.slots],
        )


def load(path: Path) -> Profile:
    """Read and check a profile.

    Args:
        path: of a TOML file.

    Raises:
        NotFound: the file does not exist.
        UsageError: an invalid profile.
    """
    try:
        profile = msgspec.toml.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError as error:
        raise NotFound(f"profile {path} does not exist; `transferqueue docs plan` shows one") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"profile {path} is not one: {error}; `transferqueue docs plan` shows one") from error
    check(profile)
    return profile


def check(profile: Profile) -> None:
    """Raise `UsageError` for values with which no plan exists."""
    _need(profile.batch_rows > 0, "batch_rows", profile.batch_rows, "a positive number of rows")
    _need(bool(profile.depths) and min(profile.depths) >= 0, "depths", list(profile.depths), "numbers from 0 on")
    _need(0 <= profile.link_s < math.inf, "link_s", profile.link_s, "seconds that are not negative")
    _need(profile.group_rows > 0, "group_rows", profile.group_rows, "a positive number of rows")
    _check_lengths(profile)
    _check_generation(profile.generation)
    for stage in (*profile.stages, profile.train):
        _check_stage(stage)
    _need(profile.train.row_s > 0, "train.row_s", profile.train.row_s, "positive seconds")
    for trial in profile.trials:
        factors = (trial.generation, trial.train)
        _need(all(0 < each < math.inf for each in factors), "trials", factors, "positive factors")
        _need(0 <= trial.wait_s < math.inf, "trials.wait_s", trial.wait_s, "seconds that are not negative")
    _check_devices(profile)


def _check_lengths(profile: Profile) -> None:
    lengths = profile.generation.lengths
    _need(bool(lengths) and min(lengths) > 0, "generation.lengths", "", "positive tokens")


def _check_generation(generation: GenerationProfile) -> None:
    _need(generation.slots > 0, "generation.slots", generation.slots, "a positive number of rows")
    tried = generation.slots_tried
    rule = f"numbers from 1 to slots={generation.slots}"
    _need(not tried or 1 <= min(tried) <= max(tried) <= generation.slots, "generation.slots_tried", tried, rule)
    _need(0 <= generation.prompt_ms < math.inf, "generation.prompt_ms", generation.prompt_ms, "not negative")
    rows = [at for at, _ in generation.token_ms]
    rising = bool(rows) and rows == sorted(set(rows)) and min(ms for _, ms in generation.token_ms) > 0
    _need(rising, "generation.token_ms", generation.token_ms, "pairs of rows, ascending, and positive milliseconds")
    _need(generation.devices > 0, "generation.devices", generation.devices, "positive")


def _check_stage(stage: StageProfile) -> None:
    seconds = (stage.row_s, stage.call_s, stage.step_s, stage.update_s)
    _need(all(0 <= each < math.inf for each in seconds), stage.name, seconds, "seconds that are not negative")
    _need(stage.devices >= 0, f"{stage.name}.devices", stage.devices, "a number from 0 on")
    _need(stage.instances_max >= 0, f"{stage.name}.instances_max", stage.instances_max, "a number from 0 on")


def _check_devices(profile: Profile) -> None:
    """Some kind must take one instance of generation, and some, perhaps the same, one of everything else."""
    names = [kind.name for kind in profile.all_kinds]
    _need(len(set(names)) == len(names), "kinds", names, "names that differ")
    others = sum(stage.devices for stage in profile.stages)
    _need(profile.train.devices > 0, "devices", 0, "positive for generation and train")
    for kind in profile.all_kinds:
        _need(0 < kind.price < math.inf, f"kinds.{kind.name}.price", kind.price, "positive")
        _need(kind.devices >= 0, f"kinds.{kind.name}.devices", kind.devices, "a number from 0 on")
        if kind.generation and kind.train:
            _check_generation(kind.generation)
            _check_stage(kind.train)
            _need(
                kind.train.row_s > 0 and kind.train.devices > 0,
                f"kinds.{kind.name}.train",
                0,
                "positive seconds and devices",
            )
    least = min(least_devices(kind, other, others) for kind in profile.all_kinds for other in profile.all_kinds)
    total = sum(kind.devices for kind in profile.all_kinds)
    needed = profile.generation.devices + profile.train.devices + others
    _need(least <= 0, "devices", total, f"at least {needed}: one instance of everything")


def least_devices(generates: DeviceKind, trains: DeviceKind, others: int) -> int:
    """Return how many devices are missing for one instance of everything, `others` being those of the stages, which are
    where the trainer is.
    """
    generation = generates.generation.devices if generates.generation else 0
    training = (trains.train.devices if trains.train else 0) + others
    if generates.name == trains.name:
        return generation + training - generates.devices
    return max(generation - generates.devices, 0) + max(training - trains.devices, 0)


def _need(holds: bool, subject: str, value: object, rule: str) -> None:
    if not holds:
        raise UsageError(f"profile: {subject}={value} is not {rule}")


def calibrated(profile: Profile, timeline: Path) -> tuple[Profile, dict[str, float]]:
    """Return a profile with the seconds a row that a run's timeline shows.

    `row_s` of each stage that works in the timeline is its busy time over its rows; its `call_s` becomes 0, since the
    busy time includes it.

    Args:
        profile: the profile.
        timeline: a file that `write_chrome_trace` wrote.

    Returns:
        The profile, and the seconds a row by stage.

    Raises:
        NotFound: the timeline does not exist.
        UsageError: it is no trace of a flow, or shows none of the profile's stages.
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
            f"timeline {timeline} shows {sorted(seconds_by_stage)} at work, but none of {stage_names}; "
            "name the stages alike"
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
