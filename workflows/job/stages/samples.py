"""Sample responses of a run as text: the model's text beside its reward, of a job that does not record its rows."""

from __future__ import annotations

import threading
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
from transferqueue.workflows.job.reward_terms.term_names import term_names
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.sizes import group_rows

CHARACTERS_MAX: Final = 4000
"""Characters of a prompt or response that are kept; of a longer one its two ends."""


class SampleReporter:
    """Reports `log.samples` rows of each version of the table's clock, each of another prompt, as figures of kind
    ``samples``.

    A sample has the prompt, the response, its reward and the score of each term, the columns of the data file (the
    right answer is among them), finish reason, length in tokens, and the step that rows are gathered for when it is
    reported. Rows of a version before the newest reported one are passed over. recorded: the table keeps all rows, so
    none is reported. May be used from several threads.
    """

    def __init__(self, context: Context, tokenizer: TextTokenizer, *, recorded: bool = False) -> None:
        job = context.settings(Job)
        self._context, self._tokenizer = context, tokenizer
        self._each, self._terms = 0 if recorded else job.log.samples, term_names(job)
        self._size = group_rows(job)
        self._version = -1
        self._prompts: set[int] = set()
        self._lock = threading.Lock()

    def report(self, batch: tq.Batch, rewards_B: npt.NDArray[Any], terms_BF: npt.NDArray[Any]) -> None:
        """Report rows of `batch` of as many prompts as its version has not had enough of. Rows without a reward (NaN)
        are passed over. terms_BF: the score of each term, NaN where one does not apply."""
        with self._lock:
            self._report(batch, rewards_B, terms_BF)

    def _report(self, batch: tq.Batch, rewards_B: npt.NDArray[Any], terms_BF: npt.NDArray[Any]) -> None:
        rows_of: dict[int, list[int]] = {}
        for row in np.flatnonzero(np.isfinite(rewards_B)).tolist():
            rows_of.setdefault(int(batch.ordinal[row]) // self._size, []).append(row)
        wanted = self._wanted(batch.version)
        new = [prompt for prompt in rows_of if prompt not in self._prompts]
        spread = [new[len(new) * at // min(wanted, len(new))] for at in range(min(wanted, len(new)))]
        if not spread:
            return
        data, ids, reasons = batch[names.DATA].list(), list(batch["response_ids"]), list(batch["finish_reason"])
        at = [rows_of[prompt][batch.version % len(rows_of[prompt])] for prompt in spread]
        self._send(
            [
                self._sample(batch.version, data[row], ids[row], rewards_B[row], batch.ordinal[row], reasons[row])
                | {"terms": {n: float(s) for n, s in zip(self._terms, terms_BF[row], strict=True) if not np.isnan(s)}}
                for row in at
            ]
        )

    def report_row(
        self, version: int, data: Mapping[str, Any], ids: Ids, reward: float, ordinal: int, reason: str
    ) -> None:
        """Report one row, of these response ids, if its version has not had enough yet, nor another of its prompt."""
        with self._lock:
            if self._wanted(version) and ordinal // self._size not in self._prompts:
                self._send([self._sample(version, data, ids, reward, ordinal, reason)])

    def _wanted(self, version: int) -> int:
        if version < self._version:
            return 0
        if version > self._version:
            self._version, self._prompts = version, set()
        return self._each - len(self._prompts)

    def _send(self, samples: list[dict[str, Any]]) -> None:
        self._prompts |= {sample["ordinal"] // self._size for sample in samples}
        self._context.figures("samples", samples=samples)

    def _sample(
        self, version: int, data: Mapping[str, Any], ids: Ids, reward: float, ordinal: int, reason: str
    ) -> dict[str, Any]:
        return {
            "step": version + 1,
            "version": version,
            "ordinal": int(ordinal),
            "prompt": shortened(data[PROMPT]),
            "response": shortened(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)),
            "reward": float(reward),
            "data": {name: shortened(value) for name, value in data.items() if name != PROMPT},
            "finish_reason": reason,
            "tokens": len(ids),
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
