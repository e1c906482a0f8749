"""SQL over a record of a million rows: ``python -m bench.record_queries --into bench/records``.

A table records 512 steps of 2,048 rows, as a server writes them: 64 prompts a step, 32 responses each, of which one in
64 is dropped. Then each question of [the page](../docs/how-to/record.md#a-million-rows) is asked of the finished
record, every time by a new `open_run`, and its answer is printed. Wanted: less than a second each. Needs DuckDB
(``pip install '.[query]'``).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import transferqueue as tq
from bench.run_record import into_option, save_record, show
from transferqueue.cli.commands.looking.query import answer_lines
from transferqueue.cli.screens.terminal import console
from transferqueue.cli.screens.terminal import show as print_lines
from transferqueue.observe.measurement_record import MeasuredResult, Measurement, summarize

STEPS: Final = 512
PROMPTS: Final = 64
GROUP: Final = 32
DROPPED_OF: Final = 64
"""One row of so many is dropped."""
TOKENS: Final = 48
QUESTIONS: Final = {
    "which rows made step k": """
select _row, _version, _events[1].worker as put_by, prompt, rewards, len(response_ids) as tokens
from rollouts where _step = 300 order by rewards desc, _row limit 4
""",
    "reward by prompt over time": """
select prompt, list(round(reward, 2) order by quarter) as reward_by_quarter
from (select prompt, _step // 128 as quarter, avg(rewards) as reward from rollouts where _fate = 'done' group by all)
group by prompt order by prompt limit 4
""",
    "what the dropped rows had in common": """
select _reason, count(*) as "rows", avg(len(response_ids)) as tokens, count(distinct prompt) as prompts,
    mode([e.detail for e in _events if e.what = 'failed'][1]) as error
from rollouts where _fate = 'dropped' group by all order by "rows" desc
""",
}


def record(directory: Path, steps: int) -> None:
    """Have a table record so many steps."""
    tasks = [tq.Task("train", needs=["rewards"], retry=tq.Retry(first_s=0, attempts=1))]
    draw = np.random.default_rng(0)
    with tq.connect("embedded", label="generator-0", arena_bytes="2GiB") as queue:
        table = queue.create_table("rollouts", tasks=tasks, retention=tq.Recorded(str(directory)))
        for step in range(steps):
            _step(table, step, draw)
        print(f"put and ended {table.stats().rows_put:,} rows", flush=True)


def _step(table: tq.Table, step: int, draw: np.random.Generator) -> None:
    """Put the rows of a step, train most of them, and drop the others: half failed in training, half are too long."""
    rows = PROMPTS * GROUP
    prompt = np.repeat(np.arange(PROMPTS), GROUP)
    lengths = draw.integers(1, TOKENS, rows)
    failing, long = np.split(draw.choice(rows, rows // DROPPED_OF, replace=False), 2)
    lengths[long] = 2 * TOKENS
    edges = np.cumsum(lengths)[:-1]
    put = table.put(
        prompt=[f"What is {number} times {number + 1}?" for number in prompt],
        response_ids=np.split(draw.integers(0, 50_000, lengths.sum(), np.int32), edges),
        logprobs=np.split(-draw.random(lengths.sum(), np.float32), edges),
        rewards=(draw.random(rows) * (1 + step / STEPS) / (1 + prompt % 7)).astype(np.float32),
        policy_version=step,
        timeout_s=600,
    )
    ids = np.array(list(put))
    table.drop(ids[long].tolist(), reason="too_long")
    with table.lease("train", rows=rows - long.size, timeout_s=600) as batch:
        failed = ids[failing].tolist()
        batch.release(failed, failed=True, reason=f"loss is {'NaN' if step % 3 else 'inf'}")
        batch.ack(step=step)
    table.checkpointed(step)


def results(directory: Path, runs: int) -> Iterator[MeasuredResult]:
    """Ask each question, print its last answer, and give its seconds and the size of the record."""
    rows = tq.open_run(directory).table()
    yield summarize("rows", "count", [float(rows.arrow(["_row"]).num_rows)])
    yield summarize("files", "count", [float(len(rows.files))])
    yield summarize("bytes", "bytes", [float(sum(path.stat().st_size for path in rows.files))])
    for name, question in QUESTIONS.items():
        seconds, computed, answer = [], [], None
        for _ in range(runs):
            began, computing = time.perf_counter(), time.process_time()
            answer = tq.open_run(directory).sql(question)
            seconds.append(time.perf_counter() - began)
            computed.append(time.process_time() - computing)
        _print(name, seconds, question, answer)
        yield summarize(name, "s", seconds)
        yield summarize(f"{name}: of all processors", "s", computed)


def _print(name: str, seconds: list[float], question: str, answer: Any) -> None:
    print(f"\n-- {name}: {median(seconds):.2f} s{question}")
    print_lines(answer_lines(answer), console())


def main() -> None:
    """Measure, print, and write a record if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.record_queries", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {PROMPTS * GROUP:,} rows (default: {STEPS})")
    parser.add_argument("--runs", type=int, default=5, help="of each question (default: 5)")
    parser.add_argument("--keep", type=Path, help="folder for the record; one that is there is asked again")
    into_option(parser)
    chosen = parser.parse_args()
    measurement = Measurement()
    with tempfile.TemporaryDirectory(prefix="transferqueue-record-") as folder:
        directory = (chosen.keep or Path(folder)).absolute()
        if not (directory / "rollouts").exists():
            record(directory, chosen.steps)
        lines = list(results(directory, chosen.runs))
    show(lines)
    save_record(measurement, chosen.into, "record-queries", lines, {"steps": chosen.steps})


if __name__ == "__main__":
    main()
