"""Models as stages of a flow: rows with prompts and responses in, log-probs, values, rewards or the teacher's tokens
out.

A stage runs its model over the rows of a lease in micro-batches, and gives each as it is scored, the shortest rows
first, so that the next task does not wait for the longest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from transferqueue.adapters.protocols import PartialResult, Unsupported
from transferqueue.adapters.scoring.batching import micro_batches
from transferqueue.adapters.scoring.logprobs import response_logprobs, response_scores, teacher_top_k
from transferqueue.adapters.scoring.plan import is_packed, shared_prompts
from transferqueue.adapters.scoring.values import response_values, rewards_of
from transferqueue.errors import UsageError

if TYPE_CHECKING:
    import transferqueue as tq

Turns = Callable[["tq.Batch"], Iterable[Sequence[int]]]
"""Yields positions of rows of a batch, each row once, in the turns in which they are scored. The rows of a turn are
scored before the next turn is asked for, so a generator brings the weights of the model up to date before it yields."""


class ScoringStage(ABC):
    """A stage (`protocols.StageFunction`) that runs a model over micro-batches of rows.

    Args:
        model: a model from the loaders of `transferqueue.adapters.scoring`.
        gives: name of its column, or names of its columns.
        prompts: name of the column with the prompts' token ids; default ``"prompt_ids"``.
        responses: name of the column with the responses' token ids; default ``"response_ids"``.
        tokens: the most tokens of one forward pass, at least 1; default 8192. A longer row is alone in one.
        turns: called with each batch; yields the positions of its rows in turns, and before each brings the weights up
            to date; default None: all rows at once.
        images: name of the column with the images of each row; default "": rows have none.

    Raises:
        UsageError: `tokens` below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gives: str | tuple[str, ...],
        prompts: str = "prompt_ids",
        responses: str = "response_ids",
        tokens: int = 8192,
        turns: Turns | None = None,
        images: str = "",
    ) -> None:
        if tokens < 1:
            raise UsageError(f"tokens={tokens}: a forward pass of no tokens; give at least 1")
        self._model, self._tokens, self._turns = model, tokens, turns or _at_once
        self._needs, self._images = (prompts, responses), images
        self._gives = (gives,) if isinstance(gives, str) else gives

    @property
    def needs(self) -> Sequence[str]:
        """Prompt and response, and the images."""
        return (*self._needs, self._images) if self._images else self._needs

    @property
    def gives(self) -> Sequence[str]:
        """The names of its columns."""
        return self._gives

    def __call__(self, batch: tq.Batch) -> Iterator[PartialResult]:
        """Yield scores of the rows of a batch, a micro-batch at a time, the shortest rows of a turn first.

        Args:
            batch: a leased batch with prompts and responses.
        """
        prompts, responses = (list(batch[name]) for name in self._needs)
        images = list(batch[self._images]) if self._images else None
        for turn in self._turns(batch):
            for places in self._micro_batches([prompts[row] for row in turn], [responses[row] for row in turn]):
                rows = [turn[place] for place in places]
                columns = self._columns(
                    [prompts[row] for row in rows],
                    [responses[row] for row in rows],
                    None if images is None else [images[row] for row in rows],
                )
                yield PartialResult(columns=columns, at=np.array(rows, dtype=np.intp))

    def in_order(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[list[Any], ...]:
        """Return the values of each column for rows in their order.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """
        found: dict[int, tuple[Any, ...]] = {}
        for rows in self._micro_batches(prompts, responses):
            columns = self._columns([prompts[row] for row in rows], [responses[row] for row in rows])
            found |= zip(rows, zip(*columns.values(), strict=True), strict=True)
        return tuple([found[row][column] for row in range(len(found))] for column in range(len(self._gives)))

    def _micro_batches(self, prompts: Sequence[Any], responses: Sequence[Any]) -> list[list[int]]:
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        batches = micro_batches(
            lengths, self._tokens, padded=not is_packed(self._model), tree=shared_prompts(self._model, prompts, lengths)
        )
        return sorted(batches, key=lambda rows: max(lengths[row] for row in rows))

    @torch.no_grad()
    def _columns(
        self, prompts: Sequence[Any], responses: Sequence[Any], images: Sequence[Any] | None = None
    ) -> Mapping[str, Any]:
        columns = self.score(prompts, responses) if images is None else self.score_images(prompts, responses, images)
        return dict(zip(self._gives, columns, strict=True))

    @abstractmethod
    def score(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values of each column for the rows of one forward pass. Called without gradients.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """

    def score_images(self, prompts: Sequence[Any], responses: Sequence[Any], images: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values of each column for the rows of one forward pass, which have images.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
            images: encoded images of each row.

        Raises:
            Unsupported: the stage reads text alone.
        """
        raise Unsupported(f"{type(self).__name__} reads no images; leave images out")


class LogProbs(ScoringStage):
    """Log-probs of response tokens: float32 ``[T]`` a row, of the distribution at `temperature`.

    Args:
        model: a causal language model of `load_causal_lm`.
        gives: name of the column; default ``"ref_logprobs"``.
        temperature: that the tokens were drawn with; default 1.0.
        **stage: `prompts`, `responses`, `tokens` and `turns`, as of `RewardModel`; and `images`, name of the column
            with encoded images of each row ("": none).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gives: str = "ref_logprobs",
        temperature: float = 1.0,
        **stage: Any,
    ) -> None:
        super().__init__(model, gives=gives, **stage)
        self._temperature = temperature

    def score(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[Any, ...]:
        """Return the log-probs of the rows of one forward pass.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """
        logprobs_N = response_logprobs(self._model, prompts, responses, temperature=self._temperature)
        return (_by_row(logprobs_N, responses),)

    def score_images(self, prompts: Sequence[Any], responses: Sequence[Any], images: Sequence[Any]) -> tuple[Any, ...]:
        """Return the log-probs of the rows of one forward pass, which have images.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
            images: encoded images of each row.
        """
        scores = response_scores(self._model, prompts, responses, temperature=self._temperature, images=images)
        return (_by_row(scores.logprobs_N, responses),)


class Values(ScoringStage):
    """The critic's value before each response token: float32 ``[T]`` a row.

    Args:
        model: a critic of `load_value_model`.
        gives: name of the column; default ``"values"``.
        **stage: `prompts`, `responses`, `tokens` and `turns`, as of `RewardModel`.
    """

    def __init__(self, model: nn.Module, *, gives: str = "values", **stage: Any) -> None:
        super().__init__(model, gives=gives, **stage)

    def score(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values of the rows of one forward pass.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """
        return (_by_row(response_values(self._model, prompts, responses), responses),)


class RewardModel(ScoringStage):
    """The score of a reward model: float32, one a row. The policy's tokens must be those of the reward model.

    Args:
        model: a reward model of `load_classifier`.
        gives: name of the column; default ``"rewards"``.
        **stage: `prompts` and `responses`, names of the columns with token ids (``"prompt_ids"``, ``"response_ids"``);
            `tokens`, the most of one forward pass (8192); `turns`, of the rows of a batch (None: all at once).
    """

    def __init__(self, model: nn.Module, *, gives: str = "rewards", **stage: Any) -> None:
        super().__init__(model, gives=gives, **stage)

    def score(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[Any, ...]:
        """Return the scores of the rows of one forward pass.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """
        return (rewards_of(self._model, prompts, responses).cpu().numpy(),)

    def rewards(self, prompts: Sequence[Any], responses: Sequence[Any]) -> Any:
        """Return the scores of rows in their order, for a stage that adds several rewards: float32 ``[rows]``.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """
        return np.array(self.in_order(prompts, responses)[0], np.float32)


class TeacherTopK(ScoringStage):
    """The teacher's most probable tokens at each response token.

    The columns are ids int32 ``[T, k]`` and log-probs float32 ``[T, k]`` a row.

    Args:
        model: a causal language model of `load_causal_lm`.
        k: how many tokens; 0: the drawn token alone, ``[T, 1]``.
        gives: names of the two columns; default ``("teacher_ids", "teacher_logprobs")``.
        temperature: divides the teacher's logits; default 1.0.
        **stage: `prompts`, `responses`, `tokens` and `turns`, as of `RewardModel`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        k: int,
        gives: tuple[str, str] = ("teacher_ids", "teacher_logprobs"),
        temperature: float = 1.0,
        **stage: Any,
    ) -> None:
        super().__init__(model, gives=gives, **stage)
        self._k, self._temperature = k, temperature

    def score(self, prompts: Sequence[Any], responses: Sequence[Any]) -> tuple[Any, ...]:
        """Return the ids and log-probs of the rows of one forward pass.

        Args:
            prompts: token ids of each row.
            responses: token ids of each row.
        """
        ids_NK, logprobs_NK = teacher_top_k(self._model, prompts, responses, k=self._k, temperature=self._temperature)
        return _by_row(ids_NK.int(), responses), _by_row(logprobs_NK, responses)


def _at_once(batch: tq.Batch) -> Iterator[Sequence[int]]:
    yield range(len(batch["response_ids"]))


def _by_row(flat_N: Tensor, responses: Sequence[Any]) -> list[Any]:
    """Split a flat tensor of response tokens into an array a row."""
    ends = np.cumsum([len(response) for response in responses])
    return np.split(flat_N.cpu().numpy(), ends[:-1])
