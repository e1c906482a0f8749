"""The interface between the queue and an engine: protocols, and the values that their methods take and return.

- A *generator* turns prompts into completions and yields each when it is finished. Its methods block and may be called
  from any thread: another thread may update weights or pause while one iterates over completions. An engine with an
  event loop runs it in a thread of its own.
- Every token is stamped with the version of the weights that drew it. A completion that was cut short (`ABORT`) is
  yielded with its tokens so far; any generator may continue it, under other weights (`Prompt.begun`).
- Log-probabilities are those of the distribution that the token was drawn from, after temperature and top-p.
- A *learner* takes steps and returns its weights. A *weight source* iterates over the tensors of one version, one at a
  time, so that no process has to hold two copies.
- A method raises `Unsupported` at the call if its engine cannot do it. It never silently does something else.

All protocols are structural: a class conforms if it has the methods. It need not import this module.
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
"""Default time limit of a request."""
PAUSE_S = 60.0
"""Default time limit for a pause or a change of weights to take effect."""

STOP = "stop"
"""Finish reason: the model drew a stop token."""
LENGTH = "length"
"""Finish reason: the completion reached `Sampling.tokens_max`."""
ABORT = "abort"
"""Finish reason: the request was aborted; it may be continued."""


class Unsupported(UsageError):
    """The engine cannot do this; the message says what it can do instead."""


class Pause(enum.Enum):
    """How a pause treats running completions."""

    KEEP = "keep"
    """Hold them; they continue after `resume`."""
    ABORT = "abort"
    """Yield them with their tokens so far, with finish reason `ABORT`."""
    WAIT = "wait"
    """Finish them first. New requests wait for `resume`."""


class Caches(enum.Enum):
    """What becomes of the key-value caches of running completions when weights change, as an engine's attribute ``kv``
    says."""

    RECOMPUTE = "recompute"
    """They are computed again: the log-probabilities of later tokens are those of the new weights alone."""
    KEEP = "keep"
    """They stay: nothing is computed twice, and later tokens have read states of older weights. Requests that come
    later may share cached prefixes of older weights, too."""
    SALT = "salt"
    """They stay, and requests that come later share none of them."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Args:
        tokens_max: length limit of a completion in tokens, including those of `Prompt.begun`; at least 1.
        temperature: divides the logits; default 1.0; 0 is greedy.
        top_p: share of probability that is kept, in (0, 1]; default 1.0: all tokens.
        stop_ids: tokens that end a completion; the stop token is part of it. Default: none.
        seed: with the same seed, an engine that supports seeds draws the same completions again; default None:
            unseeded.

    Raises:
        UsageError: a value out of its range.
    """

    tokens_max: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_max < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                f"sampling tokens_max={self.tokens_max}, temperature={self.temperature}, top_p={self.top_p}: they must "
                "be at least 1, at least 0, and in (0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion, finished or cut short.

    Args:
        prompt: index of the prompt in the request.
        sample: index of the sample of that prompt.
        ids: token ids, int32 ``[tokens]``, including the stop token.
        logprobs: log-probabilities of the tokens under the distribution that they were drawn from: float32
            ``[tokens]``.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        spans: pairs of a version and a number of tokens, in order, which cover all tokens.
        more: the next completion of the request is finished too, so that asking for it does not wait; default False:
            unknown.
        routes: the experts that a mixture of experts chose: int16 ``[tokens of prompt and completion - 1, layers,
            experts a token]``; default None: the engine does not capture them.
    """

    prompt: int
    sample: int
    ids: Ids
    logprobs: Logprobs
    finish_reason: str
    spans: tuple[tuple[int, int], ...]
    more: bool = False
    routes: npt.NDArray[np.int16] | None = None

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
    """Token ids to complete.

    Args:
        ids: int ``[tokens]``, at least one.
        samples: number of completions, at least 1; default 1.
        begun: a completion to continue, with `samples` 1; default None.
        seed: of this prompt's completions, whatever else is in the request; default None: `Sampling.seed` and the place
            of the prompt in the request decide.
        images: encoded files, in the order in which `ids` have their tokens, as the model's processor expands them;
            default: none.

    Raises:
        UsageError: no tokens, no samples, or several samples of a completion to continue.
    """

    ids: Ids
    samples: int = 1
    begun: Completion | None = None
    seed: int | None = None
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.ids) or self.samples < 1:
            raise UsageError(f"prompt of {len(self.ids)} tokens, {self.samples} samples: give at least one of each")
        if self.begun is not None and self.samples != 1:
            raise UsageError(
                f"prompt with a begun completion and samples={self.samples}: a begun completion is one sample"
            )

    @classmethod
    def of(cls, ids: Iterable[int] | Ids, samples: int = 1) -> Self:
        """Make a prompt from any sequence of integers.

        Args:
            ids: the token ids.
            samples: number of completions; default 1.

        Example:
            >>> Prompt.of([5, 6, 7], samples=4).samples
            4
        """
        return cls(ids=np.fromiter(ids, np.int32), samples=samples)


Completions = PythonGenerator[Completion, None, None]
"""An iterator over completions. Closing it early aborts those that are left."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Args:
        shape: of the tensor.
        dtype: torch's name, such as ``"bfloat16"``.
    """

    shape: tuple[int, ...]
    dtype: str


@runtime_checkable
class WeightSource(Protocol):
    """Weights of one version. It can be iterated more than once; each iteration may move one tensor at a time."""

    def metadata(self) -> Mapping[str, TensorSpec]:
        """Return names, shapes and dtypes of all tensors. Moves no tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors. A tensor is valid until the next one is yielded; copy it to keep it."""


@runtime_checkable
class Generator(Protocol):
    """An engine that completes prompts. Every method may be called from any thread."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be drawn with; -1: the weights that the generator was created
        with."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished, in any order. Blocks until the next one is finished.

        Closing the iterator early aborts the completions that are left. Several threads may iterate at once.

        Args:
            prompts: the prompts, at least one.
            sampling: how their tokens are drawn.
            timeout_s: seconds until all completions must be finished, pauses included; default 600. The rest is
                aborted.

        Raises:
            DeadlineExceeded: not all completions were finished in time.
            UsageError: a request that the engine cannot carry out, such as one longer than its context.
            Unsupported: the engine does not have an option of `sampling`.
            Disconnected: the generator was closed, its server is gone, or an update left weights of two versions.
        """

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Return when no more tokens are drawn. Requests that arrive during the pause wait. A second call does nothing.

        Args:
            mode: what happens to completions that are being generated.
            timeout_s: seconds to wait; default 60.

        Raises:
            DeadlineExceeded: it took longer; then the generator is not paused.
        """

    def resume(self) -> None:
        """End the pause. Does nothing if the generator is not paused."""

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Replace the weights between two tokens; tokens drawn after the return are stamped `version`.

        Completions that are being generated continue under the new weights. Their context is computed again, unless the
        engine has an attribute ``kv`` that says otherwise (`Caches`). After an error the old weights stay whole, or, if
        some had changed, requests raise `Disconnected` until a later call has loaded a version.

        Args:
            source: the tensors.
            version: of the weights.
            timeout_s: seconds to wait; default 60.

        Raises:
            DeadlineExceeded: it took longer.
            UsageError: names, shapes or dtypes do not fit.
            Unsupported: the engine takes no weights.
        """

    def close(self) -> None:
        """Stop the engine and free its memory. A second call does nothing."""


@runtime_checkable
class Learner(Protocol):
    """An engine that trains."""

    @property
    def version(self) -> int:
        """Version of the initial weights plus the number of steps taken."""

    def step(self, batch: Mapping[str, Any]) -> Mapping[str, float]:
        """Take one step, and return its metrics. Blocks.

        Args:
            batch: columns by name.
        """

    def weights(self) -> WeightSource:
        """Return the current weights. They are valid until the next step."""


@runtime_checkable
class StageFunction(Protocol):
    """A function over the rows of a batch, with the fields that it reads and writes."""

    @property
    def needs(self) -> Sequence[str]:
        """Names of the fields that it reads."""

    @property
    def gives(self) -> Sequence[str]:
        """Names of the fields that it writes."""

    def __call__(self, batch: Any) -> Mapping[str, Any] | Iterable[PartialResult]:
        """Return columns for all rows of the batch, or yield parts of it as they are finished.

        Args:
            batch: a leased `Batch` with the columns of `needs`.
        """


@runtime_checkable
class Producer(Protocol):
    """A source of rows. One thread calls `wants`, then the object itself, in turn."""

    def wants(self) -> int:
        """Return how many rows to reserve for the next put; 0 when there are no more rows."""

    def __call__(self, rows: int) -> Mapping[str, Any]:
        """Return the arguments of `Table.put` for new rows.

        Args:
            rows: the number of rows to produce, exactly.
        """


@dataclass(frozen=True, kw_only=True)
class PartialResult:
    """Results for some rows of a batch, yielded by a function that finishes rows at different times.

    Args:
        columns: results by name, in the order of `at`.
        at: positions of the rows in the batch, ``[rows]``; default None: all that are left.
        facts: `policy_version`, `policy_version_max`, `tokens` and other facts that `Batch.ack` takes; default: none.
        unfinished: the columns replace the rows' values, and the rows are released, so that any worker may lease and
            continue them; default False.
        drop: the reason with which the rows are dropped; default "": they are not.

    Raises:
        UsageError: an unfinished part without positions or with a `drop`, or a dropped part with columns.
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
                f"part dropped as {self.drop!r} with {[*self.columns, *self.facts]}: no stage reads them; leave "
                "them out"
            )


__getattr__ = renamed_names(__name__, {"Part": "PartialResult", "Stage": "StageFunction"})
