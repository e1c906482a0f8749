"""Rows as rewards see them, and what scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.stages.reward_functions import described_row
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.data.tokenizer import TextTokenizer

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RewardRows:
    """Rows to score. ids: row ids, for messages. data: values of column ``data``. prompt_ids, response_ids: int32
    ``[P]``, ``[T]`` each."""

    ids: Sequence[int]
    data: Sequence[Mapping[str, Any]]
    prompt_ids: Sequence[Ids]
    response_ids: Sequence[Ids]
    tokenizer: TextTokenizer

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    @cached_property
    def texts(self) -> list[str]:
        """Texts of the responses, without special tokens."""
        return [self.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in self.response_ids]

    @cached_property
    def prompts(self) -> list[Any]:
        """Prompts as the data has them: texts, or lists of messages."""
        return [data[PROMPT] for data in self.data]

    @cached_property
    def completions(self) -> list[Any]:
        """Responses in the form of their prompts."""
        return [completion(prompt, text) for prompt, text in zip(self.prompts, self.texts, strict=True)]

    def only(self, at: int) -> RewardRows:
        """Return one row."""
        here = slice(at, at + 1)
        return replace(
            self,
            ids=self.ids[here],
            data=self.data[here],
            prompt_ids=self.prompt_ids[here],
            response_ids=self.response_ids[here],
        )

    def described(self, at: int) -> str:
        """Return a row for a message: its id, prompt and completion, shortened."""
        return f"row {self.ids[at]}, {described_row(self.prompts[at], self.completions[at])}"


def completion(prompt: Any, text: str) -> Any:
    """Return a response in the form of the prompt: a text, or a list with one message of the assistant."""
    return [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text


class RewardTerm(Protocol):
    """One term of a reward."""

    @property
    def name(self) -> str:
        """Name for figures and messages."""

    def scores(self, rows: RewardRows) -> Floats:
        """Return float64 ``[rows]``; NaN where the term does not apply. Raises `RewardFailed`."""
