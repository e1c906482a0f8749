"""Sample responses of a run as text: the model's text beside its reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import transferqueue as tq
from transferqueue.adapters.protocols import Ids
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
        self._version: int | None = None
        self._left = 0

    def report(self, batch: tq.Batch, rewards_B: npt.NDArray[Any]) -> None:
        """Report the first rows of `batch` if its version has not had enough yet. Rows without a reward (NaN) are
        passed over."""
        at = np.flatnonzero(np.isfinite(rewards_B))[: self._wanted(batch.version)].tolist()
        if at:
            data, ids, ordinals = batch[names.DATA].list(), list(batch["response_ids"]), batch.ordinal
            self._send([self._sample(batch.version, data[row], ids[row], rewards_B[row], ordinals[row]) for row in at])

    def report_row(self, version: int, data: Mapping[str, Any], ids: Ids, reward: float, ordinal: int) -> None:
        """Report one row, of these response ids, if its version has not had enough yet."""
        if self._wanted(version):
            self._send([self._sample(version, data, ids, reward, ordinal)])

    def _wanted(self, version: int) -> int:
        if version != self._version:
            self._version, self._left = version, self._each
        return self._left

    def _send(self, samples: list[dict[str, Any]]) -> None:
        self._left -= len(samples)
        self._context.figures("samples", samples=samples)

    def _sample(self, version: int, data: Mapping[str, Any], ids: Ids, reward: float, ordinal: int) -> dict[str, Any]:
        return {
            "prompt": shortened(data[PROMPT]),
            "response": shortened(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)),
            "reward": float(reward),
            "ordinal": int(ordinal),
            "version": version,
        }


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
