"""Tables from the newest record of each ladder (`bench.ladder`), printed or written into a page.

python -m bench.gains [modes asyncflow streamrl elastic reward lora record]
python -m bench.gains reward --into docs/how-to/pacing.md
python -m bench.gains modes --picture docs/pictures/colocated.svg

The picture has asynchronous steps over mode colocated, by the ratio of generation to training. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.ladder import PLAIN_JOBS, REWARDED
from bench.measurement_record import MeasuredResult, MeasurementRecord, load_record
from bench.run_record import RECORDS
from bench.table import insert

TITLES: Final = {
    "modes": "Beside the loop that one would write",
    "asyncflow": "AsyncFlow's ladder",
    "streamrl": "StreamRL's ladder",
    "elastic": "The number of engines",
    "reward": "Reward at equal samples",
    "lora": "Adapters alone, and merged weights",
    "record": "A job that records its rows",
    "sampler": "Prompts by pass rate",
}
ENGINES: Final = {
    "vllm": "vLLM's CPU build",
    "transformers": "transformers",
    "paced": "engines paced as a 7B model",
    "builtin": "the built-in engine",
}


def newest(ladders: Sequence[str], records: Path = RECORDS) -> list[MeasurementRecord]:
    """The newest record of each of these ladders, with each engine, size, skew and learning rate."""
    found: dict[tuple[object, ...], MeasurementRecord] = {}
    for path in sorted(records.glob("ladder-*.json"), key=lambda path: path.stem[-15:]):
        record = load_record(path)
        details = record.details
        if details["ladder"] in ladders:
            ladder, reached = [*TITLES].index(details["ladder"]), details["until"] is not None
            found[ladder, details["engine"], details["size"], details["skew"], details["lr"], reached] = record
    return [found[key] for key in sorted(found, key=str)]


def tables(ladders: Sequence[str], records: Path = RECORDS) -> str:
    """The tables of these ladders (none: of all that have a record). Raises `SystemExit` if one has no record."""
    found = newest(ladders or [*TITLES], records)
    known = {record.details["ladder"] for record in found}
    missing = [name for name in ladders or TITLES if name not in known]
    if missing and (ladders or not found):
        raise SystemExit(f"no record of {', '.join(missing)}: python -m bench.ladder NAME --into bench/records")
    return "\n\n".join(map(markdown, found))


def markdown(record: MeasurementRecord) -> str:
    """The table of one ladder."""
    details, results = record.details, {result.name: result for result in record.results}
    rungs = [name.removesuffix(": samples a second") for name in results if name.endswith(": samples a second")]
    titles = _rewards(rungs[0]) if details["ladder"] in REWARDED else _columns(rungs[0])
    columns = [column for column in titles if any(_of(results, rung, column) for rung in rungs)]
    head = ["", *(title for title, _ in columns)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {rung} | {' | '.join(_cell(_of(results, rung, column)) for column in columns)} |" for rung in rungs]
    runs = results[f"{rungs[0]}: samples a second"].n
    skew = "" if details["ladder"] in PLAIN_JOBS else f", lengths {details['skew']}"
    published = f" Published: {details['published']}." if details["published"] else ""
    spread = f"{runs} seeds, medians (10th to 90th percentile)" if runs > 1 else "one seed"
    about = (
        f"{ENGINES[details['engine']]}, model {details['size']}{skew}, learning rate {details['lr']:g}; runs of "
        f"{details['steps']} steps, {spread}; {record.machine['cores']} cores, commit {record.commit[:9]}, "
        f"{record.start[:10]}, load {record.load['start']:.1f} at the start.{published}"
    )
    return "\n".join([f"**{TITLES[details['ladder']]}.** {about}", "", *lines])


def _columns(base: str) -> Iterator[tuple[str, str]]:
    """Yield the title of each column, and how the names of its results end."""
    yield "samples a second", "samples a second"
    yield f"over {base}", f"over {base}"
    yield "of its bound", "of its bound"
    yield "of the planner's prediction", "of the prediction"
    yield "generation, seconds a step", "generation"
    yield "training", "training"
    yield "recall of the longest fifth", "recall"
    yield "seconds to the reward", "until the reward"
    yield "whole run, seconds", "whole run"


def _rewards(base: str) -> Iterator[tuple[str, str]]:
    """Yield the same of the ladders that compare rewards."""
    yield "reward of all rows", "reward of the run"
    yield f"below {base}, by seeds", f"reward of the run below {base}"
    yield "held-out reward at the end", "held-out reward"
    yield "versions behind", "staleness"
    yield "bytes a version", "bytes a version"
    yield "steps until the held-out reward", "steps until the held-out reward"
    yield "tokens until then", "tokens until the held-out reward"
    yield f"over {base}, by seeds", f"tokens until the held-out reward over {base}"


@dataclass(frozen=True)
class Beside:
    """Mode colocated beside asynchronous steps, in one record: samples of the latter over the former's, and the seconds
    of generation over those of training, as colocated has them."""

    name: str
    generation_over_training: float
    gain: float


def colocated_or_apart(records: Sequence[MeasurementRecord]) -> list[Beside]:
    """Return one for each record that has both modes and the seconds of generation."""
    found = []
    for record in records:
        medians = {result.name: result.median for result in record.results}
        names = [f"colocated: {name}" for name in ("generation", "training", "samples a second")]
        wanted = [medians.get(name) for name in (*names, "asynchronous: samples a second")]
        generation, training, together, apart = (math.nan if value is None else value for value in wanted)
        if None not in wanted:
            name = f"{ENGINES[record.details['engine']]}, {record.details['size']}"
            found.append(Beside(name, generation / training, apart / together))
    return found


def draw(path: Path, points: Sequence[Beside]) -> None:
    """Draw them. Blocks; writes `path`, as SVG or PNG by its name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(1.0, color="#a0aec0", linewidth=1)
    for point in points:
        axes.plot([point.generation_over_training], [point.gain], "o", color="#2b6cb0")
        at, beside = (point.generation_over_training, point.gain), (6, 5)
        axes.annotate(point.name, at, beside, textcoords="offset points", fontsize="x-small")
    axes.set_xscale("log")
    axes.margins(x=0.35, y=0.2)
    axes.set_xlabel("seconds of generation over seconds of training")
    axes.set_ylabel("samples, asynchronous over colocated")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _of(results: dict[str, MeasuredResult], rung: str, column: tuple[str, str]) -> MeasuredResult | None:
    return next((each for name, each in results.items() if name.startswith(f"{rung}: {column[1]}")), None)


def _cell(result: MeasuredResult | None) -> str:
    if result is None:
        return ""
    spread = f" ({result.p10:.3g} to {result.p90:.3g})" if result.n > 1 else ""
    return f"{result.median:.3g}{spread}"


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.gains", description=__doc__)
    parser.add_argument(
        "ladders", nargs="*", metavar="LADDER", help=f"of {', '.join(TITLES)} (default: all with a record)"
    )
    parser.add_argument("--into", type=Path)
    parser.add_argument("--picture", type=Path, help="of colocated beside asynchronous; an SVG or PNG file")
    chosen = parser.parse_args()
    if chosen.picture:
        draw(chosen.picture, colocated_or_apart(newest(["modes"])))
        return
    text = tables(chosen.ladders)
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), text))
    else:
        print(text)


if __name__ == "__main__":
    main()
