"""Characters as tokens: printable ASCII and the newline, after four special tokens. Loads no torch.

A model trained from scratch gains nothing from larger pieces of text. A prompt is the begin token, its characters, and
a mark that announces the answer, which separates the two whatever they contain. A response is its characters and the
end token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from transferqueue.errors import UsageError

PAD_ID: Final = 0
BOS_ID: Final = 1
EOS_ID: Final = 2
ANSWER_ID: Final = 3
_SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<answer>")
_CHARACTERS: Final = "\n" + "".join(chr(code) for code in range(32, 127))
_TOKENS: Final = (*_SPECIAL, *_CHARACTERS)
_IDS: Final = {token: number for number, token in enumerate(_TOKENS)}

VOCABULARY_SIZE: Final = len(_TOKENS)

MISPLACED: Final = "\N{REPLACEMENT CHARACTER}"
"""Special tokens inside a text decode to this, which no reward function takes for part of a right answer."""


class CharacterTokenizer:
    """The tokenizer of the built-in model, with the methods of one of transformers that jobs use. It has no chat
    template.

    >>> tokenizer = CharacterTokenizer()
    >>> tokenizer(["1+1"])["input_ids"], tokenizer.decode([54, 2])
    ([[1, 22, 16, 22, 3]], 'Q')
    """

    chat_template: Any = None
    eos_token_id: int | None = EOS_ID
    pad_token_id: int = PAD_ID

    def __init__(self) -> None:
        self.all_special_ids = [*range(len(_SPECIAL))]

    def __call__(self, text: Sequence[str] | str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Return ``input_ids`` of one text or several. With `add_special_tokens`, as prompts with begin token and mark.

        Raises `UsageError` for a character that is no token.
        """
        if isinstance(text, str):
            return {"input_ids": self._encoded(text, add_special_tokens)}
        return {"input_ids": [self._encoded(prompt, add_special_tokens) for prompt in text]}

    def decode(self, token_ids: Iterable[int], **_: Any) -> str:
        """Return the text up to the first end token. Another special token among them becomes `MISPLACED`.

        Raises `UsageError` for an id that is no token.
        """
        characters: list[str] = []
        for token in token_ids:
            if not 0 <= token < VOCABULARY_SIZE:
                raise UsageError(f"token {token} is outside the vocabulary of {VOCABULARY_SIZE}")
            if token == EOS_ID:
                break
            characters.append(MISPLACED if token < len(_SPECIAL) else _TOKENS[token])
        return "".join(characters)

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id."""
        return dict(_IDS)

    def apply_chat_template(self, conversation: Sequence[Any], **_: Any) -> Any:
        """Raises `UsageError`: there is no chat template."""
        raise UsageError(
            f"{len(conversation)} messages for the built-in model, which has no chat template; give it texts"
        )

    def _encoded(self, text: str, as_prompt: bool) -> list[int]:
        try:
            ids = [_IDS[character] for character in text]
        except KeyError as error:
            raise UsageError(
                f"text {text!r} has {error.args[0]!r}; the built-in model knows printable ASCII and the newline"
            ) from None
        return [BOS_ID, *ids, ANSWER_ID] if as_prompt else ids
