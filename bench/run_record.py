"""The records of benchmarks: written from the samples of scenarios, read back by tables and comparisons.

A run of `bench.run` is a folder with one record for each scenario of each contender; a scenario run by hand is one
file. The form of a record is that of `bench.measurement_record`; the name of a result is
``contender/workload/metric``. Raw samples go to `bench/raw/`, which git ignores.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Result, save_results
from bench.measurement_record import (
    MeasuredResult,
    Measurement,
    MeasurementRecord,
    load_record,
    summarize,
)

RECORDS = ROOT / "bench" / "records"
RAW = ROOT / "bench" / "raw"


@dataclass(frozen=True)
class Summary:
    """One metric as a record has it. nbytes: payload of one repetition, 0 where that has no meaning."""

    scenario: str
    contender: str
    workload: str
    metric: str
    unit: str
    n: int
    median: float
    p10: float
    p90: float
    nbytes: int = 0
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.scenario, self.contender, self.workload, self.metric)


@dataclass(frozen=True)
class RunRecord:
    """The records of one run, by its start. One of them is enough."""

    records: Sequence[MeasurementRecord]

    @property
    def first(self) -> MeasurementRecord:
        """The record that was begun first: it says where, when and how busy the machine was."""
        return min(self.records, key=lambda record: record.start)

    @cached_property
    def summaries(self) -> list[Summary]:
        return [summary for record in self.records for summary in summaries(record)]

    def find(self, scenario: str, contender: str, workload: str, metric: str) -> Summary | None:
        """That result, if it was measured."""
        key = (scenario, contender, workload, metric)
        return next((summary for summary in self.summaries if summary.key == key), None)

    def median(self, scenario: str, contender: str, workload: str, metric: str) -> float | None:
        found = self.find(scenario, contender, workload, metric)
        return found.median if found else None


def load_run(path: Path) -> RunRecord:
    """Read a run: a folder of records, or one record. Raises ValueError if it is neither."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no records; make a run with `make bench`")
    return RunRecord([load_record(file) for file in files])


def summaries(record: MeasurementRecord) -> list[Summary]:
    """The results of one record by scenario, contender, workload and metric."""
    sizes, notes = record.details.get("bytes", {}), record.details.get("notes", {})
    return [_summary(record.kind, result, sizes, notes.get(result.name, "")) for result in record.results]


def _summary(kind: str, result: MeasuredResult, sizes: Mapping[str, int], note: str) -> Summary:
    contender, workload, metric = result.name.split("/")
    nbytes = sizes.get(f"{workload}/{metric}", sizes.get(workload, 0))
    return Summary(kind, contender, workload, metric, *result[1:], nbytes=nbytes, note=note)


# ---------------------------------------------------------------- writing


def measured(results: Iterable[Result]) -> list[MeasuredResult]:
    """Medians and percentiles of the results of one scenario that have samples."""
    return [summarize(_name(result), result.unit, result.raw) for result in results if result.raw]


def details(results: Sequence[Result]) -> dict[str, Any]:
    """What a record says beside the figures: payload by workload, notes, and why something was not measured."""
    found = {
        "bytes": _sizes([result for result in results if result.raw]),
        "notes": {_name(result): result.note for result in results if result.note},
        "skipped": {_name(result): result.skipped for result in results if result.skipped},
    }
    return {name: value for name, value in found.items() if value}


def _name(result: Result) -> str:
    return f"{result.contender}/{result.workload}/{result.metric}"


def _sizes(results: Sequence[Result]) -> dict[str, int]:
    """Bytes by workload; by workload and metric where a metric of it moves another number of bytes."""
    sizes: dict[str, int] = {}
    for workload in dict.fromkeys(result.workload for result in results):
        metrics = {result.metric: result.nbytes for result in results if result.workload == workload}
        usual = Counter(metrics.values()).most_common(1)[0][0]
        sizes[workload] = usual
        sizes |= {f"{workload}/{metric}": nbytes for metric, nbytes in metrics.items() if nbytes != usual}
    return {name: nbytes for name, nbytes in sizes.items() if nbytes or "/" in name}


def save_job(
    folder: Path, contender: str, began: Measurement, versions: Mapping[str, str], results: Sequence[Result]
) -> None:
    """Write one record for each scenario among the results of a job."""
    for scenario in dict.fromkeys(result.scenario for result in results):
        mine = [result for result in results if result.scenario == scenario]
        record = began.record(scenario, measured(mine), versions=versions, details=details(mine))
        record.save(folder / f"{scenario}-{contender}.json")


def stamped(name: str, began: Measurement) -> str:
    """The name of a record, without the end: what was measured, and when."""
    return f"{name}-{began.start:%Y%m%d-%H%M%S}"


def save_record(
    began: Measurement,
    folder: Path | None,
    kind: str,
    results: Sequence[MeasuredResult],
    details: Mapping[str, Any],
    *,
    name: str = "",
) -> None:
    """Write the record of a benchmark run by hand into a folder (None: nowhere), and print where. name: default the
    kind."""
    if folder is None:
        return
    path = folder / f"{stamped(name or kind, began)}.json"
    began.record(kind, results, details=details).save(path)
    print(f"wrote {path}")


def show(results: Iterable[MeasuredResult]) -> None:
    """Print one line a result."""
    for line in results:
        print(f"{line.name:55} {line.median:8.4g} {line.unit}   (p10 {line.p10:.3g}, p90 {line.p90:.3g}, n {line.n})")


def into_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--into``, the folder that `save_record` takes: no record without it."""
    parser.add_argument("--into", type=Path, help="folder for the record")


def by_hand_options(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add ``--out`` and ``--record``, as `ByHand.tell` takes them. required: of ``--out``."""
    parser.add_argument("--out", type=Path, required=required)
    parser.add_argument("--record", action="store_true", help="write a whole record, not only results")


@dataclass
class ByHand:
    """One scenario run by hand: when it began and how busy the machine was, for `tell`."""

    scenario: str
    began: Measurement = field(default_factory=Measurement)

    def tell(self, results: list[Result], out: Path | None, *, whole: bool) -> None:
        """Print the medians, and write them to `out` (None: nowhere).

        whole: as a record, with the samples beside it in `bench/raw/`; otherwise the samples alone, for `run.py` to
        gather.
        """
        for result in measured(results):
            print(f"{result.name}  {result.median:.6g} {result.unit}")
        if out is None:
            return
        if not whole:
            save_results(out, results)
            return
        self.began.record(self.scenario, measured(results), details=details(results)).save(out)
        save_results(RAW / out.name, results)
