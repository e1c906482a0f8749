"""A row as the page shows it: its tokens with the values that may colour them, turns, reward terms, other columns.

Pure: a mapping from column names to plain values in, structs out. Recorded and live rows come out alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

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
ADVANTAGES: Final = "advantages"
_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

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
        finish=str(row.get("finish_reason") or ""),
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


def content_of(
    row: Row, reward: str, terms: Sequence[str], decode: Decode | None, tokens_max: int = TOKENS_MAX
) -> RowContent:
    """What a row says. reward: the column that counts as its reward, or "". terms: names of the reward terms."""
    response = next((name for name in RESPONSES if row.get(name) is not None), "")
    ids = [int(token) for token in row[response]] if response else []
    shown = ids[:tokens_max]
    texts = pieces(shown, decode)
    text_column = "" if ids else next((name for name in COMPLETIONS if isinstance(row.get(name), str)), "")
    data = _data(row)
    colours = _colours(row, len(ids), len(shown)) if ids else []
    used = {response, text_column, DRAWN, TERMS, TURN_REWARDS, PROMPT_IDS, *(each.column for each in colours)}
    return RowContent(
        prompt=_prompt(row, data, decode),
        pieces=texts,
        ids=shown,
        omitted=len(ids) - len(shown),
        text=cut(str(row[text_column])) if text_column else "",
        colours=colours,
        turns=_turns(row, texts),
        reward=_number(row.get(reward)),
        terms=_terms(row, terms),
        tokens=_length(row),
        columns=[
            *((f"{DATA}.{name}", cut(_text(value))) for name, value in data.items()),
            *(
                (name, cut(_text(value)))
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


def _length(row: Row) -> int:
    """Tokens of the response."""
    return next((len(row[name]) for name in RESPONSES if row.get(name) is not None), int(row["_tokens"]))


def _preview(row: Row, decode: Decode | None) -> str:
    """The beginning of the response."""
    for name in RESPONSES:
        if row.get(name) is not None:
            return "".join(pieces(row[name][:PREVIEW_TOKENS], decode))[:PREVIEW_CHARS]
    return next((str(row[name])[:PREVIEW_CHARS] for name in COMPLETIONS if isinstance(row.get(name), str)), "")


def _number(value: Any) -> float | None:
    """A number of JSON; None for what is none."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(f"{value:.6g}")
    return None


def _data(row: Row) -> dict[str, Any]:
    """The row of the data file that a job keeps as a plain value."""
    data = row.get(DATA)
    return {str(name): value for name, value in data.items()} if isinstance(data, dict) else {}


def _prompt(row: Row, data: dict[str, Any], decode: Decode | None) -> list[Turn]:
    """The prompt. Takes it out of `data`: what else that has are columns."""
    given = data.pop("prompt", None)
    ids = row.get(PROMPT_IDS)
    if ids is not None and (decode is not None or given is None):
        rest = len(ids) - TOKENS_MAX
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
    for call in (message.get("tool_calls") or [])[:CALLS_MAX]:
        called = call.get("function", call) if isinstance(call, dict) else {"name": "", "arguments": call}
        calls.append(ToolCall(str(called.get("name", "")), cut(_text(called.get("arguments", "")))))
    content = message.get("content")
    return Turn(str(message.get("role", "message")), text="" if content is None else cut(_text(content)), calls=calls)


def _terms(row: Row, names: Sequence[str]) -> dict[str, float | None]:
    """The reward terms by their names; by their numbers, where the folder has no names."""
    values = row.get(TERMS)
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
        if isinstance(value, list) and len(value) == tokens and _are_numbers(value):
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
    drawn = row.get(DRAWN)
    if drawn is None or all(drawn):
        return []
    rewards = list(row.get(TURN_REWARDS) or ())
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
                calls=[_call(text) for text in _CALL.findall(said)[:CALLS_MAX]] if is_model else [],
            )
        )
        start = stop
    return turns


def _call(text: str) -> ToolCall:
    """A call as models write it, JSON with a name and arguments; as text if it is none."""
    try:
        called = json.loads(text)
        return ToolCall(str(called["name"]), cut(_text(called.get("arguments", ""))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToolCall("", cut(text))


def _text(value: Any) -> str:
    """A value as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list) and len(value) > PREVIEW_TOKENS and _are_numbers(value):
        return f"{_text(value[:PREVIEW_TOKENS])[:-1]}, … {len(value) - PREVIEW_TOKENS:,} more]"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))}: {_shown(each)}" for name, each in value.items()) + "}"
    return str(value)


def _shown(value: Any) -> str:
    """A value inside another one: a text in quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _text(value)
