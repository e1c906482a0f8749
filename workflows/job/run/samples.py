"""Responses of a run as text: from its record or its file of samples, and while the run goes on, from its queue too.

A row is in the record when it has ended, which is after the checkpoint of its step. The rows before that are read from
the queue, without a lease. A run that records no rows has some responses of each step in `samples.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

import transferqueue as tq
from transferqueue.errors import NotFound, PeerError, UsageError
from transferqueue.storage.elements.values import decode
from transferqueue.storage.row_files.reader import JOB_ROWS, RecordedRows
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.run.folder import RunFolder
from transferqueue.workflows.job.run.server import running_address
from transferqueue.workflows.job.run_files import SAMPLES, json_lines
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import group_rows

Order = Literal["spread", "worst", "best"]
ROWS_MAX: Final = 4096
"""Most rows of one call."""
LIVE_ROWS_MAX: Final = 65_536
_CONNECT_S: Final = 5.0
_FACTS: Final = ("_row", "_ordinal", "_version", "_step", "_fate", "_reason")
_COLUMNS: Final = ("response_ids", "rewards", names.REWARD_TERMS, "finish_reason", names.DATA)


class SampleRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A response as text. row: None in `samples.jsonl`. step: that trained it; None: of a row that is not final yet, or
    was dropped. fate: ``live``, ``done`` or ``dropped``, and why; "" in `samples.jsonl`. terms: the score of each
    reward term that applies. data: the columns of the data file, such as the right answer."""

    row: int | None = None
    step: int | None
    fate: str = ""
    reason: str = ""
    version: int
    ordinal: int
    prompt: Any
    response: str
    reward: float | None
    terms: dict[str, float] = {}
    data: dict[str, Any] = {}
    finish_reason: str = ""
    tokens: int


def samples(folder: Path, *, step: int | None = None, rows: int = 4, order: Order = "spread") -> list[SampleRow]:
    """Return responses of a run as text.

    Args:
        folder: of the run, finished or not.
        step: that trained them; default None: the newest rows, those that wait for a checkpoint too.
        rows: the most responses, up to 4096; default 4.
        order: ``spread``, the default: each to another prompt; ``worst`` or ``best``: by reward.

    Raises:
        NotFound: no folder of a run, or it has no responses of that step.
        PeerError: of the newest rows, the run's queue runs and cannot be read.
        UsageError: `rows` is out of its range, or the model has no tokenizer here.
    """
    if not 1 <= rows <= ROWS_MAX:
        raise UsageError(f"rows={rows} is not a number of responses from 1 to {ROWS_MAX:,}")
    run = RunFolder(folder.absolute())
    job = run.job()
    found = [] if step is not None else _live(folder)
    if not found and not (folder / JOB_ROWS / names.TABLE).is_dir():
        return msgspec.convert(_chosen(_kept(folder, step), rows, order, group_rows(job)), list[SampleRow])
    chosen = _chosen(found or _recorded(folder, step), rows, order, group_rows(job))
    with run.at_its_place():
        read = _reader(job, load_tokenizer(job.model))
    return [*map(read, chosen)]


Row = Mapping[str, Any]
"""Columns of a row by name, with its facts as in a record."""


def _kept(folder: Path, step: int | None) -> list[Row]:
    """The responses of a step in `samples.jsonl`; default: of the newest step that has some."""
    lines = [*json_lines(folder / SAMPLES)]
    steps = sorted({int(line["step"]) for line in lines})
    wanted = _wanted(steps, step, f"{folder} has no samples")
    return [line | {"_ordinal": line["ordinal"], "rewards": line["reward"]} for line in lines if line["step"] == wanted]


def _wanted(steps: Sequence[int], step: int | None, lacks: str) -> int:
    """The step that is asked for, or the newest."""
    if not steps or (step is not None and step not in steps):
        which = f"it has steps {steps[0]} to {steps[-1]}" if steps else "no step of it is final yet"
        raise NotFound(f"{lacks} of {'a' if step is None else 'that'} step; {which}")
    return steps[-1] if step is None else step


def _recorded(folder: Path, step: int | None) -> list[Row]:
    """The recorded rows of a step that have a response; default: of the newest step that has some."""
    import pyarrow.compute as pc

    table = tq.open_run(folder).table(names.TABLE)
    wanted = _wanted(_steps(table), step, f"the record of {folder} has no rows")
    known = table.dataset().schema.names
    columns = [name for name in (*_FACTS, *_COLUMNS) if name in known]
    return list(table.arrow(columns, filter=pc.field("_step") == wanted).to_pylist())


def _steps(table: RecordedRows) -> list[int]:
    """The steps that have recorded rows, in order."""
    return sorted(table.arrow(["_step"])["_step"].unique().drop_null().to_pylist())


def _live(folder: Path) -> list[Row]:
    """The rows with a response that a running job has in its queue, of its newest version; none if it does not run, or
    has no table yet. `PeerError` if its server runs and does not answer."""
    address = running_address(folder)
    if not address:
        return []
    try:
        with tq.connect(address, timeout_s=_CONNECT_S, label="samples") as queue:
            table = queue.table(names.TABLE)
            has_rewards = "rewards" in table.fields
            where = tq.Compare("rewards", ">=", -inf) if has_rewards else tq.Compare("tokens", ">", 0)
            facts = table.read(where=where, fields=(), limit=LIVE_ROWS_MAX)
            if not len(facts):
                return []
            newest = int(facts.policy_version.max())
            ids = facts.rows[facts.policy_version == newest]
            return _rows_of(table, ids)
    except NotFound:  # its table
        return []
    except PeerError:
        if running_address(folder):
            raise
        return []  # it ended in between


def _rows_of(table: tq.Table, ids: Any) -> list[Row]:
    with table.read(ids) as read:
        every: dict[str, list[Any]] = {name: read[name].list() for name in _COLUMNS if name in read.fields}
        every |= {"_row": read.rows.tolist(), "_ordinal": read.ordinal.tolist()}
        every["_version"] = read.policy_version.tolist()
        count = len(read)
    return [{"_step": None, "_fate": "live", **{n: every[n][at] for n in every}} for at in range(count)]


def _chosen(rows: Sequence[Row], most: int, order: Order, group: int) -> list[Row]:
    if order != "spread":
        scored = [row for row in rows if row.get("rewards") is not None]
        return sorted(scored, key=lambda row: row["rewards"], reverse=order == "best")[:most]
    in_order = sorted(rows, key=lambda row: (row["_ordinal"] % group, row["_ordinal"]))
    return in_order[:most]


def _reader(job: Job, tokenizer: TextTokenizer) -> Callable[[Row], SampleRow]:
    terms = term_names(job)

    def read(row: Row) -> SampleRow:
        data, ids = row.get(names.DATA), row.get("response_ids")
        if isinstance(data, bytes):
            data = decode(data, f"row {row['_row']}")
        values: dict[str, Any] = dict(data or {})
        scores = zip(terms, row.get(names.REWARD_TERMS) or (), strict=False)
        tokens = [int(token) for token in (() if ids is None else ids)]
        return SampleRow(
            row=row["_row"],
            step=row["_step"],
            fate=row["_fate"],
            reason=row.get("_reason") or "",
            version=row["_version"],
            ordinal=row["_ordinal"],
            prompt=values.pop(PROMPT, ""),
            response=tokenizer.decode(tokens, skip_special_tokens=False),
            reward=row.get("rewards"),
            terms={name: float(score) for name, score in scores if not isnan(score)},
            data=values,
            finish_reason=row.get("finish_reason") or "",
            tokens=len(tokens),
        )

    return read
