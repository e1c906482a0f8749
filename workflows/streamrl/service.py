"""The stream generation service of StreamRL (arXiv 2504.15930, section 4): `update(weights)`, and `generate(prompts)`, a stream.

Rules:

1. The service is a table with two tasks, *generate* and *train*, and a weight channel. Generator processes come and go (`serve`) and lease
   prompts of the first task; the process that called `generate` leases finished samples of the second.
2. `generate` puts the prompts before it returns, so the next request is generated while the stream of the current one is consumed:
   asynchronous pipelining. `pacing` bounds it, in batches and in versions.
3. Requests are generated in their order, and within a request the prompts with the largest scores first: long answers
   start early (section 5), but do not delay an earlier request (decision 0019).
4. A stream yields samples as they finish, in any order. `CompletionStream.batches` yields them as batches that a trainer acks itself, as
   soon as `at_least` are finished (dynamic batches, section 4.1). A sample is done when the next one is requested. When a stream is closed,
   or its process dies, the remaining samples are released: `resume` continues with them in any process. Batches may be held: a trainer
   acks those of a step together, after its optimizer step (`Table.ack`), and a request with a `number` is not put twice.
5. A generator that dies loses nothing: its prompts go to others. A prompt on which generators fail as often as the task
   allows is dropped; the stream then raises `SamplesLost` at its end.
"""

from __future__ import annotations

import secrets
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Prompt
from transferqueue.client.handles.table import TableBase
from transferqueue.errors import DeadlineExceeded, EndOfTable, FlowSignal, NotFound, PeerError, SchemaError, UsageError

GENERATE: Final = "generate"
TRAIN: Final = "train"
NAME: Final = "stream"
"""Default name of the table and of its weight channel."""
EXPECTED: Final = "expected_tokens"
"""Field with the tokens that a sample is expected to have; 0: no expectation."""
BURST_ROWS: Final = 16
"""Most samples that a stream leases at once, if so many are finished."""
LEASE_S: Final = 600.0
"""Lease of the samples that a stream yields. A caller's death is detected at once; one that hangs delays its samples so long."""
_FIELDS: Final = (
    tq.Field("request", "int64"),
    tq.Field("prompt", "int32"),
    tq.Field("sample", "int32"),
    tq.Field("prompt_ids", "int32", (None,)),
    tq.Field("response_ids", "int32", (None,)),
    tq.Field("rollout_logprobs", "float32", (None,)),
    tq.Field("finish_reason", "str"),
    tq.Field("token_versions", "int32", (None,)),
    tq.Field(EXPECTED, "int32"),
)
_GIVEN: Final = ("response_ids", "rollout_logprobs", "finish_reason", "token_versions")
_REQUEST_BITS: Final = 52
"""Groups of a request are numbered from a random number on, which is also the request's, unless the caller numbers it; ids stay exact as float64."""

B = TypeVar("B", tq.Batch, tq.AsyncBatch)


class SamplesLost(PeerError):
    """Samples of a request will never come: they were dropped, after failures of generators or by a call of `cancel`."""


def pacing(batch_rows: int, *, depth: int = 1, max_staleness: int | None = 1, channel: str = NAME) -> tq.Pacing:
    """Return how far requests may run ahead of training; a sample that is too old is generated again.

    Depth 1 and staleness 1 are StreamRL's asynchronous mode, 0 and 0 its synchronous one.
    """
    return tq.Pacing(
        TRAIN,
        batch_rows=batch_rows,
        depth=depth,
        max_staleness=max_staleness,
        on_stale=tq.Requeue(GENERATE),
        channel=channel,
    )


def terms(*, groups: bool, lease_s: float, pacing: tq.Pacing | None, rows_max: int) -> dict[str, Any]:
    """Return the arguments of `Queue.create_table` for a service."""
    tasks = [
        tq.Task(GENERATE, needs=["prompt_ids"], gives=_GIVEN, selector=tq.Priority()),
        tq.Task(
            TRAIN,
            needs=["prompt_ids", *_GIVEN],
            groups=tq.Complete() if groups else None,
            lease_s=lease_s,
        ),
    ]
    return {"fields": _FIELDS, "tasks": tasks, "limits": tq.Limits(rows=rows_max), "pacing": pacing, "exist_ok": True}


# ---------------------------------------------------------------- what a request puts, and what comes back


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
            f"expected tokens {tokens_P.dtype}{list(tokens_P.shape)} for {prompts} prompts: give one whole number a prompt, 0 for no expectation"
        )
    return np.array(np.minimum(tokens_P, np.iinfo(np.int32).max), np.int32)


def completions(batch: tq.Batch | tq.AsyncBatch) -> list[Completion]:
    """Return the samples of a batch of task *train*, in order. Their arrays are views of shared memory, valid while they are referenced."""
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


class StreamBase(Generic[B]):
    """What the sync and the async stream share: which rows belong to the request, and how many are left."""

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
        """Return the arguments of the next lease. It never asks for more rows than are left, or it would wait for ever."""
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
                f"request {self._request}: {self._left} samples were still to come, and {live} are left in the table: the "
                "others were dropped; the generators' logs, and `dropped` of the table's stats, say why"
            ) from late


_TAKEN: Final = ("request", "prompt", "sample", "prompt_ids", EXPECTED, *_GIVEN)


class CompletionStream(StreamBase[tq.Batch]):
    """Finished samples of one request: an iterator of `Completion`, and a context manager. Use it from one thread at a time.

    With groups, a sample is done with the last of its group. The wait for the next one ends after the stream's `timeout_s`
    (`DeadlineExceeded`, or `SamplesLost`). Leaving the ``with`` block by an exception releases the sample in use, too.
    """

    def __init__(self, table: tq.Table, request: int, left: int, burst: int, timeout_s: float | None) -> None:
        super().__init__(table, request, left, burst, timeout_s)
        self._table = table

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Completion:
        """Return the next finished sample. Blocks."""
        if not self._due:
            self._settle(failed=False)
            if not self._more():
                raise StopIteration
            self._open(self._lease(self._burst, 1))
        return self._due.popleft()

    def batches(self, rows: int, *, at_least: int = 1) -> Iterator[tq.Batch]:
        """Yield up to `rows` samples at a time, as soon as `at_least` are finished, fewer at the end: a trainer's dynamic batches.

        The caller acks or releases each batch, now or later: batches may be held to the end of the stream and acked together
        (`Table.ack`). Released samples come again. With groups, both numbers count rows of whole groups.
        """
        self._settle(failed=False)
        while self._more():
            yield self._lease(rows, at_least)

    def close(self) -> None:
        """Release the samples that were not consumed. A second call does nothing."""
        self._closed = True
        self._settle(failed=False)
        self._due.clear()

    def cancel(self) -> int:
        """Close, and drop the rest of the request, including what is being generated. Return the number of rows dropped."""
        self.close()
        while True:
            rows = self._live()
            try:
                return self._table.drop(rows, "cancelled") if len(rows) else 0
            except NotFound:
                continue  # one ended meanwhile: fewer are left

    def _lease(self, rows: int, at_least: int) -> tq.Batch:
        try:
            return self._took(self._table.lease(TRAIN, **self._asking(rows, at_least)))
        except (DeadlineExceeded, EndOfTable) as late:
            self._check_lost(len(self._live()), late)
            raise

    def _more(self) -> bool:
        """Whether samples are left; released ones count again."""
        if not self._left and not self._closed:
            self._left = self._to_come(len(self._live()))
        return self._left > 0 and not self._closed

    def _live(self) -> NDArray[np.int64]:
        with self._table.read(where=self._mine, fields=[]) as read:
            return read.rows

    def _settle(self, *, failed: bool) -> None:
        used, back = self._split(failed)
        if len(used) and self._batch is not None:
            self._batch.ack(used)
        if len(back) and self._batch is not None:
            self._batch.release(back)
        self._batch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._settle(failed=True)
        self.close()


class StreamService:
    """A stream generation service, for the training process. Any number of processes may `join` one and call `generate`.

    Example: ``with service.generate(prompts) as stream: for sample in stream: ...``
    """

    def __init__(self, queue: tq.Queue, table: tq.Table, channel: tq.WeightChannel) -> None:
        self._queue, self._table, self._channel = queue, table, channel

    @classmethod
    def create(
        cls,
        queue: tq.Queue,
        *,
        name: str = NAME,
        groups: bool = False,
        pacing: tq.Pacing | None = None,
        rows_max: int = 1 << 16,
        lease_s: float = LEASE_S,
    ) -> Self:
        """Create the service `name`, or join it if it exists with the same arguments.

        groups: samples of a prompt are consumed together. rows_max: bound of live rows. pacing: how far requests may run
        ahead (`pacing`); without it, only the room of the table bounds `generate`.
        """
        table = queue.create_table(name, **terms(groups=groups, lease_s=lease_s, pacing=pacing, rows_max=rows_max))
        return cls(queue, table, queue.weights(channel_of(table)))

    @classmethod
    def join(cls, queue: tq.Queue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """Join the service of this name; wait at most `timeout_s` for its creation."""
        table = queue.table(name, timeout_s=timeout_s)
        check(table)
        return cls(queue, table, queue.weights(channel_of(table)))

    @property
    def table(self) -> tq.Table:
        """The table of the service."""
        return self._table

    @property
    def channel(self) -> tq.WeightChannel:
        """The weight channel of the service."""
        return self._channel

    def update(self, weights: Mapping[str, Any], *, version: int | None = None, timeout_s: float | None = None) -> int:
        """Publish weights for all generators, as `version` (None: the one after the newest), and return the version.

        Generators load them between two requests; this call does not wait for that, and generation continues.
        """
        if version is None:
            channel = self._queue.stats()["channels"].get(self._channel.name)
            version = 0 if channel is None else channel["newest"] + 1
        self._channel.publish(version, weights, timeout_s=timeout_s)
        return version

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        scores: Sequence[float] | None = None,
        expected: Sequence[int] | None = None,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> CompletionStream:
        """Request completions of `prompts`, and return the stream of their samples. Generation starts at once.

        scores: expected length of each prompt's answers, such as a ranker's scores; only the order counts. expected: the same in tokens, by which generators may
        choose samples (`serve(where=)`); it orders nothing (`dispatch.LengthRequests` does both). Blocks while there is
        no room, or while the pacing does not admit the rows. timeout_s: for that, and for each wait of the stream. number: of the request,
        such as the trainer's step (None: a random one). If rows of this number are in the table, they are not put again: the call resumes
        them. So a trainer that was killed asks again for what it may have asked for; one process at a time asks for a number.
        """
        request = Request.of(prompts, scores, number, expected)
        if number is not None:
            begun = self.resume(number, timeout_s=timeout_s)
            if begun.left:
                return begun
        with self._table.reserve(request.rows, timeout_s=timeout_s) as reservation:
            columns = request.behind(self._table.stats()["rows_put"])
            self._table.put(reservation=reservation, timeout_s=timeout_s, **columns)
        return CompletionStream(self._table, request.number, request.rows, request.burst, timeout_s)

    def resume(self, request: int, *, timeout_s: float | None = None) -> CompletionStream:
        """Return the stream of a request's remaining samples, from any process. If nothing is left, it ends at once."""
        with self._table.read(where=tq.Compare("request", "==", request), fields=[]) as read:
            burst = max(BURST_ROWS, int(read.group_size.max(initial=0)))
            return CompletionStream(self._table, request, len(read), burst, timeout_s)

    def seal(self) -> None:
        """Accept no more requests: generators end when everything is generated, and streams continue to their end."""
        self._table.seal()


def channel_of(table: TableBase) -> str:
    """Return the name of a service's weight channel."""
    return table.pacing.channel if table.pacing and table.pacing.channel else table.name


def check(table: TableBase) -> None:
    """Raise `SchemaError` unless the table belongs to a service."""
    if not {GENERATE, TRAIN} <= table.tasks.keys():
        raise SchemaError(
            f'table "{table.name}" is no stream generation service: it has tasks {", ".join(table.tasks)}, a service has '
            f"{GENERATE} and {TRAIN}; join another one, or create one under another name"
        )
