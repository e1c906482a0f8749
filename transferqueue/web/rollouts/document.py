"""A row as the page shows it: its tokens with the values that may colour them, turns, reward terms, other columns.

Pure: a mapping from column names to plain values in, structs out. Recorded and live rows come out alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from transferqueue.web.rollouts.questions import RESPONSES
from transferqueue.web.rollouts.tokenizer import Decode, pieces
from transferqueue.wire.answers.row import RowEvent, RowLife

TOKENS_MAX: Final = 16_384
"""Tokens of one answer, of all its rows together."""
TEXT_CHARS_MAX: Final = 4000
PREVIEW_TOKENS: Final = 48
PREVIEW_CHARS: Final = 160
CALLS_MAX: Final = 64
PROMPT_IDS: Final = "prompt_ids"
PROMPTS: Final = ("prompt", "question")
COMPLETIONS: Final = ("response", "completion", "text")
"""Columns with a completion as text, of rows without tokens."""
DRAWN: Final = "loss_mask"
"""True for tokens that the model drew; the others are observations."""
TERMS: Final = "reward_terms"
TURN_REWARDS: Final = "turn_rewards"
DATA: Final = "data"
PROMPT_COLUMNS: Final = (PROMPT_IDS, *PROMPTS, DATA)
"""All that a prompt is made of."""
ADVANTAGES: Final = "advantages"
_ID_MAX: Final = 2**62
_CALL: Final = ("<tool_call>", "</tool_call>")
LINEAGE: Final = ("_row", "_life")
_LENGTHS: Final = "_lengths"
"""In a row whose lists were cut: their lengths before, by column."""

if TYPE_CHECKING:
    import pyarrow as pa

Scale = Literal["logprob", "signed", "version", "number"]
Row = Mapping[str, Any]


class TokenColour(msgspec.Struct, frozen=True):
    """Values that may colour the tokens of a response. values: one of each token; None: it has none."""

    column: str
    scale: Scale
    values: list[float | None]


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool that the model wrote. arguments: as it wrote them."""

    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True):
    """Tokens from `start` up to `stop` of a response, or a message. reward: that the environment gave for it."""

    who: str
    start: int = 0
    stop: int = 0
    text: str = ""
    reward: float | None = None
    calls: list[ToolCall] = []


class RowContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a row says.

    Attributes:
        prompt: Its text, or its messages as turns.
        pieces: The text of each token of the response.
        ids: Of these tokens.
        omitted: Tokens that follow and are not shown.
        text: The response, where it has no tokens.
        colours: Values that may colour the tokens.
        turns: Of an episode. Empty: the response is one turn.
        reward: None: it has none.
        terms: Reward terms by name.
        tokens: Length of the response.
        columns: All other columns, as texts.
        why_not: Why it cannot be shown; "": it is.
    """

    prompt: list[Turn] = []
    pieces: list[str] = []
    ids: list[int] = []
    omitted: int = 0
    text: str = ""
    colours: list[TokenColour] = []
    turns: list[Turn] = []
    reward: float | None = None
    terms: dict[str, float | None] = {}
    tokens: int = 0
    columns: list[tuple[str, str]] = []
    why_not: str = ""


class RecordedLife(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded row in the form of a live one (`page.row_life`), with what it says.

    Attributes:
        life: Ages are those of the row when it ended: `ago_s` counts back from its end.
        record: The life of its table.
        step: That trained it.
        ended_at: Seconds since 1970.
    """

    life: RowLife
    put_by: str
    done_by: list[str]
    held_by: dict[str, str] = {}
    record: str
    step: int | None
    ended_at: float
    content: RowContent


class RowLine(msgspec.Struct, frozen=True, kw_only=True):
    """A row in a list. workers: that put it and held it, in order. preview: the beginning of its response."""

    row: int
    life: str
    step: int | None
    version: int
    group: str
    fate: str
    reason: str
    reward: float | None
    tokens: int
    finish: str
    workers: list[str]
    preview: str


def line_of(row: Row, reward: str, decode: Decode | None) -> RowLine:
    """A row in a list. reward: the column that counts as its reward, or ""."""
    events = row["_events"] or []
    return RowLine(
        row=row["_row"],
        life=row["_life"],
        step=row["_step"],
        version=row["_version"],
        group=str(row["_group_id"]) if row["_group_id"] >= 0 else "",
        fate=row["_fate"],
        reason=row["_reason"] or "",
        reward=_number(row.get(reward)),
        tokens=_length(row),
        finish=cut(str(row.get("finish_reason") or "")),
        workers=list(dict.fromkeys(event["worker"] for event in events if event["worker"])),
        preview=_preview(row, decode).replace("\n", " "),
    )


def life_of(table: str, row: Row, content: RowContent) -> RecordedLife:
    """The life of a recorded row."""
    ended, put = row["_ended_at"], row["_put_at"]
    events = row["_events"] or []
    return RecordedLife(
        life=RowLife(
            table=table,
            row=row["_row"],
            state=row["_fate"],
            reason=row["_reason"] or "",
            age_s=(ended - put).total_seconds(),
            resident=False,
            key=row["_key"],
            tags=json.loads(row["_tags"] or "{}"),
            group_id=row["_group_id"],
            group_size=row["_group_size"],
            ordinal=row["_ordinal"],
            policy_version=row["_version"],
            policy_version_max=row["_version_max"],
            tokens=row["_tokens"],
            priority=row["_priority"],
            events=[
                RowEvent(
                    ago_s=(ended - event["at"]).total_seconds(),
                    what=event["what"],
                    task=event["task"] or "",
                    detail=event["detail"] or "",
                )
                for event in events
            ],
            events_complete=bool(events) and events[0]["what"] in ("put", "restored"),
        ),
        put_by=(events[0]["worker"] or "") if events else "",
        done_by=[event["worker"] or "" for event in events],
        record=row["_life"],
        step=row["_step"],
        ended_at=ended.timestamp(),
        content=content,
    )


def short_rows(table: pa.Table, most: int) -> list[dict[str, Any]]:
    """The rows of an Arrow table with lists of at most `most` elements: the rest never becomes Python."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths: dict[str, list[int]] = {}
    for at, field in enumerate(table.schema):
        kind = field.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if is_list and not field.name.startswith("_"):
            column = table.column(at)
            lengths[field.name] = pc.list_value_length(column).to_pylist()
            table = table.set_column(at, field.name, pc.list_slice(column, 0, most, return_fixed_size_list=False))
    return [
        row | {_LENGTHS: {name: of[at] for name, of in lengths.items()}} for at, row in enumerate(table.to_pylist())
    ]


def joined(row: Row, other: Row) -> dict[str, Any]:
    """The columns of two parts of a row."""
    return {**row, **other, _LENGTHS: {**row.get(_LENGTHS, {}), **other.get(_LENGTHS, {})}}


def encoded(document: Any) -> bytes:
    """A document as JSON. Half a surrogate pair, which a tool call in JSON may name, is escaped: no text has it."""
    try:
        return msgspec.json.encode(document)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(msgspec.to_builtins(document)))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {_escaped(name): _escaped(each) for name, each in value.items()}
    return value


def content_of(
    row: Row, reward: str, terms: Sequence[str], decode: Decode | None, tokens_max: int = TOKENS_MAX
) -> RowContent:
    """What a row says, or why it cannot be shown. reward: the column that counts as its reward, or "". terms: names of
    the reward terms."""
    try:
        return _content_of(row, reward, terms, decode, tokens_max)
    except Exception as error:  # noqa: BLE001  (the kinds of values are endless, and the life of the row is shown)
        return RowContent(why_not=cut(f"what the row says cannot be shown: {type(error).__name__}: {error}"))


def _content_of(row: Row, reward: str, terms: Sequence[str], decode: Decode | None, tokens_max: int) -> RowContent:
    response, ids = _response(row)
    count = _length_of(row, response) if response else 0
    shown = ids[:tokens_max]
    texts = pieces(shown, decode)
    text_column = "" if ids else next((name for name in COMPLETIONS if isinstance(row.get(name), str)), "")
    data = _data(row)
    colours = _colours(row, count, len(shown)) if ids else []
    roles = {name for name in (DRAWN, TERMS, TURN_REWARDS, PROMPT_IDS) if _numbers(row, name) is not None}
    used = {response, text_column, *roles, *(each.column for each in colours)}
    return RowContent(
        prompt=_prompt(row, data, decode),
        pieces=texts,
        ids=shown,
        omitted=count - len(shown),
        text=cut(str(row[text_column])) if text_column else "",
        colours=colours,
        turns=_turns(row, texts),
        reward=_number(row.get(reward)),
        terms=_terms(row, terms),
        tokens=_length(row),
        columns=[
            *((f"{DATA}.{name}", cut(_text(value))) for name, value in data.items()),
            *(
                (name, cut(_text(value, _length_of(row, name))))
                for name, value in row.items()
                if not name.startswith("_") and name not in used and not (name == DATA and isinstance(row[DATA], dict))
            ),
        ],
    )


def cut(text: str) -> str:
    """At most `TEXT_CHARS_MAX` characters of a text, with the number of those that are left out."""
    if len(text) <= TEXT_CHARS_MAX:
        return text
    return f"{text[:TEXT_CHARS_MAX]} … {len(text) - TEXT_CHARS_MAX:,} more characters"


def _response(row: Row) -> tuple[str, list[int]]:
    """The column with the tokens of the response, and these; "" if it has none."""
    for name in RESPONSES:
        if (ids := _ids(row, name)) is not None:
            return name, ids
    return "", []


def _ids(row: Row, name: str) -> list[int] | None:
    """The tokens in a column; None if it has no list of them."""
    value = row.get(name)
    if isinstance(value, list) and all(type(token) is int and abs(token) <= _ID_MAX for token in value):
        return value
    return None


def _numbers(row: Row, name: str) -> list[float | None] | None:
    """The numbers in a column, None for each that lacks; None if it has no list of them."""
    value = row.get(name)
    if isinstance(value, list) and all(each is None or isinstance(each, int | float) for each in value):
        return value
    return None


def _length_of(row: Row, name: str) -> int:
    """The length of a list before it was cut; 0 for what is none."""
    value = row.get(name)
    return int(row.get(_LENGTHS, {}).get(name, len(value))) if isinstance(value, list) else 0


def _length(row: Row) -> int:
    """Tokens of the response."""
    name, _ = _response(row)
    return _length_of(row, name) if name else int(row["_tokens"])


def _preview(row: Row, decode: Decode | None) -> str:
    """The beginning of the response."""
    name, ids = _response(row)
    if name:
        return "".join(pieces(ids[:PREVIEW_TOKENS], decode))[:PREVIEW_CHARS]
    return next((str(row[name])[:PREVIEW_CHARS] for name in COMPLETIONS if isinstance(row.get(name), str)), "")


def _number(value: Any) -> float | None:
    """A number of JSON; None for what is none."""
    try:
        return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond the floats
        return None


def _data(row: Row) -> dict[str, Any]:
    """The row of the data file that a job keeps as a plain value."""
    data = row.get(DATA)
    return {str(name): value for name, value in data.items()} if isinstance(data, dict) else {}


def _prompt(row: Row, data: dict[str, Any], decode: Decode | None) -> list[Turn]:
    """The prompt. Takes it out of `data`: what else that has are columns."""
    given = data.pop("prompt", None)
    ids = _ids(row, PROMPT_IDS)
    if ids is not None and (decode is not None or given is None):
        rest = _length_of(row, PROMPT_IDS) - TOKENS_MAX
        text = "".join(pieces(ids[:TOKENS_MAX], None)) if decode is None else decode(ids[:TOKENS_MAX])
        return [Turn("prompt", text=f"{text} … {rest:,} more tokens" if rest > 0 else text)]
    if given is None:
        given = next((row[name] for name in PROMPTS if row.get(name) is not None), None)
    if given is None:
        return []
    if isinstance(given, list) and all(isinstance(message, dict) for message in given):
        return [_message(message) for message in given]
    return [Turn("prompt", text=cut(_text(given)))]


def _message(message: dict[str, Any]) -> Turn:
    """A message of a conversation, with its calls of tools."""
    calls = []
    given = message.get("tool_calls") or []
    for call in (given if isinstance(given, list) else [given])[:CALLS_MAX]:
        called = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(called, dict):
            called = {"arguments": call}
        calls.append(ToolCall(str(called.get("name", "")), cut(_text(called.get("arguments", "")))))
    content = message.get("content")
    return Turn(str(message.get("role", "message")), text="" if content is None else cut(_text(content)), calls=calls)


def _terms(row: Row, names: Sequence[str]) -> dict[str, float | None]:
    """The reward terms by their names; by their numbers, where the folder has no names."""
    values = _numbers(row, TERMS)
    if values is None:
        return {}
    named = [*names, *(f"term {at}" for at in range(len(names), len(values)))]
    return {name: _number(value) for name, value in zip(named, values, strict=False)}


def _colours(row: Row, tokens: int, shown: int) -> list[TokenColour]:
    """Each column of numbers with one value of each token, and the advantage of the whole response."""
    found = []
    for name, value in row.items():
        if name in (DRAWN, *RESPONSES) or name.startswith("_"):
            continue
        if isinstance(value, list) and _length_of(row, name) == tokens and _are_numbers(value):
            found.append(TokenColour(name, _scale(name), [_number(each) for each in value[:shown]]))
        elif name == ADVANTAGES and _number(value) is not None:
            found.append(TokenColour(name, "signed", [_number(value)] * shown))
    return sorted(found, key=lambda one: ("logprob", "signed", "version", "number").index(one.scale))


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _scale(name: str) -> Scale:
    """How a column of values colours."""
    if "logprob" in name:
        return "logprob"
    if "advantage" in name:
        return "signed"
    return "version" if "version" in name else "number"


def _turns(row: Row, texts: Sequence[str]) -> list[Turn]:
    """The turns of an episode: runs of tokens that the model drew, and observations between them."""
    drawn = _numbers(row, DRAWN)
    if drawn is None or all(drawn):
        return []
    rewards = list(_numbers(row, TURN_REWARDS) or ())
    turns: list[Turn] = []
    start, count = 0, min(len(drawn), len(texts))
    for stop in range(1, count + 1):
        if stop < count and bool(drawn[stop]) == bool(drawn[start]):
            continue
        is_model = bool(drawn[start])
        said = "".join(texts[start:stop])
        reward = _number(rewards.pop(0)) if is_model and rewards else None
        turns.append(
            Turn(
                "model" if is_model else "environment",
                start,
                stop,
                reward=reward,
                calls=_calls(said) if is_model else [],
            )
        )
        start = stop
    return turns


def _calls(said: str) -> list[ToolCall]:
    """The calls in what the model said. Takes linear time: the text is anything."""
    opened, closed = _CALL
    calls: list[ToolCall] = []
    end = 0
    while len(calls) < CALLS_MAX and (start := said.find(opened, end)) >= 0:
        if (end := said.find(closed, start)) < 0:
            break
        calls.append(_call(said[start + len(opened) : end].strip()))
    return calls


def _call(text: str) -> ToolCall:
    """A call as models write it, JSON with a name and arguments; as text if it is none."""
    try:
        called = json.loads(text)
        return ToolCall(str(called["name"]), cut(_text(called.get("arguments", ""))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToolCall("", cut(text))


def _text(value: Any, length: int = 0) -> str:
    """A value as text. length: of a list before it was cut."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list):
        shown = value[:PREVIEW_TOKENS] if _are_numbers(value) else value
        rest = max(length, len(value)) - len(shown)
        return f"[{', '.join([*map(_shown, shown), *([f'… {rest:,} more'] if rest else [])])}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_shown(each)}" for name, each in value.items()) + "}"
    return str(value)


def _shown(value: Any) -> str:
    """A value inside another one: a text in quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _text(value)
