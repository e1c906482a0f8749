"""Tokens as texts, by the tokenizer of the job whose run is shown. Nothing of a model's own code runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from transferqueue.errors import TransferQueueError

Decode = Callable[[Sequence[int]], str]
"""Returns the text of ids, special tokens included."""
JOB_FILE: Final = "job.toml"
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
"""At the end of a text: its last character has more bytes, in the tokens that follow."""
_NO_TOKEN: Final = (TransferQueueError, IndexError, OverflowError, TypeError, ValueError)
"""What tokenizers raise for an id that they lack."""
_WINDOW: Final = 8
"""Tokens of one character at most; with more, what they are is shown as it is."""


class RunTexts:
    """What a job's folder says of its rows. Of another directory, and where the tokenizer cannot be read, tokens are
    shown as their ids.

    Attributes:
        terms: Names of the reward terms, in the order of the column ``reward_terms``.
        decode: None: tokens have no texts here.
        why_not: The reason for that; "" where nothing lacks.
    """

    def __init__(self, run: Path | None) -> None:
        self.terms: tuple[str, ...] = ()
        self.decode: Decode | None = None
        self.why_not = ""
        if run is None or not (run / JOB_FILE).exists():
            self.why_not = "tokens are shown as ids: only the folder of a job's run says which tokenizer they have"
            return
        try:
            self._read(run)
        except Exception as error:  # noqa: BLE001  (libraries of tokenizers raise of all kinds; the page says why)
            self.why_not = f"tokens are shown as ids, since the tokenizer of the run cannot be read: {error}"

    def _read(self, run: Path) -> None:
        from transferqueue.workflows.job.data.tokenizer import read_tokenizer
        from transferqueue.workflows.job.reward_terms.term_names import term_names
        from transferqueue.workflows.job.run.folder import RunFolder

        folder = RunFolder(run.absolute())
        job = folder.job()
        self.terms = term_names(job)
        name = job.model.tokenizer or job.model.path
        local = folder.place() / Path(name).expanduser()
        named = str(local) if local.is_dir() else name
        tokenizer = read_tokenizer(msgspec.structs.replace(job.model, tokenizer=named, trust_remote_code=False))

        def decode(ids: Sequence[int]) -> str:
            try:
                return str(tokenizer.decode(list(ids), skip_special_tokens=False))
            except _NO_TOKEN:
                return "".join(f"{token} " for token in ids)

        self.decode = decode


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of each token; together they are the text of all. Of tokens that are one character together, the last
    has it, and the others are "". Without `decode` each is its number.

    >>> pieces([104, 105, 0xE2, 0x82, 0xAC], lambda ids: bytes(ids).decode(errors="replace"))
    ['h', 'i', '', '', '€']
    >>> pieces([104, 105], None)
    ['104 ', '105 ']
    """
    if decode is None:
        return [f"{token} " for token in ids]
    found: list[str] = []
    context, begun = 0, 0  # the text before ids[begun] is shown; that from ids[context] on decides about a space
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[context:begun]), decode(ids[context:end])
        if now.endswith(_UNFINISHED) and end - begun < _WINDOW and end < len(ids):
            found.append("")
            continue
        found.append(now[len(before) :] or decode(ids[begun:end]))  # the built-in one ends a text at its end token
        context, begun = begun, end
    return found
