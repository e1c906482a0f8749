"""Tokens between two turns of an episode: what stands between the model's last token and its next one.

The history is never rendered or tokenized again. The chat template is asked once for a conversation with an answer of
known text, followed by the observation; its text after that answer is the turn. If the model ended its answer itself,
the end token is not repeated.

A first observation comes before all answers, so it is a part of the prompt, which is rendered with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from transferqueue.adapters.protocols import Ids
from transferqueue.errors import UsageError, listing
from transferqueue.workflows.job.data.prompts import PromptValue, prompt_ids, prompt_text, with_observation
from transferqueue.workflows.job.data.tokenizer import Message, TextTokenizer, render

_ANSWER: Final = "ANSWER-OF-THE-MODEL"


class ChatTurns:
    """Encodes observations and decodes actions. role: of the messages that observations become. system: `data.system`,
    of prompts."""

    def __init__(self, tokenizer: TextTokenizer, stop_ids: Sequence[int], role: str = "user", system: str = "") -> None:
        self._tokenizer, self._stop_ids, self._role = tokenizer, frozenset(stop_ids), role
        self._system = system

    def prompt(self, value: PromptValue, observation: Any = None) -> Ids:
        """Return the ids of a prompt with the first observation: int32 ``[tokens]``.

        Without a chat template, the texts of messages end the prompt. Raises `UsageError` if the observation is neither
        a text nor messages, and for a chat template that fails.
        """
        if (said := _said(observation, 0)) is not None:
            is_text = not self._tokenizer.chat_template and isinstance(said, list)
            value = with_observation(value, _text(said) if is_text else said, self._role)
        text = prompt_text(self._tokenizer, value, self._system, "prompt with its first observation")
        return prompt_ids(self._tokenizer, [text])[0]

    def encode(self, observation: Any, turn: int, drawn: Ids) -> Ids:
        """Return the ids of an observation and of the beginning of the next answer: int32 ``[tokens]``; none for an
        observation of None or "".

        observation: a text, or messages. drawn: the tokens that the model drew before it. Without a chat template the
        ids are those of the text. Raises `UsageError` if it is neither.
        """
        if (given := _said(observation, turn)) is None:
            return np.empty(0, np.int32)
        said = given if isinstance(given, list) else [{"role": self._role, "content": given}]
        if not self._tokenizer.chat_template:
            return self._ids(_text(said))
        ids = self._ids(self._after_answer(said))
        ended = len(drawn) and len(ids) and int(drawn[-1]) == int(ids[0]) and int(drawn[-1]) in self._stop_ids
        return ids[1:] if ended else ids

    def decode(self, drawn: Ids) -> str:
        """Return the text of an action, without its end token and other special tokens."""
        return self._tokenizer.decode(drawn.tolist(), skip_special_tokens=True)

    def _after_answer(self, said: Sequence[Message]) -> str:
        messages = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}, *said]
        roles = listing(dict.fromkeys(message["role"] for message in said))
        text = render(self._tokenizer, messages, f"observation as a message of {roles}", prompt=True)
        _, answer, after = text.partition(_ANSWER)
        if not answer:
            raise UsageError(
                "the chat template leaves out an answer that is followed by another message, so nothing says what "
                "stands between two turns; set model.chat_template to one that keeps it"
            )
        return after

    def _ids(self, text: str) -> Ids:
        return np.asarray(self._tokenizer([text], add_special_tokens=False)["input_ids"][0], np.int32)


def _said(observation: Any, turn: int) -> str | list[dict[str, Any]] | None:
    """Return a text or messages; None for nothing to read."""
    if observation in (None, "", []):
        return None
    if isinstance(observation, str | list):
        return observation
    raise UsageError(
        f"the environment gave an observation of {type(observation).__name__} in turn {turn}; give a text, messages, "
        "or None if there is nothing to read"
    )


def _text(messages: Any) -> str:
    return "".join(message["content"] for message in messages)
