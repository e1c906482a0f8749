"""A reward model as a term of the reward: the score that a sequence classifier gives to prompt and response.

``args = { output = "probability" }`` makes the probability 1 / (1 + exp(-score)) of it, for a classifier that was
trained with two classes. It has bounds, so one response cannot outweigh a batch, and a critic's first values and
`algorithm.value_clip` are of its size.

A model that has the policy's tokenizer and chat template reads the tokens as they were drawn. Another one reads the
conversation as its own template writes it, in its own tokens, as TRL does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from transferqueue.adapters.protocols import Ids
from transferqueue.adapters.scoring import RewardModel, load_classifier
from transferqueue.adapters.stages.reward_functions import checked_scores
from transferqueue.errors import UsageError
from transferqueue.workflows.job.data.tokenizer import Message, TextTokenizer, load_tokenizer, render
from transferqueue.workflows.job.devices.repeat import repeat_bits
from transferqueue.workflows.job.reward_terms.reward_rows import Floats, RewardRows
from transferqueue.workflows.job.settings.job import Job, ModelSettings, RewardSettings
from transferqueue.workflows.job.settings.sizes import pass_tokens

TOKENS: Final = 8192
"""Tokens of one forward pass."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class ModelTerm:
    """The scores of a reward model. Loads it at once; raises as `load_classifier` and `load_tokenizer` do."""

    def __init__(self, settings: RewardSettings, job: Job, tokenizer: TextTokenizer) -> None:
        repeat_bits(job)
        self._path = settings.model
        self._model = RewardModel(
            load_classifier(settings.model, dtype=job.model.dtype, trust_remote_code=job.model.trust_remote_code),
            tokens=pass_tokens(job, TOKENS),
        )
        self._own = _own_tokenizer(settings.model, job, tokenizer)
        self._is_probability = settings.args.get("output") == "probability"

    @property
    def name(self) -> str:
        """The last part of the model's path."""
        return Path(self._path).name

    def scores(self, rows: RewardRows) -> Floats:
        """Score all rows, in micro-batches. Raises `RewardFailed` for a score that is not finite."""
        if self._own is None:
            prompts, responses = list(rows.prompt_ids), list(rows.response_ids)
        else:
            whole = self._retokenized(rows, self._own)
            prompts, responses = [ids[:-1] for ids in whole], [ids[-1:] for ids in whole]
        scores_B = checked_scores(self.name, self._model.rewards(prompts, responses).tolist(), len(rows))
        return 0.5 + 0.5 * np.tanh(scores_B / 2) if self._is_probability else scores_B  # no overflow, unlike exp

    def _retokenized(self, rows: RewardRows, tokenizer: TextTokenizer) -> list[Ids]:
        texts = [
            self._text(prompt, text, rows.described(at))
            for at, (prompt, text) in enumerate(zip(rows.prompts, rows.texts, strict=True))
        ]
        encoded = tokenizer(texts, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
        return [np.asarray(ids, np.int32) for ids in encoded]

    def _text(self, prompt: str | Sequence[Message], response: str, place: str) -> str:
        if self._own is None or not self._own.chat_template:
            if not isinstance(prompt, str):
                raise UsageError(
                    f"reward model {self._path} has no chat template, and the prompt of {place} is a list of messages; "
                    "give a model that has one, or make a text of the prompt with data.template"
                )
            return prompt + response
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return render(self._own, [*messages, {"role": "assistant", "content": response}], self._path, prompt=False)


def _own_tokenizer(path: str, job: Job, policy: TextTokenizer) -> TextTokenizer | None:
    """Return the model's tokenizer if it writes a conversation otherwise than the policy's; None if the policy's tokens
    are its own."""
    directory = Path(path).expanduser()
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    own = load_tokenizer(ModelSettings(path=path, trust_remote_code=job.model.trust_remote_code))
    return None if _same(own, policy) else own


def _same(own: Any, policy: Any) -> bool:
    return bool(own.chat_template == policy.chat_template and own.get_vocab() == policy.get_vocab())
