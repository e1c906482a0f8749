"""Kills processes of real runs, and counts what that costs: ``python -m bench.crash_cost --into bench/records``.

    python -m bench.crash_cost --stacks job --quick
    python -m bench.crash_cost --table --page docs/understand/comparison.md

Each stack that runs here without an accelerator makes the same small run: a tiny model, GRPO, checkpoints. The process
that plays a role gets a SIGKILL in the middle, two steps after a checkpoint: the generator while it draws, the others
half a step after a step ended. The run then goes on to its end. A process that ends and has no supervisor is started
again at once, and counts as started by hand: the seconds are those of a person who waits for it.

Of each stack one run loses nothing: what it does in vain, such as rows that grew stale, the others do without a crash
too. `costs.py` says what is counted. Counts hardly depend on the load of the machine; seconds do. ``--keep FOLDER``
keeps the runs: the same command goes on after those that the folder has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.crash_cost import process_log
from bench.crash_cost.costs import Costs, costs_of
from bench.crash_cost.run_settings import RunSettings
from bench.crash_cost.stacks import GENERATOR, STACKS, Stack
from bench.given_lengths import texts
from bench.measurement_record import MeasuredResult, Measurement, MeasurementRecord, load_record, summarize
from bench.run_record import RECORDS, into_option, save_record, show
from bench.table import insert

KIND: Final = "crash-cost"
KEPT: Final = "runs.jsonl"
NOTHING: Final = "nothing"
RUN_S: Final = 1200.0
LOOK_S: Final = 0.02
USUAL: Final = {"steps": 12, "prompts": 8, "group": 8, "tokens": 48, "checkpoint_every": 4, "kill_after": 6}
QUICK: Final = {"steps": 6, "prompts": 2, "group": 4, "tokens": 16, "checkpoint_every": 2, "kill_after": 3}
COUNTS: Final[Mapping[str, str]] = {
    "rows_in_vain": "rows generated in vain",
    "tokens_in_vain": "tokens drawn in vain",
    "rows_twice": "rows trained twice",
    "rows_missing": "rows never trained",
    "steps_again": "steps computed again",
}
"""Names of the counts in a record."""
BY_HAND: Final = "started by hand"
ON: Final = "until training goes on"


@dataclass(frozen=True)
class RunCost:
    """One run. on_s: seconds from the kill to the end of a step beyond those before it. by_hand: what a person started
    again."""

    costs: Costs
    whole_s: float
    on_s: float | None = None
    by_hand: tuple[str, ...] = ()


# ---------------------------------------------------------------- a run


def prepare(place: Path, settings: Mapping[str, int]) -> None:
    """Write the model, and a prompt for each place of the run. `SystemExit` for a folder with other runs."""
    from transferqueue.workflows.job.tiny_model.make import make

    file = place / "settings.json"
    if file.exists():
        if (before := json.loads(file.read_text())) != settings:
            raise SystemExit(f"{place} has runs of {before}, and these are of {settings}; give another folder")
        return
    make(place / "model", tie_word_embeddings=False)
    (place / "data").mkdir(parents=True)
    prompts = texts(settings["steps"] * settings["prompts"], seed=0)
    (place / "data" / "train.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in prompts))
    file.write_text(json.dumps(settings))


def run(stack: Stack, role: str) -> RunCost:
    """Run a stack to its end, and kill a role in the middle (`NOTHING`: none)."""
    settings, began = stack.settings, time.monotonic()
    on_s = None
    try:
        stack.start()
        watch = Watch(stack, began + RUN_S)
        if role != NOTHING:
            watch.until(lambda: stack.newest_step() >= settings.kill_after)
            watch.come_to_middle(role)
            before, killed = stack.newest_step(), time.monotonic()
            stack.kill(role)
            watch.until(lambda: stack.newest_step() > before)
            on_s = time.monotonic() - killed
        watch.until(lambda: stack.is_over)
        whole_s = time.monotonic() - began
    finally:
        stack.stop()
    drawn, responses = process_log.drawn(settings.log), process_log.responses(settings.log)
    prompts = settings.steps * settings.prompts
    costs = costs_of(drawn, responses, stack.taken(), prompts=prompts, group=settings.group)
    return RunCost(costs, whole_s, on_s, tuple(stack.by_hand))


class Watch:
    """Waits for a run, and starts again what ended."""

    def __init__(self, stack: Stack, deadline: float) -> None:
        self._stack, self._deadline = stack, deadline
        self._ends = [(0, time.monotonic())]
        """The newest step, and when it was seen, of each change."""

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait. `SystemExit` with the last output if it takes too long, or the run ends before."""
        while not condition():
            if time.monotonic() > self._deadline or self._stack.is_over:
                state = "is over" if self._stack.is_over else "hangs"
                raise SystemExit(f"the run {state} after step {self._stack.newest_step()}: {self._stack.last_words()}")
            if (newest := self._stack.newest_step()) != self._ends[-1][0]:
                self._ends.append((newest, time.monotonic()))
            self._stack.restart_ended()
            time.sleep(LOOK_S)

    def come_to_middle(self, role: str) -> None:
        """Wait until the role is in the middle of its work."""
        if role == GENERATOR:
            log = self._stack.settings.log
            for _ in range(2):
                self.until(_counts_on(log))
            return
        last_s = self._ends[-1][1] - self._ends[-2][1] if len(self._ends) > 1 else 0.0
        ends = time.monotonic() + last_s / 2
        self.until(lambda: time.monotonic() >= ends)
        self.until(lambda: self._stack.pid(role) is not None)


def _counts_on(log: Path) -> Callable[[], bool]:
    """Return whether tokens were drawn since now."""
    before = process_log.drawn(log)
    return lambda: process_log.drawn(log) > before


def measured(
    place: Path, stacks: Sequence[str], settings: Mapping[str, int], runs: int, roles: Sequence[str]
) -> dict[tuple[str, str], list[RunCost]]:
    """Run each stack with each role killed, `runs` times, but for the runs that the folder has."""
    found: dict[tuple[str, str], list[RunCost]] = {}
    have = kept(place)
    for turn in range(runs):
        for name in stacks:
            for role in (NOTHING, *STACKS[name].roles):
                if roles and role not in roles:
                    continue
                folder = place / f"{name}-{role}-{turn}"
                if (cost := have.get(folder.name)) is None:
                    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
                    cost = run(STACKS[name](RunSettings(at=str(place), out=str(folder), **settings)), role)
                    with (place / KEPT).open("ab") as file:
                        file.write(msgspec.json.encode((folder.name, cost)) + b"\n")
                found.setdefault((name, role), []).append(cost)
                print(f"{name}, {role} killed: {_said(cost)}", flush=True)
    return found


def kept(place: Path) -> dict[str, RunCost]:
    """Return the runs that a folder has, by their names."""
    lines = (place / KEPT).read_bytes().splitlines() if (place / KEPT).exists() else []
    return dict(msgspec.json.decode(line, type=tuple[str, RunCost]) for line in lines)


def _said(cost: RunCost) -> str:
    counts = ", ".join(f"{name} {getattr(cost.costs, key)}" for key, name in COUNTS.items())
    on = "" if cost.on_s is None else f"; {ON} {cost.on_s:.1f} s"
    return f"{counts}{on}; {cost.whole_s:.0f} s in all; by hand: {', '.join(cost.by_hand) or 'nothing'}"


# ---------------------------------------------------------------- results


def results(found: Mapping[tuple[str, str], Sequence[RunCost]]) -> Iterator[MeasuredResult]:
    """Give counts, seconds and restarts of each stack and role."""
    for (name, role), costs in found.items():
        for key, count in COUNTS.items():
            yield summarize(f"{name}/{role}: {count}", "count", [getattr(each.costs, key) for each in costs])
        yield summarize(f"{name}/{role}: {BY_HAND}", "count", [len(each.by_hand) for each in costs])
        if on := [each.on_s for each in costs if each.on_s is not None]:
            yield summarize(f"{name}/{role}: {ON}", "s", on)
        yield summarize(f"{name}/{role}: whole run", "s", [each.whole_s for each in costs])


def newest(records: Path = RECORDS) -> MeasurementRecord:
    """Return the newest record. `SystemExit` if there is none."""
    paths = sorted(records.glob(f"{KIND}-*.json"))
    if not paths:
        raise SystemExit("no record: python -m bench.crash_cost --into bench/records")
    return load_record(paths[-1])


def markdown(record: MeasurementRecord) -> str:
    """Return the table of a record."""
    of = {result.name: result for result in record.results}
    runs = list(dict.fromkeys(name.partition(": ")[0] for name in of))
    details, load = record.details, record.load
    titles = [*COUNTS.values(), BY_HAND, f"{ON}, s"]
    lines = [f"| stack | killed | {' | '.join(titles)} |", "|" + "---|" * (len(titles) + 2)]
    for each in runs:
        name, _, role = each.partition("/")
        cells = [_cell(of.get(f"{each}: {title.removesuffix(', s')}")) for title in titles]
        hands = details["by_hand"].get(each, [])
        cells[-2] = ", ".join(hands) or "nothing"
        lines.append(f"| {STACKS[name].name} | {role} | {' | '.join(cells)} |")
        if (same := STACKS[name].same_process) and role == STACKS[name].roles[-1]:
            end = f"the process of trainer and generator |{' |' * (len(titles) - 1)}"
            lines.append(f"| {STACKS[name].name} | {', '.join(same)} | {end}")
    shape, number = details["settings"], of[f"{runs[0]}: whole run"].n
    about = (
        f"{shape['steps']} steps of {shape['prompts'] * shape['group']} rows of up to {shape['tokens']} tokens, a "
        f"checkpoint every {shape['checkpoint_every']} steps, the kill after step {shape['kill_after']}; "
        f"{'one run of each' if number == 1 else f'{number} runs of each, medians'}; {record.machine['cores']} cores, "
        f"commit {record.commit[:9]}, {record.start[:10]}, load {load['start']:.1f} at the start and "
        f"{load['end']:.1f} at the end: compare counts; seconds are those of a busy machine."
    )
    return "\n".join([*lines, "", about])


def _cell(result: MeasuredResult | None) -> str:
    if result is None:
        return ""
    spread = f" ({result.p10:.3g} to {result.p90:.3g})" if result.n > 1 and result.p10 != result.p90 else ""
    return f"{result.median:.6g}{spread}" if result.unit == "count" else f"{result.median:.3g}{spread}"


def main() -> None:
    """Measure, print, and write a record if asked to; or print the table of the newest record."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.crash_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stacks", nargs="+", choices=tuple(STACKS), default=list(STACKS), help="default: all")
    parser.add_argument("--roles", nargs="+", choices=(NOTHING, *_roles()), default=[], help="default: all")
    parser.add_argument("--runs", type=int, default=2, help="of each stack and role (default: 2; one takes a minute)")
    parser.add_argument("--quick", action="store_true", help="one run of six steps each: to try the command")
    parser.add_argument("--keep", type=Path, help="folder for the runs; the same command goes on after those it has")
    parser.add_argument("--table", action="store_true", help="print the table of the newest record, and run nothing")
    parser.add_argument("--page", type=Path, help="with --table: write it into this page")
    into_option(parser)
    chosen = parser.parse_args()
    if chosen.table:
        text = markdown(newest())
        if chosen.page:
            chosen.page.write_text(insert(chosen.page.read_text(), text))
        else:
            print(text)
        return
    _measure(chosen)


def _measure(chosen: argparse.Namespace) -> None:
    measurement = Measurement()
    settings, runs = (QUICK, 1) if chosen.quick else (USUAL, chosen.runs)
    with tempfile.TemporaryDirectory(prefix="transferqueue-crash-") as folder:
        place = (chosen.keep or Path(folder)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        prepare(place, settings)
        found = measured(place, chosen.stacks, settings, runs, chosen.roles)
    lines = [*results(found)]
    show(lines)
    details = {"settings": settings, "threads": os.environ.get("OMP_NUM_THREADS", "by the process")}
    details["by_hand"] = {f"{name}/{role}": list(costs[-1].by_hand) for (name, role), costs in found.items()}
    save_record(measurement, chosen.into, KIND, lines, details)


def _roles() -> Sequence[str]:
    return list(dict.fromkeys(role for stack in STACKS.values() for role in stack.roles))


if __name__ == "__main__":
    main()
