"""What the queue asks of an engine: protocols that nobody has to import, and the values that they speak in.

The law:

- A *generator* turns prompts into completions and hands each out when it is finished. Its verbs block, and may be
  called from any thread: weights arrive, and a pause begins, while another thread iterates over completions. An engine
  with an event loop of its own keeps it to itself.
- Every token is stamped with the version of the weights that drew it. A completion that was cut short (`ABORT`) is
  handed out with what it has; any generator may go on with it, under other weights (`Prompt.begun`).
- Log-probabilities are those of the very distribution that a token was drawn from: temperature and cuts included.
- A *learner* takes steps and gives its weights; a *weight source* is weights on the way from one to the other, a tensor
  at a time, so that nobody needs to hold two copies.
- What an engine cannot do raises `Unsupported`, at the call: nothing is silently done differently.

All of them are structural: a class fits if it has the methods.
"""

from __future__ import annotations

import enum
from collections.abc import Generator as PythonGenerator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from transferqueue.errors import UsageError
from transferqueue.lazy import renamed_names

if TYPE_CHECKING:
    import torch

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]

GENERATE_S = 600.0
"""How long a request may take unless its caller says otherwise."""
PAUSE_S = 60.0
"""How long a pause or a change of weights may take to come into force."""

STOP = "stop"
"""Finish reason: the model ended it."""
LENGTH = "length"
"""Finish reason: `Sampling.tokens_max` ended it."""
ABORT = "abort"
"""Finish reason: somebody cut it short; it may be gone on with."""


class Unsupported(UsageError):
    """The engine cannot do this; the message says what it can do instead."""


class Pause(enum.Enum):
    """What becomes of completions that are being generated when a generator is paused."""

    KEEP = "keep"
    """They stand still, and go on after `resume`."""
    ABORT = "abort"
    """They are handed out as they are, with finish reason `ABORT`."""
    WAIT = "wait"
    """They are finished first; new ones are not begun."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    tokens_max: length limit of a completion, what was begun before included. temperature 0: greedy. top_p: 1 for all.
    stop_ids: tokens that end a completion and belong to it. seed: None for any draw; else an engine that can gives the
    same completions again.
    """

    tokens_max: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_max < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                f"sampling tokens_max={self.tokens_max}, temperature={self.temperature}, top_p={self.top_p}: they must be "
                "at least 1, at least 0, and in (0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion, finished or cut short.

    prompt, sample: which prompt of the request, and which of its samples. ids: int32 ``[tokens]``, the stop token
    included. logprobs: float32 ``[tokens]``. spans: ``(version, tokens)`` in order, for all tokens.
    """

    prompt: int
    sample: int
    ids: Ids
    logprobs: Logprobs
    finish_reason: str
    spans: tuple[tuple[int, int], ...]

    @property
    def policy_version(self) -> int:
        """Oldest version that drew a token; -1 if there is no token."""
        return min((version for version, _ in self.spans), default=-1)

    @property
    def policy_version_max(self) -> int:
        """Newest version that drew a token; -1 if there is no token."""
        return max((version for version, _ in self.spans), default=-1)

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        """Version of each token: int32 ``[tokens]``."""
        return np.repeat(*np.array(self.spans, dtype=np.int32).reshape(-1, 2).T)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids to complete: int ``[tokens]``. samples: how many times. begun: a completion to go on with (samples 1)."""

    ids: Ids
    samples: int = 1
    begun: Completion | None = None

    def __post_init__(self) -> None:
        if not len(self.ids) or self.samples < 1:
            raise UsageError(f"prompt of {len(self.ids)} tokens, {self.samples} samples: give at least one of each")
        if self.begun is not None and self.samples != 1:
            raise UsageError(
                f"prompt with something begun and samples={self.samples}: what was begun is one completion"
            )

    @classmethod
    def of(cls, ids: Iterable[int] | Ids, samples: int = 1) -> Self:
        """Make a prompt of any integers."""
        return cls(ids=np.fromiter(ids, np.int32), samples=samples)


Completions = PythonGenerator[Completion, None, None]
"""An iterator over completions that can be closed before its end."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor on its way. dtype: torch's name of it, such as ``bfloat16``."""

    shape: tuple[int, ...]
    dtype: str


@runtime_checkable
class WeightSource(Protocol):
    """Weights of one version, to be read once or more. Iterating may move one tensor at a time."""

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Names, shapes and dtypes of all tensors, before any of them moves."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors. A tensor is valid until the next one; who keeps it copies it."""


@runtime_checkable
class Generator(Protocol):
    """An engine that completes prompts. Every method may be called from any thread."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be drawn with; -1: those it was made with."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished, in any order. Blocks between them.

        Closing the iterator early aborts what is left. Several threads may iterate at once. `DeadlineExceeded` when
        the last is not finished after `timeout_s` (a pause counts); what is left is aborted.
        """

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Return when no token is being drawn any more. Requests that come meanwhile wait. Again: nothing.

        `DeadlineExceeded` when that takes longer than `timeout_s`: then it is not paused.
        """

    def resume(self) -> None:
        """Go on. Not paused: nothing."""

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Replace the weights between two tokens; those drawn after the return are stamped `version`.

        Completions that are being generated go on under the new weights, their context computed anew. `UsageError` if
        names, shapes or dtypes do not fit: then the old weights are kept. `DeadlineExceeded` likewise.
        """

    def close(self) -> None:
        """Stop the engine and free what it holds. Again: nothing."""


@runtime_checkable
class Learner(Protocol):
    """An engine that trains."""

    @property
    def version(self) -> int:
        """Steps taken since the weights it was made with, plus their version."""

    def step(self, batch: Mapping[str, Any]) -> Mapping[str, float]:
        """Take one step on `batch` (columns by name) and return figures. Blocks."""

    def weights(self) -> WeightSource:
        """The weights as they are now, until the next step."""


@runtime_checkable
class StageFunction(Protocol):
    """A function over rows that says what it needs and gives."""

    @property
    def needs(self) -> Sequence[str]:
        """Fields that it reads."""

    @property
    def gives(self) -> Sequence[str]:
        """Fields that it writes."""

    def __call__(self, batch: Any) -> Mapping[str, Any] | Iterable[PartialResult]:
        """Return columns for all rows of the batch, or parts of it as they are finished."""


@runtime_checkable
class Producer(Protocol):
    """Where rows come from. Both methods are called in turn, by one thread."""

    def wants(self) -> int:
        """Return how many rows to reserve for the next put; 0: there are no more."""

    def __call__(self, rows: int) -> Mapping[str, Any]:
        """Return the arguments of `Table.put` for exactly ``rows`` new rows."""


@dataclass(frozen=True, kw_only=True)
class PartialResult:
    """Some rows of a batch that are finished, for a function that yields results as they come.

    at: their positions in the batch (None: all that are left). columns: results in that order. facts: `policy_version`,
    `policy_version_max`, `tokens` and the like, as `Batch.ack` takes them.

    unfinished: the rows are not done: the columns replace what the rows have, and anybody may lease the rows again and go
    on from there. drop: the rows end as dropped with this reason. `UsageError` for both, for an unfinished part that does not
    say which rows, and for a dropped one that gives anything.
    """

    columns: Mapping[str, Any]
    at: npt.NDArray[np.intp] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    unfinished: bool = False
    drop: str = ""

    def __post_init__(self) -> None:
        if self.unfinished and (self.drop or self.at is None):
            raise UsageError(
                f"unfinished part with at={self.at} and drop={self.drop!r}: say which rows, and do not drop them"
            )
        if self.drop and (self.columns or self.facts):
            raise UsageError(
                f"part dropped as {self.drop!r} with {[*self.columns, *self.facts]}: nobody would read them; leave them out"
            )


__getattr__ = renamed_names(__name__, {"Part": "PartialResult", "Stage": "StageFunction"})
