"""Plain functions as stages: reward functions in TRL's form, and agents that call an OpenAI-compatible endpoint.

Neither imports this package. A reward function is called with lists, one entry a row. An agent is called once a row,
with many calls at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.engines.background_loop import BackgroundLoop
from transferqueue.adapters.protocols import GENERATE_S, PartialResult
from transferqueue.adapters.stages.reward_functions import RewardCall, RewardFailed, RewardFunction, described_row
from transferqueue.errors import DeadlineExceeded, UsageError

if TYPE_CHECKING:
    import transferqueue as tq
    from transferqueue.adapters.stages.recording_proxy import Recording, RecordingProxy

_GIVEN: Final = ("prompts", "completions")
_COMPLETION_IDS: Final = "response_ids"
"""Field of TRL's parameter ``completion_ids``."""


class Rewards:
    """The stage ``reward``: the weighted sum of several reward functions.

    Args:
        *functions: in TRL's form; each gets the parameters that it names, which are fields of the rows. Coroutine
            functions work too.
        weights: one for each function; default None: all 1.
        prompts: name of the field with prompts; default ``"prompt"``.
        completions: name of the field with completions; default ``"completion"``.
        columns: further fields, for functions that take ``**kwargs``; default: none.
        decode: turns the ids of one row into text, if the two fields hold token ids; default None.
        gives: name of the column of rewards; default ``"rewards"``.

    Raises:
        UsageError: no function, or another number of weights.
    """

    def __init__(
        self,
        *functions: RewardFunction,
        weights: Sequence[float] | None = None,
        prompts: str = "prompt",
        completions: str = "completion",
        columns: Sequence[str] = (),
        decode: Callable[[list[int]], Any] | None = None,
        gives: str = "rewards",
    ) -> None:
        if not functions or (weights is not None and len(weights) != len(functions)):
            raise UsageError(
                f"{len(functions)} reward functions with {'no' if weights is None else len(weights)} weights: "
                "give at least one, and a weight for each or none"
            )
        self._calls = [RewardCall.of(function) for function in functions]
        self._weights = np.ones(len(functions)) if weights is None else np.asarray(weights, np.float64)
        self._given = dict(zip(_GIVEN, (prompts, completions), strict=True))
        self._columns = [(*call.wants, *_also(call, columns)) for call in self._calls]
        self._decode = decode
        self._gives = gives

    @property
    def needs(self) -> Sequence[str]:
        """Prompt, completion, and the parameters that the functions name."""
        ids = [_COMPLETION_IDS] if any("completion_ids" in call.given for call in self._calls) else []
        named = (name for names in self._columns for name in names)
        return tuple(dict.fromkeys([*self._given.values(), *ids, *named]))

    @property
    def gives(self) -> Sequence[str]:
        """The reward."""
        return (self._gives,)

    def __call__(self, batch: tq.Batch) -> Mapping[str, Any]:
        """Score all rows of a batch.

        Args:
            batch: a leased batch.

        Returns:
            The column of rewards: float32 ``[rows]``.

        Raises:
            RewardFailed: a function raised or gave no score; the text has the row.
            UsageError: a row to which no function applies.
        """
        values = {name: self._texts(batch[field].list()) for name, field in self._given.items()}
        scores_FB = np.stack(
            [self._scores(call, names, values, batch) for call, names in zip(self._calls, self._columns, strict=True)]
        )
        silent = np.flatnonzero(np.isnan(scores_FB).all(0))
        if silent.size:
            raise UsageError(f"row {batch.rows[silent[0]]} got None from every reward function; one must give a number")
        return {self._gives: np.nansum(self._weights[:, None] * scores_FB, axis=0).astype(np.float32)}

    def _scores(
        self, call: RewardCall, names: Sequence[str], values: Mapping[str, list[Any]], batch: tq.Batch
    ) -> npt.NDArray[np.float64]:
        given = {name: values[name] for name in _GIVEN if call.takes_all or name in call.given}
        ids = {"completion_ids": batch[_COMPLETION_IDS].list()} if "completion_ids" in call.given else {}
        try:
            return call(given | ids | {name: batch[name].list() for name in names}, rows=len(batch))
        except RewardFailed as failure:
            if failure.at < 0:
                raise
            row = described_row(values["prompts"][failure.at], values["completions"][failure.at])
            raise RewardFailed(
                f"{failure}; row {batch.rows[failure.at]}, {row}", name=failure.name, at=failure.at
            ) from failure

    def _texts(self, values: list[Any]) -> list[Any]:
        return values if self._decode is None else [self._decode(value) for value in values]


def _also(call: RewardCall, columns: Sequence[str]) -> tuple[str, ...]:
    """Return those of `columns` that the function takes beside the ones that it must get."""
    return tuple(name for name in columns if name not in call.wants and (call.takes_all or name in call.takes))


# ---------------------------------------------------------------- agents


class Agents:
    """A stage of agents: ``async run(data, base_url=…)``, once for each row.

    Rows come back one at a time, as agents finish. An agent that raises, or that takes longer than `timeout_s`, ends
    the batch: the remaining rows fail and are leased again.

    Args:
        agent: the coroutine function, or an object with a coroutine method ``run``. It gets the row's fields by name
            and returns its reward, or a mapping with the columns of `gives`.
        needs: fields that an agent gets.
        gives: columns that agents return; default ``("rewards",)``.
        base_url: endpoint of the model. Give this or `recorder`.
        recorder: gives each row its own endpoint, and tokens and log-probabilities of its calls become columns too.
        concurrency_max: agents that run at once, at least 1; default 64.
        timeout_s: seconds that one agent may take; default 600.
        **arguments: further arguments of ``run``.

    Raises:
        UsageError: both or neither of `base_url` and `recorder`, or `concurrency_max` below 1.
    """

    def __init__(
        self,
        agent: Any,
        *,
        needs: Sequence[str],
        gives: Sequence[str] = ("rewards",),
        base_url: str | None = None,
        recorder: RecordingProxy | None = None,
        concurrency_max: int = 64,
        timeout_s: float = GENERATE_S,
        **arguments: Any,
    ) -> None:
        if (base_url is None) == (recorder is None):
            raise UsageError("an agent needs to know where its model is: give base_url or recorder, one of them")
        if concurrency_max < 1:
            raise UsageError(f"concurrency_max={concurrency_max}; at least 1 agent must be able to run")
        self._run = getattr(agent, "run", agent)
        self._needs, self._gives = tuple(needs), tuple(gives)
        self._base_url, self._recorder = base_url, recorder
        self._concurrency_max, self._timeout_s = concurrency_max, timeout_s
        self._arguments = arguments

    @property
    def needs(self) -> Sequence[str]:
        """Fields that an agent gets."""
        return self._needs

    @property
    def gives(self) -> Sequence[str]:
        """Columns that agents return, and those of the recording."""
        return (*self._gives, *(() if self._recorder is None else self._recorder.gives))

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield each row when its agent is finished. The others go on while the caller acks it.

        Args:
            batch: a leased batch with the fields of `needs`.

        Raises:
            DeadlineExceeded: an agent took too long.
            UsageError: an agent returned other columns than those of `gives`.
        """
        columns = [batch[name].list() for name in self._needs]
        rows = [dict(zip(self._needs, values, strict=True)) for values in zip(*columns, strict=True)]
        room = asyncio.Semaphore(self._concurrency_max)
        with closing(BackgroundLoop("agents")) as loop:  # which cancels those that are left
            running = [loop.submit(self._one(at, row, room)) for at, row in enumerate(rows)]
            for ended in as_completed(running):
                yield ended.result()

    async def _one(self, at: int, row: dict[str, Any], room: asyncio.Semaphore) -> PartialResult:
        async with room:
            with self._recording() as recording:
                base_url = self._base_url if recording is None else recording.base_url
                returned = await self._bounded(at, self._run(row, base_url=base_url, **self._arguments))
        results = self._columns(returned)
        columns = {**results, **({} if recording is None else recording.columns())}
        return PartialResult(
            at=np.array([at]),
            columns={name: [value] for name, value in columns.items()},
            facts={} if recording is None else recording.facts(),
        )

    def _recording(self) -> AbstractContextManager[Recording | None]:
        return nullcontext() if self._recorder is None else self._recorder.session()

    async def _bounded(self, at: int, running: Awaitable[Any]) -> Any:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await running
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the agent of row {at} of the batch was not finished after {self._timeout_s:g} s"
            ) from error

    def _columns(self, returned: Any) -> Mapping[str, Any]:
        results = returned if isinstance(returned, Mapping) else dict.fromkeys(self._gives[:1], returned)
        if set(results) != set(self._gives):
            raise UsageError(f"the agent returned {sorted(results)}; it gives {sorted(self._gives)}")
        return results
