"""A tokenizer with a token for each byte, and one with a chat template as Qwen's, as directories that transformers
loads."""

from pathlib import Path
from typing import Any

import pytest

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_tokenizer(
    directory: Path, *, template: str = CHAT, special: tuple[str, ...] = SPECIAL, **options: Any
) -> Path:
    """Write it; the end of a turn is the end token, as in instruction models."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    plain = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = tokenizers.decoders.ByteLevel()
    plain.add_special_tokens(list(special))
    options.setdefault("eos_token", special[-1])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=special[0], **options)
    fast.chat_template = template or None
    fast.save_pretrained(directory)
    return directory


class ByteTokenizer:
    """The same tokens without transformers, which takes seconds to import: a text is its bytes. No chat template."""

    chat_template = None
    eos_token_id = 256

    def __init__(self) -> None:
        self.all_special_ids = [256]

    def __call__(self, text: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(each.encode()) for each in text]}

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        raise NotImplementedError

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(257)}
