"""A byte-level tokenizer with a chat template, built locally: any text is tokens, and no file is downloaded.

Its tokens are the 256 bytes, the words that chats repeat, and three special tokens with Qwen's names.
"""

from __future__ import annotations

from typing import Any, Final

PAD: Final = "<|endoftext|>"
BEGIN: Final = "<|im_start|>"
END: Final = "<|im_end|>"
"""Ends a message, and so a response: the model's end token."""

_WORDS: Final = ("user", "assistant", "system", "tool")
"""Roles of a chat; each is one token."""

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""ChatML, as Qwen's models have it; the text of an assistant is marked for `return_assistant_tokens_mask`."""


def build_tokenizer() -> Any:
    """Return a `transformers.PreTrainedTokenizerFast` of about 280 tokens. End token ``<|im_end|>``, padding
    ``<|endoftext|>``."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: place for place, token in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        _add_word(word, vocabulary, merges)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([PAD, BEGIN, END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, extra_special_tokens=[BEGIN]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _add_word(word: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Make `word` one token: its prefixes become tokens too, each made of the one before and a letter."""
    for end in range(1, len(word)):
        prefix, letter = word[:end], word[end]
        if prefix + letter not in vocabulary:
            vocabulary[prefix + letter] = len(vocabulary)
            merges.append((prefix, letter))
