"""The report of a run: its figures, its verdict, and the command that repeats it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from bench.measurement_record import MeasuredResult, rounded, single
from tests.chaos import recovery
from tests.chaos.fault_plan import PROXY, ChaosSettings, Fault
from tests.chaos.log import ReadLog
from tests.chaos.recovery import Times
from tests.chaos.verify import Account

VIOLATIONS_MAX: Final = 20
"""Violations that a record quotes, since records have a limited size. All are printed when the run ends."""
VIOLATION_CHARACTERS_MAX: Final = 200


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of a list of times, in seconds."""

    samples: int
    p10: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, times: Times) -> Spread:
        """The percentiles of these times."""
        return cls(len(times.samples), *(round(times.at(share), 4) for share in (0.1, 0.5, 0.9, 0.99, 1.0)))

    def results(self, name: str) -> list[MeasuredResult]:
        """These figures as results of a record."""
        middle = rounded(MeasuredResult(name, "s", self.samples, self.p50, self.p10, self.p90))
        return [middle, single(f"{name}_p99", "s", self.p99), single(f"{name}_most", "s", self.most)]


class Longest(msgspec.Struct, frozen=True):
    """The longest turns of one kind of the server's loop, over all serving processes, up to the probe's last call.

    seconds: by the clock, so with the time for which the server was frozen or the machine ran something else. busy_s:
    by processor time, of the turns above 20 ms by the clock (0: there was none). late: turns above 20 ms by processor
    time, counted by their subject."""

    seconds: float
    of: str
    busy_s: float
    busy_of: str
    late: dict[str, int]


class Report(msgspec.Struct, frozen=True):
    """The figures of a run.

    Attributes:
        load: Load average of the machine over the last minute, by core.
        faults: Count of each kind.
        verified: Rows leased whose bytes were all compared.
        turns: The longest turns by kind.
    """

    command: str
    load: float
    faults: dict[str, int]
    faults_of_processes: int
    rows: dict[str, int]
    verified: int
    late_acks: int
    dropped_stale: int
    lost: int
    duplicates: int
    bounds_broken: int
    violations: list[str]
    server_recovery_s: Spread
    redelivery_s: Spread
    redelivery_remote_s: Spread
    turns: dict[str, Longest]
    spill: dict[str, Any] | None = None
    """What the server says of its disk at the end; None: it has none."""

    @property
    def kept(self) -> bool:
        """Whether the run has no violation."""
        return not self.violations

    def lines(self) -> Iterator[str]:
        """The report as lines of text."""
        kinds = ", ".join(f"{kind} {times}" for kind, times in self.faults.items())
        yield f"load of the machine   {self.load} processes a core, over its last minute"
        yield f"faults of processes   {self.faults_of_processes} ({kinds})"
        yield f"rows                  {', '.join(f'{name} {rows:,}' for name, rows in self.rows.items())}"
        yield (
            f"verified              {self.verified:,} rows leased, every byte; {self.late_acks} acks were late and "
            "refused"
        )
        yield (
            f"dropped as declared   {self.dropped_stale} rows came over the staleness bound: their producer was frozen"
        )
        yield f"server recovery       {_spread(self.server_recovery_s)}"
        yield f"rows leased again     {_spread(self.redelivery_s)}"
        if self.redelivery_remote_s.samples:
            yield f"  of remote workers   {_spread(self.redelivery_remote_s)}"
        if self.spill is not None:
            text = (
                "spilled               {spilled_blocks:,} blocks, {spilled_bytes:,} bytes; {loaded_blocks:,} came back"
            )
            yield text.format_map(self.spill)
        yield from (f"longest {kind:<13} {_turn(longest)}" for kind, longest in self.turns.items())
        yield f"lost {self.lost}, duplicate effects {self.duplicates}, bounds broken {self.bounds_broken}"
        yield from (f"violation: {violation}" for violation in self.violations)
        yield f"verdict               {'every promise was kept' if self.kept else 'BROKEN'}"
        yield f"again                 {self.command}"

    def results(self) -> list[MeasuredResult]:
        """The figures as results of a record."""
        counts = {
            "faults_of_processes": self.faults_of_processes,
            **{f"faults/{kind}": times for kind, times in self.faults.items()},
            **{f"rows/{table}": rows for table, rows in self.rows.items()},
            "verified": self.verified,
            "late_acks": self.late_acks,
            "dropped_stale": self.dropped_stale,
            "lost": self.lost,
            "duplicates": self.duplicates,
            "bounds_broken": self.bounds_broken,
            "violations": len(self.violations),
            **({name: self.spill[name] for name in ("spilled_blocks", "loaded_blocks")} if self.spill else {}),
        }
        times = {
            "server_recovery": self.server_recovery_s,
            "redelivery": self.redelivery_s,
            "redelivery_remote": self.redelivery_remote_s,
        }
        return [
            *(single(name, "count", value) for name, value in counts.items()),
            *(result for name, spread in times.items() if spread.samples for result in spread.results(name)),
            *(single(f"turn/{kind}/longest", "s", turn.seconds) for kind, turn in self.turns.items()),
            *(single(f"turn/{kind}/longest_busy", "s", turn.busy_s) for kind, turn in self.turns.items()),
        ]

    def details(self) -> dict[str, Any]:
        """The verdict and the texts of violations, as details of a record."""
        return {
            "kept": self.kept,
            "violations": [text[:VIOLATION_CHARACTERS_MAX] for text in self.violations[:VIOLATIONS_MAX]],
            "load_a_core": self.load,
            "turns": {kind: {"longest": turn.of, "late": turn.late} for kind, turn in self.turns.items()},
        }


def report(run: ChaosSettings, faults: Sequence[Fault], logs: Sequence[ReadLog], violations: Sequence[str]) -> Report:
    """Check the event logs of a run and sum it up. violations: those seen during the run, which ended it early."""
    account = Account(logs, drained=not violations)
    return Report(
        command=run.command,
        load=round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        faults=dict(Counter(_name(kind, target) for _, kind, target, _ in faults).most_common()),
        faults_of_processes=sum(fault.target != PROXY for fault in faults),
        rows=account.rows,
        verified=account.verified,
        late_acks=sum(task.late for task in account.tasks.values()),
        dropped_stale=account.stale,
        lost=account.lost,
        duplicates=account.duplicates,
        bounds_broken=account.bounds,
        violations=[*violations, *account.violations],
        server_recovery_s=Spread.of(recovery.of_server(faults, logs)),
        redelivery_s=Spread.of(recovery.of_leases(faults, logs, remote=False)),
        redelivery_remote_s=Spread.of(recovery.of_leases(faults, logs, remote=True)),
        turns=longest_turns(logs),
        spill=account.spill,
    )


def longest_turns(logs: Sequence[ReadLog]) -> dict[str, Longest]:
    """The longest turns of each kind, over all serving processes. The last half second before a death is not
    covered."""
    lives: dict[int, dict[str, Any]] = {line[2]: line[3] for log in logs for line in log.of("turns")}
    kinds = {kind for turns in lives.values() for kind in turns}
    longest_by_kind = {}
    for kind in sorted(kinds):
        turns = [life[kind] for life in lives.values()]
        longest, busiest = (
            max(turns, key=lambda turn: turn["longest_s"]),
            max(turns, key=lambda turn: turn["busiest_s"]),
        )
        late: Counter[str] = Counter()
        for turn in turns:
            late.update(turn["late"])
        longest_by_kind[kind] = Longest(
            longest["longest_s"], longest["longest_of"], busiest["busiest_s"], busiest["busiest_of"], dict(late)
        )
    return longest_by_kind


def _turn(longest: Longest) -> str:
    late = (
        f"; over 20 ms of it {sum(longest.late.values())} times ({longest.late})"
        if longest.late
        else "; never over 20 ms of it"
    )
    busy = f", of processor time {longest.busy_s * 1000:.1f} ms ({longest.busy_of})" if longest.busy_s else ""
    return f"turn {longest.seconds * 1000:.1f} ms by the clock ({longest.of}){busy}{late}"


def _name(kind: str, target: str) -> str:
    return f"{target.partition('-')[0]} {kind}"


def _spread(times: Spread) -> str:
    return f"p50 {times.p50:.3f} s, p99 {times.p99:.3f} s, most {times.most:.3f} s ({times.samples} times)"
