"""Tokens between two turns of an episode: what stands between the model's last token and its next one.

The history is never rendered or tokenized again. The chat template is asked once for a conversation with an answer of
known text, followed by the observation; its text after that answer is the turn. If the model ended its answer itself,
the end token is not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from transferqueue.adapters.protocols import Ids
from transferqueue.errors import UsageError, listing
from transferqueue.workflows.job.data.tokenizer import Message, TextTokenizer, render

_ANSWER: Final = "ANSWER-OF-THE-MODEL"


class ChatTurns:
    """Encodes observations and decodes actions. role: of the messages that observations become."""

    def __init__(self, tokenizer: TextTokenizer, stop_ids: Sequence[int], role: str = "user") -> None:
        self._tokenizer, self._stop_ids, self._role = tokenizer, frozenset(stop_ids), role

    def encode(self, observation: Any, turn: int, drawn: Ids) -> Ids:
        """Return the ids of an observation and of the beginning of the next answer: int32 ``[tokens]``; none for an
        observation of None or "".

        observation: a text, or messages. drawn: the tokens that the model drew before it. Without a chat template the
        ids are those of the text. Raises `UsageError` if it is neither.
        """
        if observation in (None, "", []):
            return np.empty(0, np.int32)
        if not isinstance(observation, str | list):
            raise UsageError(
                f"the environment gave an observation of {type(observation).__name__} in turn {turn}; give a text, "
                "messages, or None if there is nothing to read"
            )
        said = observation if isinstance(observation, list) else [{"role": self._role, "content": observation}]
        if not self._tokenizer.chat_template:
            return self._ids("".join(message["content"] for message in said))
        ids = self._ids(self._after_answer(said))
        ended = len(drawn) and len(ids) and int(drawn[-1]) == int(ids[0]) and int(drawn[-1]) in self._stop_ids
        return ids[1:] if ended else ids

    def decode(self, drawn: Ids) -> str:
        """Return the text of an action, without its end token and other special tokens."""
        return self._tokenizer.decode(drawn.tolist(), skip_special_tokens=True)

    def _after_answer(self, said: list[Message]) -> str:
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
