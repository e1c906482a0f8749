"""The service interface of AsyncFlow (arXiv 2507.01663, section 5): five calls by which engines share a table without knowing it.

Rules:

1. `init_engines` declares the job: its stages, what each needs and gives, and how far prompts may run ahead. Any process may
   call it at any time with the same declaration. It starts no engine.
2. `put_prompts` waits for room, then puts every prompt as a group of `samples` rows that share its values, or nothing.
3. `get_experience` leases rows of a stage until a deadline. `put_experience` gives results and ends the lease in one
   commit. A worker that dies loses its rows to others, and its late results are refused.
4. `notify_weights` announces a version: it advances the table's clock and wakes calls of `get_weights`. A version carries
   a notice, such as the path of a checkpoint, or tensors.
5. `status` counts every row that was ever put: nothing is lost silently.

AsyncFlow's own names are beside them, with its conventions: `put_prompts_data`, `get_experience_data` and `put_experience_data` (a batch and its
index; results return by index), `weight_sync_notify`, `create_stream_data_loader` (`experience`). They are the same calls.

`service_aio` has the same calls for event loops, and `transferqueue serve --http` over HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

import transferqueue as tq
from transferqueue.client.handles.table import TableBase
from transferqueue.client.operations.facts import GivenFacts
from transferqueue.errors import SchemaError, UsageError, listing
from transferqueue.limits import TEXT_CHARS_MAX
from transferqueue.workflows.asyncflow.declaration import NAME, Engines
from transferqueue.workflows.asyncflow.experience import ExperienceIndex, ExperienceStream, lease_terms

NOTICE: Final = "notice"
"""Name of the tensor that carries a version's notice, as the bytes of its JSON."""
_GROUP_BITS: Final = 52
"""Group ids start at a random number, so that putting processes need not agree; they stay exact as float64."""
FACTS: Final = frozenset(GivenFacts.__struct_fields__)
_SAID: Final = FACTS | {"self", "rows", "overwrite", "reservation", "timeout_s", "step", "failed", "reason"}
"""Parameters of the queue's calls, which therefore cannot be column names."""


def check_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `facts`. Raises `UsageError` for names that are no facts: the queue would take them for columns."""
    unknown = facts.keys() - FACTS
    if unknown:
        raise UsageError(f"fact {listing(unknown)} is unknown; known are {', '.join(sorted(FACTS))}")
    return facts


def check_columns(columns: object) -> Mapping[str, Any]:
    """Return `columns`. Raises `UsageError` for names that are facts or options."""
    if not isinstance(columns, Mapping):
        raise UsageError(f"columns are {type(columns).__name__}; give a dict of names and columns")
    reserved = _SAID & columns.keys()
    if reserved:
        raise UsageError(f"column {listing(reserved)} is named as a fact of rows or as an option; give facts")
    return columns


class PromptBatch:
    """The rows of one call of `put_prompts`: `rows` of them, with columns and facts."""

    def __init__(self, columns: Mapping[str, Any], samples: int, facts: Mapping[str, Any]) -> None:
        if not isinstance(samples, int) or samples < 1:
            raise UsageError(f"samples={samples!r} is not a positive number of rows for each prompt")
        if not check_columns(columns):
            raise UsageError("prompts without a column: give at least one, such as prompt_ids")
        prompts = _count(columns)
        self.rows = prompts * samples
        self.asked: dict[str, Any] = {
            name: tq.Repeat(column, samples) if samples > 1 else column for name, column in columns.items()
        }
        self.asked |= {name: _spread(name, fact, prompts, samples) for name, fact in check_facts(facts).items()}
        if samples > 1:
            self.asked.setdefault("group_id", np.repeat(_new_groups(prompts), samples))
            self.asked.setdefault("group_size", samples)


def _count(columns: Mapping[str, Any]) -> int:
    for name, column in columns.items():
        if isinstance(column, str | bytes | Mapping) or not hasattr(column, "__len__"):
            raise SchemaError(f'field "{name}" is a single value; give a list with one value for each prompt')
    counts = {len(column) for column in columns.values()}
    if len(counts) > 1 or 0 in counts:
        raise SchemaError(
            f"columns of {listing(counts)} prompts; give each column one value for each prompt, at least one"
        )
    return counts.pop()


def _spread(name: str, fact: Any, prompts: int, samples: int) -> Any:
    """Turn a fact of each prompt into one of each row; keys of a prompt's rows get the suffixes ``/0``, ``/1`` and so on."""
    if isinstance(fact, str | Mapping) or not isinstance(fact, Sequence | np.ndarray) or samples == 1:
        return fact
    if len(fact) != prompts:
        raise SchemaError(f"{name} has {len(fact)} values for {prompts} prompts; give one for each, or one for all")
    if name == "key":
        return [f"{key}/{sample}" for key in fact for sample in range(samples)]
    return [value for value in fact for _ in range(samples)]


def _new_groups(prompts: int) -> NDArray[np.int64]:
    return secrets.randbits(_GROUP_BITS) + np.arange(prompts, dtype=np.int64)


def announcement(tensors: Mapping[str, Any], notice: Any) -> dict[str, Any]:
    """Return the tensors to publish as a version: `tensors`, and the notice."""
    if NOTICE in tensors:
        raise UsageError(f'tensor "{NOTICE}" is named as the notice that travels with a version; name it otherwise')
    try:
        text = msgspec.json.encode(notice)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the notice cannot be JSON: {error}; give text, numbers, lists and dicts") from error
    if len(text) > TEXT_CHARS_MAX:
        raise UsageError(f"the notice has {len(text)} bytes of JSON; at most {TEXT_CHARS_MAX}: tell where to find more")
    return {**tensors, NOTICE: np.frombuffer(text, np.uint8)}


def notice_of(weights: tq.Weights) -> Any:
    """Return the notice of a version; None if it was published without one."""
    notice = weights.numpy().get(NOTICE)
    return None if notice is None else msgspec.json.decode(notice.tobytes())


class ServiceBase:
    """What the sync and the async service share."""

    def __init__(self, table: TableBase) -> None:
        self._about = table

    @property
    def name(self) -> str:
        """Name of the table and of its weight channel."""
        return self._about.name

    @property
    def stages(self) -> list[str]:
        """Names of the stages."""
        return list(self._about.tasks)


class AsyncFlowService(ServiceBase):
    """The five calls, and what a user needs to finish. Created by `init_engines` or `join`; safe from any thread.

    Example:
        >>> import transferqueue as tq
        >>> from transferqueue.workflows.asyncflow import AsyncFlowService, Engines, EngineStage
        >>> job = Engines(stages=[EngineStage(name="rollout", needs=["prompt"], gives=["response"])])
        >>> with tq.connect("embedded") as queue:
        ...     service = AsyncFlowService.init_engines(queue, job)
        ...     rows = service.put_prompts({"prompt": ["2 + 2", "3 + 5"]}, samples=4)
        ...     batch = service.get_experience("rollout", rows=8)
        ...     service.put_experience(batch, {"response": ["?"] * 8}, policy_version=0)
        ...     service.status()["tasks"]["rollout"]["done"]
        8
    """

    def __init__(self, table: tq.Table, channel: tq.WeightChannel) -> None:
        super().__init__(table)
        self._table, self._channel = table, channel

    @classmethod
    def init_engines(cls, queue: tq.Queue, engines: Engines) -> Self:
        """Declare the job, or join it if it was declared the same way. Raises `AlreadyExists` if it was declared differently."""
        return cls(queue.create_table(engines.table, **engines.terms()), queue.weights(engines.table))

    @classmethod
    def join(cls, queue: tq.Queue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """Join the job of this name; wait at most `timeout_s` for its declaration."""
        return cls(queue.table(name, timeout_s=timeout_s), queue.weights(name))

    @property
    def table(self) -> tq.Table:
        """The table of the job, for everything else."""
        return self._table

    def put_prompts(
        self, columns: Mapping[str, Any], *, samples: int = 1, timeout_s: float | None = None, **facts: Any
    ) -> NDArray[np.int64]:
        """Put each prompt as a group of `samples` rows. Return their row ids, int64 ``[prompts * samples]``, those of a prompt together.

        columns: one value for each prompt. facts: as of `Table.put`, one for all or one for each prompt. With a key, the rows of a prompt
        have it with the suffixes ``/0``, ``/1`` and so on; an existing key is `AlreadyExists`, so a repeated call changes nothing.
        Waits up to `timeout_s` for room (None: no limit). Raises `DeadlineExceeded` if there is none, and `Impossible` if there never can be.
        """
        prompts, started = PromptBatch(columns, samples, facts), time.monotonic()
        with self._table.reserve(prompts.rows, timeout_s=timeout_s) as room:
            left_s = timeout_s and max(0.0, timeout_s - (time.monotonic() - started))
            return self._table.put(reservation=room, timeout_s=left_s, **prompts.asked)

    def get_experience(self, stage: str, **terms: Any) -> tq.Batch:
        """Lease rows for an engine of `stage`. terms: the arguments of `Table.lease`."""
        return self._table.lease(stage, **terms)

    def put_experience(
        self, taken: tq.Batch | Any, columns: Mapping[str, Any], *, rows: Any = None, **facts: Any
    ) -> None:
        """Give results for a batch, or for some of its rows, and end their lease.

        With row ids instead of a batch, the columns are late columns of these rows.
        """
        arguments = {**check_facts(facts), **check_columns(columns)}
        taken = taken.batch if isinstance(taken, ExperienceIndex) else taken
        if isinstance(taken, tq.Batch):
            taken.ack(rows, **arguments)
        else:
            self._table.update(taken, **arguments)

    def notify_weights(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """Announce weights of `version`: where the notice says (any JSON of at most 4096 bytes), or as these tensors.

        Versions ascend. This advances the table's clock to `version`; it waits while rows in the table would become too old.
        """
        self._channel.publish(version, announcement(tensors or {}, notice), timeout_s=timeout_s)

    def get_weights(self, above: int = -1, *, timeout_s: float | None = None) -> tq.Weights:
        """Wait for a version above `above` and return the newest; `notice_of` returns its notice."""
        return self._channel.pull(above, timeout_s=timeout_s)

    def put_prompts_data(
        self, prompts_data: Mapping[str, Any], *, samples: int = 1, timeout_s: float | None = None, **facts: Any
    ) -> NDArray[np.int64]:
        """`put_prompts` by its name in AsyncFlow."""
        return self.put_prompts(prompts_data, samples=samples, timeout_s=timeout_s, **facts)

    def get_experience_data(
        self,
        experience_consumer_stage: str,
        experience_columns: Sequence[str] | None = None,
        experience_count: int | None = None,
        **terms: Any,
    ) -> tuple[tq.Batch, ExperienceIndex[tq.Batch]]:
        """Lease ``experience_count`` rows of a stage and return the batch and its index, by which `put_experience_data` takes results.

        experience_columns: those to bring (None: what the stage needs). terms: further arguments of `Table.lease`, such as
        ``groups`` or ``tokens`` instead of a count.
        """
        batch = self.get_experience(
            experience_consumer_stage, **lease_terms(experience_columns, experience_count, terms)
        )
        return batch, ExperienceIndex(batch)

    def put_experience_data(
        self,
        experience_data: Mapping[str, Any],
        index: ExperienceIndex[tq.Batch] | Any,
        *,
        rows: Any = None,
        **facts: Any,
    ) -> None:
        """`put_experience` by its name in AsyncFlow: results, keyed by the index that the rows came with, or by row ids."""
        self.put_experience(index, experience_data, rows=rows, **facts)

    def weight_sync_notify(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """`notify_weights` by its name in AsyncFlow."""
        self.notify_weights(version, tensors, notice=notice, timeout_s=timeout_s)

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

        Arguments as of `get_experience_data`. prefetch: batches leased and brought while one is computed with. terms with ``rank`` and ``world``
        give each rank its share of one agreed batch.

        Example:
            >>> import transferqueue as tq
            >>> from transferqueue.workflows.asyncflow import AsyncFlowService, Engines, EngineStage
            >>> job = Engines(stages=[EngineStage(name="reward", needs=["response"], gives=["rewards"])])
            >>> with tq.connect("embedded") as queue:
            ...     service = AsyncFlowService.init_engines(queue, job)
            ...     rows = service.put_prompts_data({"response": ["4", "5", "4"]})
            ...     service.seal()
            ...     with service.create_stream_data_loader(experience_consumer_stage="reward", experience_count=2) as loader:
            ...         for batch, index in loader:
            ...             scores = [float(text == "4") for text in batch["response"].list()]
            ...             service.put_experience_data({"rewards": scores}, index)
            ...     service.status()["rows_done"]
            3
        """
        wanted = lease_terms(experience_columns, experience_count, terms)
        return ExperienceStream(self._table.loader(experience_consumer_stage, prefetch=prefetch, **wanted))

    def status(self) -> dict[str, Any]:
        """Statistics of the table: `transferqueue docs observing` lists the keys."""
        return self._table.stats()

    def seal(self) -> None:
        """Put no more prompts: engines drain the table, then see `EndOfTable`."""
        self._table.seal()
