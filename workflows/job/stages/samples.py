"""Sample responses of a run as text: the model's text beside its reward."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.workflows.flow.stage import Context
from transferqueue.workflows.job import names
from transferqueue.workflows.job.data.prompt_data import PROMPT
from transferqueue.workflows.job.data.tokenizer import TextTokenizer
from transferqueue.workflows.job.settings.job import Job

CHARACTERS_MAX: Final = 4000
"""Characters of a prompt or response that are kept; of a longer one its two ends."""


class SampleReporter:
    """Reports `log.samples` rows of each version of the table's clock, as figures of kind ``samples``."""

    def __init__(self, context: Context, tokenizer: TextTokenizer) -> None:
        self._context, self._tokenizer = context, tokenizer
        self._each = context.settings(Job).log.samples
        self._version, self._left = -1, 0

    def report(self, batch: tq.Batch, rewards_B: npt.NDArray[Any]) -> None:
        """Report the first rows of `batch` if its version has not had enough yet. Rows without a reward (NaN) are
        passed over."""
        if batch.version != self._version:
            self._version, self._left = batch.version, self._each
        at = np.flatnonzero(np.isfinite(rewards_B))[: self._left]
        if not len(at):
            return
        self._left -= len(at)
        data, ids, ordinals = batch[names.DATA].list(), list(batch["response_ids"]), batch.ordinal
        samples = [
            {
                "prompt": shortened(data[row][PROMPT]),
                "response": shortened(self._tokenizer.decode(ids[row].tolist(), skip_special_tokens=False)),
                "reward": float(rewards_B[row]),
                "ordinal": int(ordinals[row]),
                "version": batch.version,
            }
            for row in at.tolist()
        ]
        self._context.figures("samples", samples=samples)


def shortened(value: Any) -> Any:
    """Return a text, or the texts of messages, with at most `CHARACTERS_MAX` characters each.

    >>> len(shortened("x" * 9000))
    4003
    """
    if isinstance(value, list):
        return [{name: shortened(inner) for name, inner in message.items()} for message in value]
    if not isinstance(value, str) or len(value) <= CHARACTERS_MAX:
        return value
    return f"{value[: CHARACTERS_MAX // 2]} … {value[-CHARACTERS_MAX // 2 :]}"
