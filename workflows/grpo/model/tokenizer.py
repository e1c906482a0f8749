"""Characters as tokens: printable ASCII and the newline, after four special tokens.

The prompts and answers of the problem sets are short ASCII texts, and a model that starts from nothing gains
nothing from larger pieces. A byte vocabulary was the alternative; it would make the output layer 2.6 times as
large for tokens that never occur. This module loads no torch: reward processes use it.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

PAD_ID: Final = 0
BOS_ID: Final = 1
EOS_ID: Final = 2
ANSWER_ID: Final = 3

_SPECIAL_COUNT: Final = 4
_CHARACTERS: Final = "\n" + "".join(chr(code) for code in range(32, 127))
_IDS: Final = {character: number for number, character in enumerate(_CHARACTERS, start=_SPECIAL_COUNT)}

VOCABULARY_SIZE: Final = _SPECIAL_COUNT + len(_CHARACTERS)

MISPLACED: Final = "\N{REPLACEMENT CHARACTER}"
"""What a special token inside a text decodes to: no scorer can mistake it for part of a right answer."""


def encode(text: str) -> npt.NDArray[np.int32]:
    """Return the token ids of ``text``, int32 ``[characters]``, without bos or eos.

    Raises ``ValueError`` for a character outside printable ASCII and the newline.

    >>> encode("1+1").tolist()
    [22, 16, 22]
    """
    try:
        return np.fromiter((_IDS[character] for character in text), dtype=np.int32, count=len(text))
    except KeyError as error:
        raise ValueError(
            f"text {text!r} contains {error.args[0]!r}; the tokenizer knows printable ASCII and the newline"
        ) from None


def encode_prompt(text: str) -> npt.NDArray[np.int32]:
    """Return ``text`` as a prompt, int32 ``[characters + 2]``: bos, the characters, and the mark that an answer follows.

    Without the mark a prompt could be told from its answer by content only: ``sun`` + ``nus`` reads as one word.
    """
    return np.concatenate([np.array([BOS_ID]), encode(text), np.array([ANSWER_ID])]).astype(np.int32)


def encode_answer(text: str) -> npt.NDArray[np.int32]:
    """Return ``text`` as a response, int32 ``[characters + 1]``: the characters, then eos."""
    return np.concatenate([encode(text), np.array([EOS_ID], dtype=np.int32)])


def decode(ids: npt.ArrayLike) -> str:
    """Return the text of ``ids`` (integers ``[tokens]``) up to the first eos.

    Another special token among them becomes ``MISPLACED``, so a response that strays into special tokens is scored as
    wrong instead of being repaired. Raises ``ValueError`` for an id outside the vocabulary.

    >>> decode(encode_answer("42"))
    '42'
    """
    characters: list[str] = []
    for token in np.asarray(ids, dtype=np.int64).tolist():
        if not 0 <= token < VOCABULARY_SIZE:
            raise ValueError(f"token {token} is outside the vocabulary of {VOCABULARY_SIZE}")
        if token == EOS_ID:
            break
        characters.append(MISPLACED if token < _SPECIAL_COUNT else _CHARACTERS[token - _SPECIAL_COUNT])
    return "".join(characters)
