r"""From a row of data to the text and the tokens of a prompt.

A prompt is a text or a list of messages. It comes from the column `data.prompt`, or from `data.template`, which makes a
text from columns. With a chat template a text becomes one message of the user; the system message of `data.system` goes
first, unless the data has one. A model without a chat template (a base model) reads the text as it is, with the tokens
that its tokenizer adds, such as one for the beginning.

>>> template = PromptTemplate("Question: {question}\nAnswer:", ["question", "answer"], "data.jsonl")
>>> template.fill({"question": "2+2?", "answer": 4}, "data.jsonl, line 1")
'Question: 2+2?\nAnswer:'
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from transferqueue.adapters.engines.images import VisionProcessor
from transferqueue.adapters.protocols import Ids
from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.workflows.job.data.tokenizer import Message, TextTokenizer, render
from transferqueue.workflows.job.settings.job import DataSettings

_USUAL: Final = ("question", "problem", "messages", "instruction", "query", "input", "text")
"""Columns that hold prompts in many data sets, suggested in errors."""
_NEAR: Final = 0.6

PromptValue = str | list[dict[str, Any]]
"""A prompt as environments and rewards see it: a text, or messages."""


class PromptTemplate:
    """``"{question}"``: a text with columns of the data in braces; two braces stand for one.

    A field is the name of a column and nothing else: no attribute, index, conversion or format. Raises `UsageError` for
    others and `NotFound` for a column that the data lacks.
    """

    def __init__(self, text: str, columns: Sequence[str], source: str) -> None:
        self._parts = _parts(text)
        self.columns = tuple(dict.fromkeys(name for _, name in self._parts if name is not None))
        for name in self.columns:
            _check_field(name, columns, source)
        if not self.columns:
            raise UsageError(
                f"data.template {text!r} names no column: every prompt would be the same; write a column in braces, "
                f"such as {{{columns[0] if columns else 'question'}}}"
            )

    def fill(self, row: dict[str, Any], place: str) -> str:
        """Return the text for one row. Raises `UsageError` for a value that is no text or number."""
        return "".join(
            literal if name is None else literal + _as_text(row[name], name, place) for literal, name in self._parts
        )


def _parts(text: str) -> list[tuple[str, str | None]]:
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(
            f"data.template {text!r}: {error}; a brace that belongs to the text is written twice: {{{{ or }}}}"
        ) from error
    for _, name, form, conversion in parsed:
        if name is not None and (form or conversion or not name):
            raise UsageError(f"data.template {text!r}: {{{name}}} must be the name of a column and nothing else")
    return [(literal, name) for literal, name, _, _ in parsed]


def _check_field(name: str, columns: Sequence[str], source: str) -> None:
    if name in columns:
        return
    if "." in name or "[" in name:
        raise UsageError(
            f"data.template: {{{name}}} reads inside a value; a field is the name of a column of {source}: "
            f"{listing(columns)}"
        )
    raise NotFound(
        f"data.template: {{{name}}} is no column of {source}, which has {listing(columns)}{near(name, columns)}"
    )


def near(name: str, columns: Sequence[str]) -> str:
    """Return ``; did you mean question?`` if a column has nearly this name, else nothing.

    >>> near("qestion", ["question", "answer"])
    '; did you mean question?'
    """
    by_lower = {column.lower(): column for column in columns}
    close = get_close_matches(name.lower(), list(by_lower), n=2, cutoff=_NEAR)
    return f"; did you mean {' or '.join(by_lower[lower] for lower in close)}?" if close else ""


def _as_text(value: Any, name: str, place: str) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    kind = "no value" if value is None else type(value).__name__
    raise UsageError(f'{place}: column "{name}" has {kind}; a template takes text and numbers')


# ---------------------------------------------------------------- prompts


@dataclass(frozen=True, kw_only=True)
class RenderedPrompt:
    """One prompt. value: as rewards see it, a text or a list of messages. text: its text for the tokenizer. response:
    text that follows (sft), in parts: the first is learned, and of several every second one. images: encoded. ids: of
    the text, if images stand in it."""

    value: str | list[dict[str, Any]]
    text: str
    response: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    ids: Ids | None = None


class LearnedTokens(NamedTuple):
    """Tokens of a response: int32 ``[T]``; and which of them are learned, bool ``[T]``; None: all."""

    ids: Ids
    learned: npt.NDArray[np.bool_] | None


class PromptRenderer:
    """Makes prompts from rows of the data. learns_response: rows have a response too (sft). vision: of a model that
    reads the images of `data.images`.

    Raises `NotFound` for a column that the data lacks, and `UsageError` for a system message without a chat template.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: TextTokenizer,
        columns: Sequence[str],
        *,
        learns_response: bool = False,
        vision: VisionProcessor | None = None,
    ) -> None:
        self._settings, self.tokenizer, self._vision = settings, tokenizer, vision
        self._learns_response = learns_response
        self._template = check_columns(settings, columns, learns_response=learns_response)
        self._chat = bool(tokenizer.chat_template)
        self._source = f"chat template of {settings.path}"
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        if settings.system and not self._chat:
            raise UsageError(
                f"data.system {_short(settings.system)} with a model that has no chat template: nothing says where it "
                "stands; set model.chat_template, or write it into data.template"
            )
        if learns_response and tokenizer.eos_token_id is None:
            raise UsageError("the tokenizer has no end token (eos_token): a response that is learned must end with it")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that prompts and responses are made from."""
        return _columns(self._settings, self._template, learns_response=self._learns_response)

    def render(self, row: dict[str, Any], place: str) -> RenderedPrompt:
        """Return the prompt of one row. Raises `UsageError` for a value that is no prompt; `place` is the row's place
        in the data."""
        if self._template is None:
            value = _prompt(row[self._settings.prompt], self._settings.prompt, place)
        else:
            value = self._template.fill(row, place)
        if self._vision is not None:
            return self._with_images(self._vision, value, row, place)
        if not self._learns_response:
            return RenderedPrompt(value=value, text=self._text(value, place))
        if self._settings.turns == "all":
            return self._conversation(value, place)
        prompt, response = self._with_response(value, row, place)
        return self._learned(prompt, response, place)

    def tokens(self, prompts: Sequence[RenderedPrompt]) -> list[Ids | None]:
        """Return the ids of prompts; None for a text that is longer than `prompt_tokens_max` of the longest tokens."""
        if self._vision is not None:
            return [prompt.ids for prompt in prompts]
        limit = self._longest * self._settings.prompt_tokens_max
        ids = iter(self.encode([prompt.text for prompt in prompts if len(prompt.text) <= limit]))
        return [next(ids) if len(prompt.text) <= limit else None for prompt in prompts]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `prompt_ids`."""
        return prompt_ids(self.tokenizer, texts)

    def response_tokens(self, prompt: RenderedPrompt) -> LearnedTokens:
        """Return the tokens of a response; what is learned of it, up to and with its end token."""
        parts = _encoded(self.tokenizer, prompt.response, add_special_tokens=False)
        if len(parts) == 1 and self._settings.turns == "last":
            return LearnedTokens(self._up_to_its_end(parts[0]), None)
        ids, learned = [], []
        for number, part in enumerate(parts):
            turn = self._up_to_its_end(part) if number % 2 == 0 else part[:0]
            ids.append(turn if number == len(parts) - 1 else part)
            learned.append(np.arange(len(ids[-1])) < len(turn))
        return LearnedTokens(np.concatenate(ids), np.concatenate(learned))

    def _up_to_its_end(self, ids: Ids) -> Ids:
        """Return the ids of a turn up to its end token, which is appended if the template writes none."""
        special = np.flatnonzero(np.isin(ids, self.tokenizer.all_special_ids)) if self._chat else np.empty(0, np.intp)
        if special.size:
            return ids[: special[-1] + 1]
        return np.append(ids, np.int32(self.tokenizer.eos_token_id or 0))

    def _text(self, value: PromptValue, place: str) -> str:
        return prompt_text(self.tokenizer, value, self._settings.system, place)

    def _with_images(
        self, vision: VisionProcessor, value: PromptValue, row: dict[str, Any], place: str
    ) -> RenderedPrompt:
        images = row_images(row[self._settings.images], self._settings.images, place)
        if self._chat:
            messages = with_images(self._messages(value), len(images), vision.token)
            text = prompt_text(self.tokenizer, messages, "", place)
            _check_written(messages, text, place)
        else:
            text = prompt_text(self.tokenizer, value, "", place)
            text = text if vision.token in text else vision.token * len(images) + text
        try:
            ids = vision.ids(text, images, add_special_tokens=not self._chat)
        except UsageError as error:
            raise UsageError(f'{place}: column "{self._settings.images}" {error}') from error
        return RenderedPrompt(value=value, text=text, images=images, ids=ids)

    def _messages(self, value: PromptValue) -> list[Message]:
        return _with_system(value, self._settings.system)

    # ------------------------------------------------------------ responses that are learned

    def _with_response(
        self, value: str | list[dict[str, Any]], row: dict[str, Any], place: str
    ) -> tuple[str | list[dict[str, Any]], str]:
        """Return prompt and response: of the column `data.response`, or the last message, which is the assistant's."""
        if self._settings.response:
            return value, _response(row[self._settings.response], self._settings.response, place)
        if isinstance(value, list) and len(value) > 1 and value[-1].get("role") == "assistant":
            return value[:-1], _response(value[-1:], self._settings.prompt, place)
        raise UsageError(
            f"{place}: there is no response to learn; set data.response to the column that has it, or let the messages "
            f'of "{self._settings.prompt}" end with one of the assistant'
        )

    def _learned(self, prompt: str | list[dict[str, Any]], response: str, place: str) -> RenderedPrompt:
        text = self._text(prompt, place)
        if not self._chat:
            return RenderedPrompt(value=prompt, text=text, response=(response,))
        whole = render(
            self.tokenizer,
            [*self._messages(prompt), {"role": "assistant", "content": response}],
            place,
            prompt=False,
        )
        if not whole.startswith(text):
            raise _written_differently(place, text, whole)
        return RenderedPrompt(value=prompt, text=text, response=(whole[len(text) :],))

    def _conversation(self, value: str | list[dict[str, Any]], place: str) -> RenderedPrompt:
        """Return a conversation of which each message of the assistant is learned: the prompt is what stands before
        the first one."""
        answers = [at for at, message in enumerate(value) if _is_answer(message)]
        if not answers or answers[0] == 0 or not _is_answer(value[-1]) or not self._chat:
            raise UsageError(
                f'{place}: data.turns="all" learns messages of the assistant, so the model needs a chat template '
                '(model.chat_template), and each row messages that begin with another role and end with "assistant"; '
                'mend the row, or set data.turns="last"'
            )
        messages = [message for message in value if isinstance(message, dict)]
        before = [self._part(messages[:at], place, prompt=True) for at in answers]
        after = [self._part(messages[: at + 1], place, prompt=False) for at in answers]
        bounds = [end for pair in zip(before, after, strict=True) for end in pair]
        for shorter, longer in pairwise(bounds):
            if not longer.startswith(shorter):
                raise _written_differently(place, shorter, longer)
        parts = [longer[len(shorter) :] for shorter, longer in pairwise(bounds)]
        return RenderedPrompt(value=messages[: answers[0]], text=before[0], response=tuple(parts))

    def _part(self, messages: list[dict[str, Any]], place: str, *, prompt: bool) -> str:
        return render(self.tokenizer, self._messages(messages), place, prompt=prompt)


def prompt_text(tokenizer: TextTokenizer, value: PromptValue, system: str, place: str) -> str:
    """Return the text of a prompt, up to where the answer begins. system: `data.system`.

    Raises `UsageError` for messages without a chat template, and for a template that fails: it names `place`.
    """
    if tokenizer.chat_template:
        messages = _with_system(value, system)
        return render(tokenizer, messages, place, prompt=True, going_on=messages[-1].get("role") == "assistant")
    if isinstance(value, str):
        return value
    raise UsageError(
        f"{place}: the prompt is a list of messages, and the model has no chat template; set model.chat_template, or "
        "make a text with data.template"
    )


def prompt_ids(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[Ids]:
    """Return the ids of texts of prompts. A chat template writes special tokens itself; otherwise the tokenizer adds
    them."""
    return _encoded(tokenizer, texts, add_special_tokens=not tokenizer.chat_template)


def with_observation(value: PromptValue, observation: str | list[dict[str, Any]], role: str) -> PromptValue:
    """Return a prompt with an environment's first observation: a text ends the last message if that is the user's, and
    is a further message of `role` otherwise; messages follow the prompt.

    >>> with_observation("Find the key. ", "You are in a hall.", "user")
    'Find the key. You are in a hall.'
    >>> with_observation([{"role": "system", "content": "Play."}], "A hall.", "user")[1]
    {'role': 'user', 'content': 'A hall.'}
    """
    if isinstance(value, str) and isinstance(observation, str):
        return value + observation
    messages: list[dict[str, Any]] = [{"role": "user", "content": value}] if isinstance(value, str) else value
    last = messages[-1]
    if isinstance(observation, list):
        return [*messages, *observation]
    if last.get("role") != "user":
        return [*messages, {"role": role, "content": observation}]
    content = last["content"]
    joined = content + observation if isinstance(content, str) else [*content, {"type": "text", "text": observation}]
    return [*messages[:-1], {**last, "content": joined}]


def _with_system(value: PromptValue, system: str) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    if system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _encoded(tokenizer: TextTokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def row_images(value: Any, column: str, place: str) -> tuple[bytes, ...]:
    """Return the encoded images of a row. Raises `UsageError` for one without its bytes: it names `place`, and which
    image."""
    found = []
    for number, image in enumerate(value if isinstance(value, list) else [value]):
        data = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(data, bytes):
            path = image.get("path") if isinstance(image, dict) else None
            has = f"the path {path!r} alone" if path else _kind(data)
            raise UsageError(
                f'{place}: column "{column}" image {number} has {has}; give the bytes of its file, as datasets stores '
                "an Image"
            )
        found.append(data)
    return tuple(found)


def with_images(messages: Sequence[Message], count: int, token: str) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, with places for images: the parts of images, and the
    placeholders `token` in texts; else they stand before the text of the first message of the user.

    >>> with_images([{"role": "user", "content": "What is it?"}], 1, "<image>")[0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    >>> with_images([{"role": "user", "content": "Is <image> it?"}], 1, "<image>")[0]["content"]
    [{'type': 'text', 'text': 'Is '}, {'type': 'image'}, {'type': 'text', 'text': ' it?'}]
    """
    # All contents are parts: templates that select parts by their type write nothing of a text.
    shown = [{**message, "content": _parts_of(message["content"], token)} for message in messages]
    if not any(_is_image(part) for message in shown for part in message["content"]):
        first = next((message for message in shown if message.get("role") == "user"), shown[0])
        first["content"] = [{"type": "image"}] * count + first["content"]
    return shown


def _parts_of(content: Any, token: str) -> list[Any]:
    """Return the parts of a message's content, without keys that have no value (Arrow adds those)."""
    text = [] if content is None else [{"type": "text", "text": str(content)}]
    parts: list[Any] = []
    for part in content if isinstance(content, list) else text:
        kept = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part
        if not isinstance(kept, dict) or token not in str(kept.get("text", "")):
            parts.append(kept)
            continue
        for at, piece in enumerate(str(kept["text"]).split(token)):
            parts += [{"type": "image"}] * (at > 0) + [{**kept, "text": piece}] * bool(piece)
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _check_written(messages: Sequence[Message], text: str, place: str) -> None:
    """Raise `UsageError` if the chat template left a text of the system or the user out."""
    for message in messages:
        for part in message["content"] if message.get("role") in ("system", "user") else ():
            said = part.get("text") if isinstance(part, dict) else None
            if isinstance(said, str) and said.strip() not in text:
                raise UsageError(
                    f"{place}: the chat template leaves out a text of the {message['role']}, {_short(said)}; give one "
                    "that writes all parts of messages (model.chat_template)"
                )


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _written_differently(place: str, text: str, whole: str) -> UsageError:
    return UsageError(
        f"{place}: the chat template writes the conversation with its response differently from the part before it: "
        f"{_short(text[-60:])} against {_short(whole[max(0, len(text) - 60) : len(text)])}; set model.chat_template to "
        "one that leaves earlier turns as they are"
    )


def check_columns(
    settings: DataSettings, columns: Sequence[str], *, learns_response: bool = False
) -> PromptTemplate | None:
    """Return the template of prompts, if there is one. Raises `NotFound` for a column of prompts or responses that the
    data lacks. It needs no tokenizer, which takes seconds to load."""
    template = PromptTemplate(settings.template, columns, settings.path) if settings.template else None
    for name in _columns(settings, template, learns_response=learns_response):
        _check_column(name, settings, columns)
    return template


def _columns(settings: DataSettings, template: PromptTemplate | None, *, learns_response: bool) -> tuple[str, ...]:
    prompt = (settings.prompt,) if template is None else template.columns
    response = (settings.response,) if learns_response and settings.response else ()
    images = (settings.images,) if settings.images else ()
    return tuple(dict.fromkeys((*prompt, *response, *images)))


def _check_column(name: str, settings: DataSettings, columns: Sequence[str]) -> None:
    if name in columns:
        return
    key = {settings.response: "response", settings.images: "images"}.get(name, "prompt")
    usual = [column for column in _USUAL if column in columns]
    remedy = (
        f'; set data.prompt = "{usual[0]}" or data.template = "{{{usual[0]}}}"' if usual and key == "prompt" else ""
    )
    raise NotFound(
        f'data.{key}: "{name}" is no column of {settings.path}, which has '
        f"{listing(columns)}{remedy or near(name, columns)}"
    )


def _prompt(value: Any, column: str, place: str) -> str | list[dict[str, Any]]:
    """Check the value of a prompt column: a text, or messages, without keys that have no value (Arrow adds those)."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return [_message(message, column, place) for message in value]
    kind = "no value" if value is None else "nothing" if value in ("", []) else type(value).__name__
    raise UsageError(f'{place}: column "{column}" has {kind}; a prompt is a text or a list of messages')


def _message(message: Any, column: str, place: str) -> dict[str, Any]:
    if isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message:
        return {name: value for name, value in message.items() if value is not None or name == "content"}
    keys = listing(message) if isinstance(message, dict) else type(message).__name__
    raise UsageError(
        f'{place}: column "{column}" has a message of {keys}; a message is an object with role and content, such as '
        '{"role": "user", "content": "2+2?"}'
    )


def _response(value: Any, column: str, place: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if isinstance(value, str) and value:
        return value
    raise UsageError(
        f'{place}: column "{column}" has {_kind(value)}; a response is a text, or one message of the assistant'
    )


def _kind(value: Any) -> str:
    return "no value" if value is None else "an empty text" if value == "" else type(value).__name__


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
