"""The stream generation service of StreamRL (arXiv 2504.15930, section 4): `update(weights)`, and `generate(prompts)`, a stream.

The law:

1. The service is a table with two tasks, *generate* and *train*, and a weight channel. Generators lease prompts of the
   first, in processes that come and go (`serve`); whoever asked takes finished samples of the second. None knows another.
2. `generate` puts the prompts before it returns, so the next request is generated while the stream of this one is taken:
   that is asynchronous pipelining; with `pacing` it is bounded, in batches and in versions.
3. Requests are handed out one after the other, and inside a request the prompts with the largest scores first: stragglers
   start early (section 5), and do not hold up a request before theirs (decision 0019).
4. A stream gives samples as they finish, in any order; `CompletionStream.batches` as rows that a trainer acknowledges itself, as
   soon as there are `at_least` (dynamic batches, section 4.1). A sample is done once the next was asked for. What was not
   taken when a stream is closed, or its process dies, is handed back: `resume` goes on with it, in any process.
5. A generator that dies loses nothing: its prompts go to others. A prompt on which generators fail as often as the task
   allows is dropped; the stream says so, as `SamplesLost`, when nothing more comes.
"""

from __future__ import annotations

import secrets
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
"""Name of the table, and of the weight channel, unless told otherwise."""
BURST_ROWS: Final = 16
"""A stream takes so many finished samples with one call, if there are as many; one is enough."""
LEASE_S: Final = 600.0
"""A caller may think so long about a burst. One that dies is noticed at once, so only one that hangs delays its samples."""
WAIT_S: Final = 600.0
"""Longest wait for the next sample: above the longest generation."""
_FIELDS: Final = (
    tq.Field("request", "int64"),
    tq.Field("prompt", "int32"),
    tq.Field("sample", "int32"),
    tq.Field("prompt_ids", "int32", (None,)),
    tq.Field("response_ids", "int32", (None,)),
    tq.Field("rollout_logprobs", "float32", (None,)),
    tq.Field("finish_reason", "str"),
    tq.Field("token_versions", "int32", (None,)),
)
_GIVEN: Final = ("response_ids", "rollout_logprobs", "finish_reason", "token_versions")
_REQUEST_BITS: Final = 52
"""Requests are drawn at random, and number groups from there on: ids stay exact as float64."""

B = TypeVar("B", tq.Batch, tq.AsyncBatch)


class SamplesLost(PeerError):
    """Samples of a request will never come: they were dropped, by failures of generators or by someone's order."""


def pacing(batch_rows: int, *, depth: int = 1, max_staleness: int | None = 1, channel: str = NAME) -> tq.Pacing:
    """How far requests may run ahead of what is taken: StreamRL's asynchronous mode is depth 1 and staleness 1, 0 and 0 its
    synchronous one. A sample that is too old is generated again."""
    return tq.Pacing(
        TRAIN,
        batch_rows=batch_rows,
        depth=depth,
        max_staleness=max_staleness,
        on_stale=tq.Requeue(GENERATE),
        channel=channel,
    )


def terms(*, groups: bool, lease_s: float, pacing: tq.Pacing | None, rows_max: int) -> dict[str, Any]:
    """The table of a service, as `Queue.create_table` takes it."""
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
    def of(cls, prompts: Sequence[Prompt], scores: Sequence[float] | None) -> Request:
        """A row for each sample of each prompt; `UsageError` for none, for one that is begun, or scores that do not fit."""
        if not prompts:
            raise UsageError("a request of no prompts: give at least one")
        if any(prompt.begun is not None for prompt in prompts):
            raise UsageError("a prompt with something begun: the service begins anew; give begun=None")
        samples = [prompt.samples for prompt in prompts]
        index = np.repeat(np.arange(len(prompts), dtype=np.int32), samples)
        number = secrets.randbits(_REQUEST_BITS)
        columns = {
            "request": np.full(len(index), number),
            "prompt": index,
            "sample": np.concatenate([np.arange(count, dtype=np.int32) for count in samples]),
            "prompt_ids": tq.Repeat([prompt.ids for prompt in prompts], samples),
            "group_id": number + index.astype(np.int64),
            "group_size": np.repeat(samples, samples),
            "priority": -_places(scores, len(prompts))[index],
        }
        return cls(number, len(index), max(BURST_ROWS, *samples), columns)

    def behind(self, rows: int) -> dict[str, Any]:
        """What to put when so many rows were put before: all of those go first."""
        return {**self.columns, "priority": self.columns["priority"] - rows}


def _places(scores: Sequence[float] | None, prompts: int) -> NDArray[np.float64]:
    """Place of each prompt in its request: the largest score is 0. Only the order counts, as of any ranker."""
    if scores is None:
        return np.zeros(prompts)
    given = np.asarray(scores, np.float64)
    if given.shape != (prompts,) or np.isnan(given).any():
        raise UsageError(
            f"scores {given.shape} for {prompts} prompts: give one number a prompt, the longest the largest"
        )
    places = np.empty(prompts)
    places[np.argsort(-given, kind="stable")] = np.arange(prompts)
    return places


def completions(batch: tq.Batch | tq.AsyncBatch) -> list[Completion]:
    """The samples of a batch of task *train*, in its order. Their arrays are views, valid for as long as they are held."""
    columns = (list(batch[name]) for name in _GIVEN)
    index = zip(batch["prompt"].list(), batch["sample"].list(), strict=True)
    return [
        Completion(
            prompt=prompt, sample=sample, ids=ids, logprobs=logprobs, finish_reason=reason, spans=spans(versions)
        )
        for (prompt, sample), ids, logprobs, reason, versions in zip(index, *columns, strict=True)
    ]


def spans(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """``(version, tokens)`` in order, for the version of each token ``[tokens]``.

    >>> spans(np.array([3, 3, 4], np.int32))
    ((3, 2), (4, 1))
    """
    starts = np.flatnonzero(np.diff(versions, prepend=-2))
    lengths = np.diff(starts, append=len(versions))
    return tuple(zip(np.asarray(versions)[starts].tolist(), lengths.tolist(), strict=True))


class StreamBase(Generic[B]):
    """What the streams of both fronts share: which rows are theirs, and how far they are."""

    def __init__(self, table: TableBase, request: int, left: int, burst: int, timeout_s: float) -> None:
        self._whole = table.tasks[TRAIN].groups is not None
        self._request, self._left, self._burst, self._timeout_s = request, left, burst, timeout_s
        self._batch: B | None = None
        self._due: deque[Completion] = deque()
        self._closed = False

    @property
    def request(self) -> int:
        """Number of the request, for `resume`."""
        return self._request

    @property
    def _mine(self) -> tq.Compare:
        return tq.Compare("request", "==", self._request)

    def _asking(self, rows: int, at_least: int) -> dict[str, Any]:
        """Terms of the next lease. Never for more than is left, or it would wait for what is not there."""
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
        return batch

    def _open(self, batch: B) -> None:
        self._batch = batch
        self._due.extend(completions(batch))

    def _split(self, failed: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of the burst that were used, and those to hand back: the last that was given too, where using it failed, and
        all of a group of which one goes back, where groups are taken whole."""
        if self._batch is None or self._batch.ended:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        used = np.arange(len(self._batch)) < len(self._batch) - len(self._due) - failed
        if self._whole:
            groups = self._batch.group_id
            used = ~np.isin(groups, groups[~used])
        return self._batch.rows[used], self._batch.rows[~used]

    def _check_lost(self, live: int, late: FlowSignal) -> None:
        if live < self._left:
            raise SamplesLost(
                f"request {self._request}: {self._left} samples were still to come, and {live} are left in the table: the "
                "others were dropped; the generators' logs, and `dropped` of the table's stats, say why"
            ) from late


_TAKEN: Final = ("request", "prompt", "sample", "prompt_ids", *_GIVEN)


class CompletionStream(StreamBase[tq.Batch]):
    """Finished samples of one request: an iterator of `Completion`, and a context manager. One thread at a time.

    With groups, a sample is done with the last of its group. A wait for the next one ends after the stream's `timeout_s` (`DeadlineExceeded`, or `SamplesLost`). Leaving the ``with`` block
    by an exception hands back the sample that was being used, too.
    """

    def __init__(self, table: tq.Table, request: int, left: int, burst: int, timeout_s: float) -> None:
        super().__init__(table, request, left, burst, timeout_s)
        self._table = table

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Completion:
        """The next sample that is finished."""
        if not self._due:
            self._settle(failed=False)
            if not self._more():
                raise StopIteration
            self._open(self._lease(self._burst, 1))
        return self._due.popleft()

    def batches(self, rows: int, *, at_least: int = 1) -> Iterator[tq.Batch]:
        """Up to `rows` samples at a time, as soon as `at_least` are finished, fewer at the end: a trainer's dynamic batches.

        Each is the caller's to ack or release before it asks for the next; what it releases comes again. With groups, both
        numbers count rows of whole groups.
        """
        self._settle(failed=False)
        while self._more():
            yield self._lease(rows, at_least)

    def close(self) -> None:
        """Hand back what was not taken. Again: nothing."""
        self._closed = True
        self._settle(failed=False)
        self._due.clear()

    def cancel(self) -> int:
        """Close, and drop what is left of the request, also what is being generated. Returns how many rows."""
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
        """Whether samples are left; what was given back counts again."""
        if not self._left and not self._closed:
            self._left = len(self._live())
        return self._left > 0 and not self._closed

    def _live(self) -> NDArray[np.int64]:
        with self._table.read(where=self._mine, fields=[]) as found:
            return found.rows

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
    """A stream generation service, as whoever trains sees it. Any number of processes may `join` one and ask it.

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
        """Make the service `name`, or join the same one. groups: samples of a prompt are taken together. rows_max: room.

        pacing: how far requests may run ahead (`pacing`); without it, `generate` waits for room alone.
        """
        table = queue.create_table(name, **terms(groups=groups, lease_s=lease_s, pacing=pacing, rows_max=rows_max))
        return cls(queue, table, queue.weights(channel_of(table)))

    @classmethod
    def join(cls, queue: tq.Queue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """The service of this name, which someone makes within `timeout_s`."""
        table = queue.table(name, timeout_s=timeout_s)
        check(table)
        return cls(queue, table, queue.weights(channel_of(table)))

    @property
    def table(self) -> tq.Table:
        """The table of the service."""
        return self._table

    @property
    def channel(self) -> tq.WeightChannel:
        """Where its weights are published."""
        return self._channel

    def update(self, weights: Mapping[str, Any], *, version: int | None = None, timeout_s: float = 60.0) -> int:
        """Publish weights for all generators, as `version` (None: the one after the newest), and return it.

        Generators take them between two requests; nothing waits for that, and generation goes on.
        """
        if version is None:
            known = self._queue.stats()["channels"].get(self._channel.name)
            version = 0 if known is None else known["newest"] + 1
        self._channel.publish(version, weights, timeout_s=timeout_s)
        return version

    def generate(
        self, prompts: Sequence[Prompt], *, scores: Sequence[float] | None = None, timeout_s: float = WAIT_S
    ) -> CompletionStream:
        """Have `prompts` completed, and return the stream of their samples; they are being generated from now on.

        scores: of how long each prompt's answers will be, such as a ranker's; only the order counts. Blocks while there is
        no room, or the pacing does not admit them. timeout_s: for that, and then for each wait of the stream.
        """
        request = Request.of(prompts, scores)
        with self._table.reserve(request.rows, timeout_s=timeout_s) as reservation:
            columns = request.behind(self._table.stats()["rows_put"])
            self._table.put(reservation=reservation, timeout_s=timeout_s, **columns)
        return CompletionStream(self._table, request.number, request.rows, request.burst, timeout_s)

    def resume(self, request: int, *, timeout_s: float = WAIT_S) -> CompletionStream:
        """The stream of what is left of a request, of whichever process. Nothing left: it ends at once."""
        with self._table.read(where=tq.Compare("request", "==", request), fields=[]) as found:
            burst = max(BURST_ROWS, int(found.group_size.max(initial=0)))
            return CompletionStream(self._table, request, len(found), burst, timeout_s)

    def seal(self) -> None:
        """No more requests: generators end when all is generated, streams go on to their end."""
        self._table.seal()


def channel_of(table: TableBase) -> str:
    """The weight channel of a service."""
    return table.pacing.channel if table.pacing and table.pacing.channel else table.name


def check(table: TableBase) -> None:
    """`SchemaError` unless the table is one of a service."""
    if not {GENERATE, TRAIN} <= table.tasks.keys():
        raise SchemaError(
            f'table "{table.name}" is no stream generation service: it has tasks {", ".join(table.tasks)}, a service has '
            f"{GENERATE} and {TRAIN}; join another one, or create one under another name"
        )
