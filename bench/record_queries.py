"""Three questions in SQL over a record of a million rows: ``python -m bench.record_queries --into bench/records``.

A table records 512 steps of 2,048 rows: 64 prompts a step, 32 responses each, of 256 tokens on average, with a log-prob
each. One row in 64 is dropped. Each question is then asked of the finished record, with a new `open_run` every time,
and its last answer is printed with the median of its seconds. Less than a second each is wanted.

Needs DuckDB (``pip install '.[query]'``), 2 GB of disk, and 1 GB of memory. On a machine that does other work too,
compare the processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

import transferqueue as tq
from bench.measurement_record import MeasuredResult, Measurement, summarize
from bench.run_record import into_option, save_record, show
from transferqueue.cli.commands.looking.query import answer_lines
from transferqueue.cli.screens.terminal import console
from transferqueue.cli.screens.terminal import show as print_lines

STEPS: Final = 512
PROMPTS: Final = 64
GROUP: Final = 32
DROPPED_OF: Final = 64
"""One row of so many is dropped."""
TOKENS: Final = 512
"""A response is shorter than this, unless it is dropped as too long."""
ARENA: Final = "512MiB"
WAIT_S: Final = 600.0
"""For memory, and for rows, at most: files are written as fast as the disk takes them."""
QUESTIONS: Final = {
    "which rows made step 300": """
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
from rollouts where _fate = 'dropped' group by all order by "rows" desc, _reason
""",
}


def record(directory: Path, steps: int) -> None:
    """Have a table record so many steps."""
    tasks = [tq.Task("train", needs=["rewards"], retry=tq.Retry(first_s=0, attempts=1))]
    draw = np.random.default_rng(0)
    with tq.connect("embedded", label="generator-0", arena_bytes=ARENA) as queue:
        table = queue.create_table("rollouts", tasks=tasks, retention=tq.Recorded(str(directory)))
        for step in range(steps):
            _record_step(table, step, draw)


def _record_step(table: tq.Table, step: int, draw: np.random.Generator) -> None:
    """Put the rows of a step, and train all but one in `DROPPED_OF`: of these, half are too long, half fail."""
    rows = PROMPTS * GROUP
    prompt = np.repeat(np.arange(PROMPTS), GROUP)
    lengths = draw.integers(1, TOKENS, rows)
    failing, too_long = np.split(draw.choice(rows, rows // DROPPED_OF, replace=False), 2)
    lengths[too_long] = 2 * TOKENS
    edges = np.cumsum(lengths)[:-1]
    ids = np.array(
        table.put(
            prompt=[f"What is {number} times {number + 1}?" for number in prompt],
            response_ids=np.split(draw.integers(0, 50_000, lengths.sum(), np.int32), edges),
            logprobs=np.split(-draw.random(lengths.sum(), np.float32), edges),
            rewards=(draw.random(rows) * (1 + step / STEPS) / (1 + prompt % 7)).astype(np.float32),
            policy_version=step,
            timeout_s=WAIT_S,
        )
    )
    table.drop(ids[too_long].tolist(), reason="too_long")
    with table.lease("train", rows=rows - too_long.size, timeout_s=WAIT_S) as batch:
        batch.release(ids[failing].tolist(), failed=True, reason=f"loss is {'NaN' if step % 3 else 'inf'}")
        batch.ack(step=step)
    table.checkpointed(step)


def results(directory: Path, runs: int) -> Iterator[MeasuredResult]:
    """Ask each question so many times, print its answer, and give its seconds and the size of the record."""
    files = tq.open_run(directory).table().files
    counted = tq.open_run(directory).sql('select count(*) as "rows" from rollouts')
    yield summarize("rows", "count", counted["rows"].to_pylist())
    yield summarize("files", "count", [len(files)])
    yield summarize("bytes", "bytes", [sum(path.stat().st_size for path in files)])
    for name, question in QUESTIONS.items():
        asked = [_ask(directory, question) for _ in range(runs)]
        print(f"\n-- {name}: {median(each.seconds for each in asked):.2f} s{question}")
        print_lines(answer_lines(asked[-1].rows), console())
        yield summarize(name, "s", [each.seconds for each in asked])
        yield summarize(f"{name}: processor time", "s", [each.processor_s for each in asked])


class _Answer(NamedTuple):
    rows: Any
    seconds: float
    processor_s: float


def _ask(directory: Path, question: str) -> _Answer:
    began, processor = time.perf_counter(), time.process_time()
    rows = tq.open_run(directory).sql(question)
    return _Answer(rows, time.perf_counter() - began, time.process_time() - processor)


def main() -> None:
    """Measure, print, and write a record of the measurement if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.record_queries", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {PROMPTS * GROUP:,} rows (default: {STEPS})")
    parser.add_argument("--runs", type=int, default=5, help="of each question (default: 5)")
    into_option(parser)
    chosen = parser.parse_args()
    measurement = Measurement()
    with tempfile.TemporaryDirectory(prefix="transferqueue-record-") as folder:
        record(Path(folder), chosen.steps)
        lines = list(results(Path(folder), chosen.runs))
    print()
    show(lines)
    save_record(measurement, chosen.into, "record-queries", lines, {"steps": chosen.steps, "tokens": TOKENS})


if __name__ == "__main__":
    main()
