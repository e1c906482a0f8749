"""The tokenizer of a model, with its chat template, checked before anything is tokenized with it."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from transferqueue.adapters.builtin import is_builtin
from transferqueue.adapters.builtin.tokenizer import CharacterTokenizer
from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.lazy import install_line
from transferqueue.limits import MIB
from transferqueue.workflows.job.settings.job import ModelSettings

TEMPLATE_BYTES_MAX: Final = MIB
"""Bytes of a file with a chat template; the longest public ones have some ten thousand."""

Message = Mapping[str, Any]
"""One message of a conversation: ``role``, ``content``, and what else the template reads."""


class TextTokenizer(Protocol):
    """The calls used of a tokenizer of transformers or of the built-in model."""

    chat_template: Any
    eos_token_id: int | None
    all_special_ids: list[int]

    def __call__(self, text: list[str], **options: Any) -> Any:
        """Tokenize texts; ``["input_ids"]`` of the result has a list of ids for each."""

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> Any:
        """Render a conversation; with ``tokenize=False`` as text."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """Return the text of ids."""

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id, added tokens included."""


def load_tokenizer(model: ModelSettings) -> TextTokenizer:
    """Load the tokenizer that the settings name, and set and check its chat template.

    Blocks while files are read (or downloaded, for an id of the hub). Raises `NotFound` if there is no tokenizer at the
    path, and `UsageError` for one that cannot be read, for a template that fails, and for one with tokens that the
    tokenizer lacks.
    """
    tokenizer = read_tokenizer(model)
    if model.chat_template:
        tokenizer.chat_template = _template(Path(model.chat_template).expanduser())
    source = model.chat_template or model.tokenizer or model.path
    if arguments := _template_arguments(model, tokenizer, source):
        # Every caller renders with them: prompts, turns of episodes, and functions of the user.
        tokenizer.apply_chat_template = partial(  # type: ignore[method-assign]
            tokenizer.apply_chat_template, **arguments
        )
    check_template(tokenizer, source)
    return tokenizer


def read_tokenizer(model: ModelSettings) -> TextTokenizer:
    """Load the tokenizer that the settings name, as it is: for texts of tokens. Raises as `load_tokenizer`, which
    checks its template too."""
    path = model.tokenizer or model.path
    _check_path(path)
    if is_builtin(path):
        return CharacterTokenizer()
    kind = _known_class(path) or _auto_class()
    try:
        tokenizer: TextTokenizer = kind.from_pretrained(
            path, revision=revision_of(model, path), trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        first = str(error).strip().split("\n")[0]
        if not Path(path).expanduser().is_dir():
            raise NotFound(
                f"model {path}: there is no such directory, and the library gives no tokenizer of that id: {first}; "
                "set model.tokenizer to a directory with tokenizer.json, or to an id of the hub"
            ) from error
        raise UsageError(
            f"model {path} has no tokenizer that can be read: {first}; set model.tokenizer to a directory with "
            "tokenizer.json"
        ) from error
    return tokenizer


def revision_of(model: ModelSettings, path: str) -> str | None:
    """Return the revision of what is at `path`: `model.revision` is of the policy alone; None: the default branch."""
    return model.revision or None if path == model.path else None


def _auto_class() -> Any:
    """Return transformers' `AutoTokenizer`, which reads the model's files to choose a class, and loads torch."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(f"a tokenizer needs transformers ({error}): {install_line('train')}") from error
    return AutoTokenizer


# ---------------------------------------------------------------- the class, chosen once for all processes

CLASS_VARIABLE: Final = "TRANSFERQUEUE_TOKENIZER_CLASS"
_OWN: Final = "transformers."
"""Package whose classes are passed on. A model's own code is chosen, and loaded, by `AutoTokenizer` alone."""


def class_environment(model: ModelSettings, tokenizer: TextTokenizer) -> dict[str, str]:
    """Return the variable that tells processes which class `AutoTokenizer` chose for this model, so that they need not
    load torch to choose it again.

    Loading the class takes a quarter of the time of `AutoTokenizer`, and a fifth of its memory.
    """
    kind = type(tokenizer)
    if not kind.__module__.startswith(_OWN):
        return {}
    return {CLASS_VARIABLE: f"{kind.__module__}:{kind.__qualname__} {model.tokenizer or model.path}"}


def _known_class(path: str) -> Any:
    """Return the class that was chosen for the tokenizer at `path`; None if none was, or this version of transformers
    lacks it."""
    named, _, of_path = os.environ.get(CLASS_VARIABLE, "").partition(" ")
    module, _, name = named.partition(":")
    if of_path != path or not module.startswith(_OWN):
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _check_path(path: str) -> None:
    """Refuse a directory that does not exist, before it is asked for at the hub."""
    directory = Path(path).expanduser()
    is_path = (
        directory.is_absolute()
        or path.startswith((".", "~"))
        or (len(directory.parts) > 1 and directory.parent.is_dir())
    )
    if is_path and not directory.is_dir():
        has = listing(entry.name for entry in directory.parent.iterdir()) if directory.parent.is_dir() else "nothing"
        raise NotFound(f"model {path}: there is no such directory; {directory.parent} has {has}")


def _template(path: Path) -> str:
    if not path.is_file():
        raise NotFound(f"model.chat_template {path}: there is no such file; give a file with a Jinja template")
    if path.stat().st_size > TEMPLATE_BYTES_MAX:
        raise UsageError(
            f"model.chat_template {path} is over {TEMPLATE_BYTES_MAX >> 20} MiB; a template is a short text"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"model.chat_template {path} is not text in UTF-8: {error}") from error


def _template_arguments(model: ModelSettings, tokenizer: TextTokenizer, source: str) -> dict[str, Any]:
    """Return what the job gives the chat template. Raises `UsageError` for an argument that it does not read."""
    arguments = dict(model.template_args)
    if model.tools:
        arguments["tools"] = _tools(Path(model.tools).expanduser())
    for name in arguments:
        key = "model.tools" if name == "tools" else f"model.template_args.{name}"
        if not tokenizer.chat_template:
            raise UsageError(f"{key}: {source} has no chat template; set model.chat_template, or leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UsageError(
                f"{key}: the chat template of {source} does not read {name}; give an argument that it reads, or leave "
                "it out"
            )
    return arguments


def _tools(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise NotFound(f"model.tools {path}: there is no such file; give a JSON file with an array of functions")
    if path.stat().st_size > TEMPLATE_BYTES_MAX:
        raise UsageError(f"model.tools {path} is over {TEMPLATE_BYTES_MAX >> 20} MiB; a prompt has no room for it")
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise UsageError(
            f"model.tools {path}: {error}; give a JSON array of functions, such as "
            '[{"type": "function", "function": {"name": "search", "parameters": {}}}]'
        ) from error


# ---------------------------------------------------------------- chat templates

_MARKER: Final = re.compile(r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>]{1,64}｜>|<(?:start|end)_of_\w{1,32}>")
"""How templates write tokens of their own: ``<|im_start|>``, ``<｜User｜>``, ``<start_of_turn>``."""
_PROBE: Final = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"})


def check_template(tokenizer: TextTokenizer, source: str) -> None:
    """Raise `UsageError` if the chat template fails, or has tokens that the tokenizer lacks. Does nothing without a
    template.

    A token that is missing would be split into pieces of text that the model has never seen in that place.
    """
    if not tokenizer.chat_template:
        return
    text = render(tokenizer, _PROBE[:1], source, prompt=True) + render(tokenizer, _PROBE, source, prompt=False)
    known = tokenizer.get_vocab()
    if missing := [token for token in dict.fromkeys(_MARKER.findall(text)) if token not in known]:
        raise UsageError(
            f"chat template of {source} has {listing(missing)}, which the tokenizer does not have as tokens; give the "
            "template of this model (model.chat_template), or its tokenizer (model.tokenizer)"
        )


def render(
    tokenizer: TextTokenizer, messages: Sequence[Message], source: str, *, prompt: bool, going_on: bool = False
) -> str:
    """Return the text of a conversation by the chat template. prompt: an answer follows. going_on: the last message is
    not finished.

    Raises `UsageError` if the template fails: it names `source`.
    """
    options: dict[str, Any] = {"continue_final_message": True} if going_on else {"add_generation_prompt": prompt}
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UsageError(
            f"{source}: the chat template fails for messages of {roles}: {type(error).__name__}: {error}"
        ) from error
    return text
