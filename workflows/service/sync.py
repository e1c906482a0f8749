# Written by `python -m tests.sync_api` from workflows/service/aio.py: change it there.
"""The calls of AsyncFlow and StreamRL on one table, for threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.adapters.protocols import Completion, Prompt
from transferqueue.errors import DeadlineExceeded, EndOfTable, NotFound
from transferqueue.wire.answers.stats import TableStats
from transferqueue.workflows.service.arguments import PromptBatch, announcement, check_columns, check_facts
from transferqueue.workflows.service.declaration import NAME, Engines
from transferqueue.workflows.service.experience import ExperienceIndex, Outstanding, lease_terms
from transferqueue.workflows.service.samples import TRAIN, Request, StreamBase, burst_of, check_stages


class ExperienceStream:
    """Batches of a stage with their indices: ``for``, ``with``.

    Made by `Service.create_stream_data_loader`.
    """

    def __init__(self, loader: tq.Loader) -> None:
        self._loader = loader
        self._outstanding = Outstanding[tq.Batch]()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[tq.Batch, ExperienceIndex[tq.Batch]]:
        """Return the next rows; waits up to ``timeout_s``."""
        return self._outstanding.add(next(self._loader))

    def close(self) -> None:
        """Release the batches that were not taken, and every batch without results. A second call does nothing."""
        self._loader.close()
        for batch in self._outstanding.left():
            batch.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CompletionStream(StreamBase[tq.Batch]):
    """Finished samples of one request: ``for`` gives each `Completion`. Made by `Service.generate`.

    Use ``with``, from one thread at a time. With groups, a sample is done with the last of its group. The
    wait for the next one ends after the stream's `timeout_s` (`DeadlineExceeded`, or `SamplesLost`). Leaving the block
    by an exception releases the sample in use, too.
    """

    def __init__(self, table: tq.Table, request: int, left: int, burst: int, timeout_s: float | None) -> None:
        super().__init__(table, request, left, burst, timeout_s)
        self._table = table

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Completion:
        """Return the next finished sample. Waits for it; an interrupt while it waits takes no sample."""
        if not self._due:
            self._settle(failed=False)
            if not self._more():
                raise StopIteration
            self._open(self._lease(self._burst, 1))
        return self._due.popleft()

    def batches(self, rows: int, *, at_least: int = 1) -> Iterator[tq.Batch]:
        """Yield samples as batches, as soon as enough are finished, fewer at the end: a trainer's dynamic batches.

        The caller acks or releases each batch, now or later: batches may be held to the end of the stream and acked
        together (`Table.ack`). Released samples come again. With groups, both numbers count rows of whole groups.

        Args:
            rows: the most samples of a batch.
            at_least: the fewest samples of a batch; default 1.

        Raises:
            DeadlineExceeded: no sample came within the stream's `timeout_s`.
            SamplesLost: samples of the request were dropped.
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
        """Close, and drop the rest of the request, including the samples that are being generated.

        Returns:
            The number of rows dropped.
        """
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


class Service:
    """A job's table and weight channel by the calls of AsyncFlow and StreamRL. Made by `init_engines` or `join`.

    Every method may be called from any thread.
    """

    def __init__(self, queue: tq.Queue, table: tq.Table, channel: tq.WeightChannel) -> None:
        self._queue, self._table, self._channel = queue, table, channel

    @classmethod
    def init_engines(cls, queue: tq.Queue, engines: Engines) -> Self:
        """Declare a job, or join it if it was declared the same way. Starts no engine.

        Args:
            queue: the queue.
            engines: the declaration.

        Returns:
            The service.

        Raises:
            AlreadyExists: a job of this name was declared differently.
            UsageError: an invalid declaration.
        """
        table = queue.create_table(engines.table, **engines.terms())
        return cls(queue, table, queue.weights(engines.table))

    @classmethod
    def join(cls, queue: tq.Queue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """Join a job that is declared, or wait for its declaration.

        Args:
            queue: the queue.
            name: of the job; default ``"experience"``.
            timeout_s: seconds to wait; default 30.

        Returns:
            The service.

        Raises:
            NotFound: it was not declared in time.
        """
        return cls(queue, queue.table(name, timeout_s=timeout_s), queue.weights(name))

    @property
    def name(self) -> str:
        """Name of the table and of its weight channel."""
        return self._table.name

    @property
    def stages(self) -> list[str]:
        """Names of the stages."""
        return list(self._table.tasks)

    @property
    def table(self) -> tq.Table:
        """The table of the job, for everything else."""
        return self._table

    @property
    def channel(self) -> tq.WeightChannel:
        """The weight channel of the job."""
        return self._channel

    # ---------------------------------------------------------------- AsyncFlow

    def put_prompts_data(
        self, prompts_data: Mapping[str, Any], *, samples: int = 1, timeout_s: float | None = None, **facts: Any
    ) -> NDArray[np.int64]:
        """Put each prompt as a group of `samples` rows. Waits for room.

        Args:
            prompts_data: columns, each with one value for each prompt.
            samples: rows of each prompt; default 1.
            timeout_s: longest wait for room in seconds; default None: no limit.
            **facts: as of `Table.put`, one for all or one for each prompt. With a key, the rows of a prompt have
                it with the suffixes ``/0``, ``/1`` and so on; an existing key is `AlreadyExists`, so a repeated call
                changes nothing.

        Returns:
            Row ids, int64 ``[prompts * samples]``, those of a prompt together.

        Raises:
            AlreadyExists: a row has one of the keys.
            DeadlineExceeded: there was no room in time.
            Impossible: there never can be.
        """
        prompts, started = PromptBatch(prompts_data, samples, facts), time.monotonic()
        with self._table.reserve(prompts.rows, timeout_s=timeout_s) as room:
            left_s = timeout_s and max(0.0, timeout_s - (time.monotonic() - started))
            return self._table.put(reservation=room, timeout_s=left_s, **prompts.asked)

    def get_experience_data(
        self,
        experience_consumer_stage: str,
        experience_columns: Sequence[str] | None = None,
        experience_count: int | None = None,
        **terms: Any,
    ) -> tuple[tq.Batch, ExperienceIndex[tq.Batch]]:
        """Lease rows of a stage. Waits and raises as `Table.lease`.

        Args:
            experience_consumer_stage: the stage.
            experience_columns: columns to bring; default None: those that the stage needs.
            experience_count: the number of rows; default None: `terms` says how many.
            **terms: further arguments of `Table.lease`, such as ``groups`` or ``tokens`` instead of a count.

        Returns:
            The batch and its index, by which `put_experience_data` takes results.
        """
        wanted = lease_terms(experience_columns, experience_count, terms)
        batch = self._table.lease(experience_consumer_stage, **wanted)
        return batch, ExperienceIndex(batch)

    def put_experience_data(
        self,
        experience_data: Mapping[str, Any],
        index: ExperienceIndex[tq.Batch] | tq.Batch | Any,
        *,
        rows: Any = None,
        **facts: Any,
    ) -> None:
        """Give results of rows, and end their lease, in one commit.

        Raises as `Batch.ack`; with row ids, as `Table.update`.

        Args:
            experience_data: columns, each with one value for each row.
            index: the index or the batch that the rows came with. With row ids instead, the columns are late columns of
                these rows.
            rows: ids of those rows of the batch that the results are of; default None: all that are left.
            **facts: as of `Table.put`.

        Raises:
            LeaseExpired: the rows belong to another worker. Nothing was changed.
        """
        arguments = {**check_facts(facts), **check_columns(experience_data)}
        taken = index.batch if isinstance(index, ExperienceIndex) else index
        if isinstance(taken, tq.Batch):
            taken.ack(rows, **arguments)
        else:
            self._table.update(taken, **arguments)

    def weight_sync_notify(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """Announce weights of a version: as tensors, or with a notice that says where they are.

        Versions ascend. This advances the table's clock to `version`; it waits while rows in the table would become too
        old.

        Args:
            version: of the weights.
            tensors: to publish, by name; default None: none.
            notice: any JSON of at most 4096 bytes, such as the path of a checkpoint; default None.
            timeout_s: seconds to wait; default None: no limit.

        Raises:
            DeadlineExceeded: the clock was held, or there was no memory, for all that time.
            UsageError: a version that is not above the newest, or a notice that is no JSON or too long.
        """
        self._channel.publish(version, announcement(tensors, notice), timeout_s=timeout_s)

    def get_weights(self, above: int = -1, *, timeout_s: float | None = None) -> tq.Weights:
        """Wait for a version of the weights, and return the newest. `notice_of` returns its notice.

        Args:
            above: wait for a version above this one; default -1: any.
            timeout_s: seconds to wait; default None: no limit.

        Raises:
            DeadlineExceeded: no such version came in time.
        """
        return self._channel.pull(above, timeout_s=timeout_s)

    def create_stream_data_loader(
        self,
        *,
        experience_consumer_stage: str,
        experience_columns: Sequence[str] | None = None,
        experience_count: int | None = None,
        prefetch: int = 2,
        **terms: Any,
    ) -> ExperienceStream:
        """Return a stream of ``(batch, index)`` of a stage, fetched ahead, until the table is sealed and drained.

        Args:
            experience_consumer_stage: the stage.
            experience_columns: columns to bring; default None: those that the stage needs.
            experience_count: the number of rows of a batch; default None: `terms` says how many.
            prefetch: batches that are leased and brought while one is computed with; default 2.
            **terms: further arguments of `Table.lease`. With ``rank`` and ``world`` each rank gets its share of
                one agreed batch.
        """
        wanted = lease_terms(experience_columns, experience_count, terms)
        return ExperienceStream(self._table.loader(experience_consumer_stage, prefetch=prefetch, **wanted))

    # ---------------------------------------------------------------- StreamRL

    def update(self, weights: Mapping[str, Any], *, version: int | None = None, timeout_s: float | None = None) -> int:
        """Publish weights for all engines. Raises as `weight_sync_notify`.

        Engines load them between two requests; this call does not wait for that, and generation continues.

        Args:
            weights: tensors by name.
            version: of the weights; default None: the one after the newest.
            timeout_s: seconds to wait; default None: no limit.

        Returns:
            The version.
        """
        if version is None:
            channel = self._queue.stats().channels.get(self._channel.name)
            version = 0 if channel is None else channel.newest + 1
        self.weight_sync_notify(version, weights, timeout_s=timeout_s)
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
        """Request completions of prompts, and return the stream of their samples. Generation starts at once.

        The job is one of `stream_engines`. Waits while there is no room, or while the pace does not admit the rows.

        Args:
            prompts: token ids, and how many samples of each.
            scores: expected length of each prompt's answers, such as a ranker's scores; only the order counts. Default
                None.
            expected: the same in tokens, by which engines may choose samples (`serve(where=)`); it orders nothing
                (`LengthRequests` does both). Default None.
            number: of the request, such as the trainer's step; default None: a random one. If rows of this number are
                in the table, they are not put again: the call resumes them. So a trainer that was killed asks again for
                the samples that it may have asked for; one process at a time asks for a number.
            timeout_s: longest wait in seconds, of this call and of the stream for each next sample; default None: no
                limit.

        Returns:
            The stream.

        Raises:
            DeadlineExceeded: the rows were not admitted in time.
            SchemaError: the job has other stages than those of `stream_engines`.
            UsageError: no prompts, one with a begun completion, or other numbers of scores or tokens.
        """
        check_stages(self._table)
        request = Request.of(prompts, scores, number, expected)
        if number is not None:
            begun = self.resume(number, timeout_s=timeout_s)
            if begun.left:
                return begun
        with self._table.reserve(request.rows, timeout_s=timeout_s) as reservation:
            columns = request.behind(self._table.stats().rows_put)
            self._table.put(reservation=reservation, timeout_s=timeout_s, **columns)
        return CompletionStream(self._table, request.number, request.rows, request.burst, timeout_s)

    def resume(self, request: int, *, timeout_s: float | None = None) -> CompletionStream:
        """Return the stream of a request's remaining samples, in any process. If nothing is left, it ends at once.

        Args:
            request: number of the request.
            timeout_s: longest wait of the stream for each next sample in seconds; default None: no limit.

        Raises:
            SchemaError: the job has other stages than those of `stream_engines`.
        """
        check_stages(self._table)
        with self._table.read(where=tq.Compare("request", "==", request), fields=[]) as read:
            burst = burst_of(read.group_size)
            return CompletionStream(self._table, request, len(read), burst, timeout_s)

    # ---------------------------------------------------------------- both

    def status(self) -> TableStats:
        """Return statistics of the table (`transferqueue docs figures`)."""
        return self._table.stats()

    def seal(self) -> None:
        """Put no more prompts: engines drain the table, then get `EndOfTable`."""
        self._table.seal()
