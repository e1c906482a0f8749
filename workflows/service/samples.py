"""Requests of samples and the streams of their answers: the stream generation service of StreamRL (arXiv 2504.15930,
section 4).

1. The job is that of `stream_engines`: two stages, *generate* and *train*. Engines come and go (`serve`) and lease
   prompts of the first stage; the process that called `generate` leases finished samples of the second.
2. `generate` puts the prompts before it returns, so the next request is generated while the stream of the current one
   is consumed: asynchronous pipelining. The pace bounds it, in batches and in versions.
3. Requests are generated in their order, and within a request the prompts with the largest scores first: long answers
   start early (section 5), but do not delay an earlier request (docs/decisions/planning.md).
4. A stream yields samples as they finish, in any order. `CompletionStream.batches` yields them as batches that a
   trainer acks itself, as soon as `at_least` are finished (dynamic batches, section 4.1). A sample is done when the
   next one is requested. When a stream is closed, or its process dies, the remaining samples are released: `resume`
   continues with them in any process. Batches may be held: a trainer acks those of a step together, after its optimizer
   step (`Table.ack`), and a request with a `number` is not put twice.
5. A generator that dies loses nothing: its prompts go to others. A prompt on which generators fail as often as the task
   allows is dropped; the stream then raises `SamplesLost` at its end.
"""

from __future__ import annotations

import secrets
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Prompt
from transferqueue.client.handles.table import TableBase
from transferqueue.errors import FlowSignal, PeerError, SchemaError, UsageError
from transferqueue.workflows.service.declaration import NAME, ColumnSpec, Engines, EngineStage, GroupSpec, PacingSpec

GENERATE: Final = "generate"
TRAIN: Final = "train"
EXPECTED: Final = "expected_tokens"
"""Field with the tokens that a sample is expected to have; 0: no expectation."""
BURST_ROWS: Final = 16
"""Most samples that a stream leases at once, if so many are finished."""
LEASE_S: Final = 600.0
"""Lease of the samples that a stream yields. A caller's death is detected at once; one that hangs delays its samples so
long.
"""
_COLUMNS: Final = [
    ColumnSpec(name="request", dtype="int64"),
    ColumnSpec(name="prompt", dtype="int32"),
    ColumnSpec(name="sample", dtype="int32"),
    ColumnSpec(name="prompt_ids", dtype="int32", shape=[None]),
    ColumnSpec(name="response_ids", dtype="int32", shape=[None]),
    ColumnSpec(name="rollout_logprobs", dtype="float32", shape=[None]),
    ColumnSpec(name="finish_reason", dtype="str"),
    ColumnSpec(name="token_versions", dtype="int32", shape=[None]),
    ColumnSpec(name=EXPECTED, dtype="int32"),
]
_GIVEN: Final = ("response_ids", "rollout_logprobs", "finish_reason", "token_versions")
_REQUEST_BITS: Final = 52
"""Groups of a request are numbered from a random number on, which is also the request's, unless the caller numbers it;
ids stay exact as float64.
"""

B = TypeVar("B", tq.Batch, tq.AsyncBatch)


class SamplesLost(PeerError):
    """Samples of a request will never come: they were dropped, after failures of generators or by `cancel`."""


def stream_engines(
    *,
    table: str = NAME,
    groups: bool = False,
    batch_rows: int | None = None,
    depth: int = 1,
    max_staleness: int | None = 1,
    rows_max: int = 1 << 16,
    lease_s: float = LEASE_S,
) -> Engines:
    """Return the declaration of a job that `AsyncService.generate` and `serve` work on.

    Depth 1 and staleness 1 are StreamRL's asynchronous mode, 0 and 0 its synchronous one. A sample that is too old is
    generated again.

    Args:
        table: name of the table and of its weight channel; default ``"experience"``.
        groups: samples of a prompt are consumed together; default False.
        batch_rows: rows of a training step, by which requests are paced; default None: only the room of the table
            bounds them.
        depth: batches that may run ahead of the one being trained; default 1.
        max_staleness: versions that a sample's weights may be behind; default 1; None: any number.
        rows_max: the most live rows; default 65536.
        lease_s: lease in seconds of the samples that a stream yields; default 600.
    """
    pace = None
    if batch_rows is not None:
        again: dict[str, Any] = {"on_stale": "requeue", "requeue_to": GENERATE}
        stale = {} if max_staleness is None else again
        pace = PacingSpec(stage=TRAIN, batch_rows=batch_rows, depth=depth, max_staleness=max_staleness, **stale)
    return Engines(
        table=table,
        columns=_COLUMNS,
        stages=[
            EngineStage(name=GENERATE, needs=["prompt_ids"], gives=[*_GIVEN], order="priority"),
            EngineStage(
                name=TRAIN, needs=["prompt_ids", *_GIVEN], groups=GroupSpec() if groups else None, lease_s=lease_s
            ),
        ],
        pace=pace,
        rows_max=rows_max,
    )


def check_stages(table: TableBase) -> None:
    """Raise `SchemaError` unless the table has the stages of `stream_engines`."""
    if not {GENERATE, TRAIN} <= table.tasks.keys():
        raise SchemaError(
            f'table "{table.name}" has stages {", ".join(table.tasks)}; a request of samples needs {GENERATE} and '
            f"{TRAIN}: declare the job with stream_engines"
        )


# ---------------------------------------------------------------- the rows of a request, and its results


@dataclass(frozen=True)
class Request:
    """A request before it is put: `rows` rows."""

    number: int
    rows: int
    burst: int
    columns: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        scores: Sequence[float] | None,
        number: int | None = None,
        expected: Sequence[int] | None = None,
    ) -> Request:
        """Make a row for each sample of each prompt, with the fact `tokens` as `expected` says, if given.

        Raises `UsageError` for no prompts, a begun one, and scores or expected tokens of another length.
        """
        if not prompts:
            raise UsageError("a request of no prompts: give at least one")
        if any(prompt.begun is not None for prompt in prompts):
            raise UsageError("a prompt with something begun: the service begins anew; give begun=None")
        samples = [prompt.samples for prompt in prompts]
        index = np.repeat(np.arange(len(prompts), dtype=np.int32), samples)
        first_group = secrets.randbits(_REQUEST_BITS)
        number = first_group if number is None else number
        columns = {
            "request": np.full(len(index), number),
            "prompt": index,
            "sample": np.concatenate([np.arange(count, dtype=np.int32) for count in samples]),
            "prompt_ids": tq.Repeat([prompt.ids for prompt in prompts], samples),
            "group_id": first_group + index.astype(np.int64),
            "group_size": np.repeat(samples, samples),
            "priority": -_places(scores, len(prompts))[index],
            EXPECTED: _tokens(expected, len(prompts))[index],
        }
        if expected is not None:
            columns["tokens"] = _tokens(expected, len(prompts))[index]
        return cls(number, len(index), max(BURST_ROWS, *samples), columns)

    def behind(self, rows: int) -> dict[str, Any]:
        """Return the arguments of the put when `rows` rows were put before: all of those are generated first."""
        return {**self.columns, "priority": self.columns["priority"] - rows}


def _places(scores: Sequence[float] | None, prompts: int) -> NDArray[np.float64]:
    """Return each prompt's place in its request: the largest score is 0. Only the order counts."""
    if scores is None:
        return np.zeros(prompts)
    scores_P = np.asarray(scores, np.float64)
    if scores_P.shape != (prompts,) or np.isnan(scores_P).any():
        raise UsageError(
            f"scores {scores_P.shape} for {prompts} prompts: give one number a prompt, the longest the largest"
        )
    places = np.empty(prompts)
    places[np.argsort(-scores_P, kind="stable")] = np.arange(prompts)
    return places


def _tokens(expected: Sequence[int] | None, prompts: int) -> NDArray[np.int32]:
    """Return the expected tokens of each prompt's samples; 0 where nothing is expected."""
    if expected is None:
        return np.zeros(prompts, np.int32)
    tokens_P = np.asarray(expected)
    if tokens_P.shape != (prompts,) or tokens_P.dtype.kind not in "iu" or (tokens_P.size and tokens_P.min() < 0):
        raise UsageError(
            f"expected tokens {tokens_P.dtype}{list(tokens_P.shape)} for {prompts} prompts: "
            "give one whole number a prompt, 0 for no expectation"
        )
    return np.array(np.minimum(tokens_P, np.iinfo(np.int32).max), np.int32)


def completions(batch: tq.Batch | tq.AsyncBatch) -> list[Completion]:
    """Return the samples of a batch of task *train*, in order. Their arrays are views of shared memory, valid while
    they are referenced.
    """
    columns = (list(batch[name]) for name in _GIVEN)
    index = zip(batch["prompt"].list(), batch["sample"].list(), strict=True)
    return [
        Completion(
            prompt=prompt, sample=sample, ids=ids, logprobs=logprobs, finish_reason=reason, spans=spans(versions)
        )
        for (prompt, sample), ids, logprobs, reason, versions in zip(index, *columns, strict=True)
    ]


def spans(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return ``(version, tokens)`` pairs in order, from the version of each token ``[tokens]``.

    >>> spans(np.array([3, 3, 4], np.int32))
    ((3, 2), (4, 1))
    """
    starts = np.flatnonzero(np.diff(versions, prepend=-2))
    lengths = np.diff(starts, append=len(versions))
    return tuple(zip(np.asarray(versions)[starts].tolist(), lengths.tolist(), strict=True))


def burst_of(group_size: NDArray[Any]) -> int:
    """Return the most samples that a stream of rows with these groups leases at once: a whole group at least."""
    return max(BURST_ROWS, int(group_size.max(initial=0)))


class StreamBase(Generic[B]):
    """The state of a stream, without its calls: which rows belong to the request, and how many are left."""

    def __init__(self, table: TableBase, request: int, left: int, burst: int, timeout_s: float | None) -> None:
        self._whole = table.tasks[TRAIN].groups is not None
        self._request, self._left, self._burst, self._timeout_s = request, left, burst, timeout_s
        self._batch: B | None = None
        self._given: weakref.WeakSet[B] = weakref.WeakSet()
        self._due: deque[Completion] = deque()
        self._closed = False

    @property
    def request(self) -> int:
        """Number of the request, for `resume`."""
        return self._request

    @property
    def left(self) -> int:
        """How many samples are still to come."""
        return self._left + len(self._due)

    @property
    def _mine(self) -> tq.Compare:
        return tq.Compare("request", "==", self._request)

    def _asking(self, rows: int, at_least: int) -> dict[str, Any]:
        """Return the arguments of the next lease: for at most the rows that are left, or it would wait for ever."""
        rows = min(rows, self._left)
        where, columns = self._mine, [*_TAKEN]
        return {
            "rows": rows,
            "at_least": min(at_least, rows),
            "where": where,
            "fields": columns,
            "timeout_s": self._timeout_s,
        }

    def _took(self, batch: B) -> B:
        self._left -= len(batch)
        self._given.add(batch)
        return batch

    def _to_come(self, live: int) -> int:
        """Return how many of the request's live rows this stream does not hold."""
        return live - sum(len(batch) for batch in self._given if not batch.ended)

    def _open(self, batch: B) -> None:
        self._batch = batch
        self._due.extend(completions(batch))

    def _split(self, failed: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the burst that were used, and those to release.

        If using the last yielded sample failed, it is released too. With whole groups, a group is released whole.
        """
        if self._batch is None or self._batch.ended:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        used = np.arange(len(self._batch)) < len(self._batch) - len(self._due) - failed
        if self._whole:
            groups = self._batch.group_id
            used = ~np.isin(groups, groups[~used])
        return self._batch.rows[used], self._batch.rows[~used]

    def _check_lost(self, live: int, late: FlowSignal) -> None:
        live = self._to_come(live)
        if live < self._left:
            raise SamplesLost(
                f"request {self._request}: {self._left} samples were still to come, and {live} are left in the table: "
                "the others were dropped; the generators' logs, and `dropped` of the table's stats, say why"
            ) from late


_TAKEN: Final = ("request", "prompt", "sample", "prompt_ids", EXPECTED, *_GIVEN)
