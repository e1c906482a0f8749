"""The service interface of AsyncFlow (arXiv 2507.01663, section 5): five calls by which engines that know no table share one.

The law:

1. `init_engines` declares the job: its stages, what each needs and gives, and how far prompts may run ahead. Any process may
   call it, at any time, in the same words; no engine is started here, and none knows another.
2. `put_prompts` waits for room, then puts every prompt as a group of `samples` rows, stored once, or nothing.
3. `get_experience` lends rows of a stage until a deadline; `put_experience` gives results back, in one commit with the end of
   the loan. Who vanishes loses its rows to others at the deadline, and its late results are refused.
4. `notify_weights` says that a version is there. It is the table's clock, and whoever waits in `get_weights` is woken. With it
   travels a notice, such as the path of a checkpoint, and tensors where that is how weights move.
5. Nothing is lost silently: `status` counts every row that was ever put.

`service_aio` has the same for event loops, and `transferqueue serve --http` the same over HTTP.
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
from transferqueue.limits import TEXT_CHARS_MAX, TIMEOUT_S_DEFAULT
from transferqueue.workflows.asyncflow.declaration import NAME, Engines

NOTICE: Final = "notice"
"""Name of the tensor that carries the notice of a version, as the bytes of its JSON."""
_GROUP_BITS: Final = 52
"""Groups are numbered from a random place on, so that nobody need agree; ids stay exact as float64."""
FACTS: Final = frozenset(GivenFacts.__struct_fields__)
_SAID: Final = FACTS | {"self", "rows", "overwrite", "reservation", "timeout_s", "step", "failed", "reason"}
"""What calls of the queue say beside columns, so that no column can be called so here."""


def check_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """`facts`, if the queue knows them; else `UsageError`: what it does not know would be a column."""
    unknown = facts.keys() - FACTS
    if unknown:
        raise UsageError(f"fact {listing(unknown)} is unknown; known are {', '.join(sorted(FACTS))}")
    return facts


def check_columns(columns: object) -> Mapping[str, Any]:
    """`columns`, if they may be given to the queue as they are named; else `UsageError`."""
    if not isinstance(columns, Mapping):
        raise UsageError(f"columns are {type(columns).__name__}; give a dict of names and columns")
    taken = _SAID & columns.keys()
    if taken:
        raise UsageError(f"column {listing(taken)} is named as a fact of rows or as an option; give facts")
    return columns


class PromptBatch:
    """What one call of `put_prompts` puts: `rows` rows, made of `columns` and facts about them."""

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
    """A fact about each prompt as one about each row; keys of a prompt's rows end in ``/0``, ``/1`` and so on."""
    if isinstance(fact, str | Mapping) or not isinstance(fact, Sequence | np.ndarray) or samples == 1:
        return fact
    if len(fact) != prompts:
        raise SchemaError(f"{name} has {len(fact)} values for {prompts} prompts; give one for each, or one for all")
    if name == "key":
        return [f"{key}/{sample}" for key in fact for sample in range(samples)]
    return [one for one in fact for _ in range(samples)]


def _new_groups(prompts: int) -> NDArray[np.int64]:
    return secrets.randbits(_GROUP_BITS) + np.arange(prompts, dtype=np.int64)


def announcement(tensors: Mapping[str, Any], notice: Any) -> dict[str, Any]:
    """What is published as a version: `tensors`, and the notice beside them."""
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
    """The notice that came with a version; None if it was published without one."""
    found = weights.numpy().get(NOTICE)
    return None if found is None else msgspec.json.decode(found.tobytes())


class ServiceBase:
    """What the services of both fronts share."""

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
    """The five calls, and what a user needs to finish. Made by `init_engines` or `join`; safe from any thread.

    Example:
        >>> import transferqueue as tq
        >>> from transferqueue.workflows.asyncflow import AsyncFlowService, Engines, EngineStage
        >>> job = Engines(stages=[EngineStage(name="rollout", needs=["prompt"], gives=["response"])])
        >>> with tq.connect() as queue:
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
        """Declare the job, or join it where it was declared in the same words; `AlreadyExists` in others."""
        return cls(queue.create_table(engines.table, **engines.terms()), queue.weights(engines.table))

    @classmethod
    def join(cls, queue: tq.Queue, *, name: str = NAME, timeout_s: float = 30.0) -> Self:
        """The job of this name, once it is declared."""
        return cls(queue.table(name, timeout_s=timeout_s), queue.weights(name))

    @property
    def table(self) -> tq.Table:
        """The table of the job, for all that is not here."""
        return self._table

    def put_prompts(
        self, columns: Mapping[str, Any], *, samples: int = 1, timeout_s: float = TIMEOUT_S_DEFAULT, **facts: Any
    ) -> NDArray[np.int64]:
        """Put each prompt as `samples` rows of one group, once there is room; their ids, those of a prompt together.

        columns: one value for each prompt. facts: as of `Table.put`, one for all or one for each prompt; the rows of a prompt with
        a key have it with ``/0``, ``/1`` and so on (a key that is there already is `AlreadyExists`: so a repeated call changes nothing).
        Waits up to `timeout_s`; `DeadlineExceeded` if there is no room, `Impossible` if there never can be.
        """
        prompts, deadline = PromptBatch(columns, samples, facts), time.monotonic() + timeout_s
        with self._table.reserve(prompts.rows, timeout_s=timeout_s) as room:
            left = max(0.0, deadline - time.monotonic())
            return self._table.put(reservation=room, timeout_s=left, **prompts.asked)

    def get_experience(self, stage: str, **terms: Any) -> tq.Batch:
        """Rows for an engine of `stage`, lent until a deadline. terms: as of `Table.lease`, which this is."""
        return self._table.lease(stage, **terms)

    def put_experience(
        self, taken: tq.Batch | Any, columns: Mapping[str, Any], *, rows: Any = None, **facts: Any
    ) -> None:
        """Results of a batch (or of some of its rows), which are done with that; or late columns of rows, by their ids."""
        given = {**check_facts(facts), **check_columns(columns)}
        if isinstance(taken, tq.Batch):
            taken.ack(rows, **given)
        else:
            self._table.update(taken, **given)

    def notify_weights(
        self,
        version: int,
        tensors: Mapping[str, Any] | None = None,
        *,
        notice: Any = None,
        timeout_s: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        """Weights of `version` are there: as the notice says (any JSON of at most 4096 bytes), or as these tensors.

        Versions ascend. The table's clock is at `version` with that; it waits where rows in it would be too old then.
        """
        self._channel.publish(version, announcement(tensors or {}, notice), timeout_s=timeout_s)

    def get_weights(self, above: int = -1, *, timeout_s: float = TIMEOUT_S_DEFAULT) -> tq.Weights:
        """The newest version above `above`, waited for; `notice_of` has its notice."""
        return self._channel.pull(above, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """What the table says of itself: docs/OBSERVING.md has the keys."""
        return self._table.stats()

    def seal(self) -> None:
        """No more prompts: engines drain what is there, then see `EndOfTable`."""
        self._table.seal()
