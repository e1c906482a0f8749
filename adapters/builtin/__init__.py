"""A small language model of plain torch, with its tokenizer, for jobs that run without a Hugging Face library.

Its directory is also one of a ``LlamaForCausalLM``: transformers and vLLM load the same files and compute the same
function, under the same names of weights. The key `MARK` in ``config.json`` says that the model is ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

MARK: Final = "transferqueue_builtin"
"""Key of ``config.json``; its value is the version of the format."""


def is_builtin(path: str | Path) -> bool:
    """Whether `path` is the directory of a built-in model. Reads ``config.json`` alone."""
    try:
        return MARK in json.loads((Path(path).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
