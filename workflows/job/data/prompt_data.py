"""The data of a job, opened and checked: rows, the renderer of prompts, and the columns that rewards ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from transferqueue.adapters.engines.images import VisionProcessor
from transferqueue.adapters.stages.reward_functions import GIVEN, load_reward
from transferqueue.errors import Impossible, NotFound, UsageError, listing
from transferqueue.workflows.job.data.data_rows import DataRows, value_bytes
from transferqueue.workflows.job.data.files import open_data
from transferqueue.workflows.job.data.prompts import PromptRenderer, check_columns, near
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, load_tokenizer, revision_of
from transferqueue.workflows.job.settings.environment_factories import environments_of
from transferqueue.workflows.job.settings.job import DataPart, DataSettings, EnvironmentSettings, Job, RewardSettings

PROMPT: Final = "prompt"
"""Key of column ``data`` with the prompt itself."""
_KEYS: Final = re.compile(r"\bdata\.(path|subset|split|prompt|template|response|columns)\b")
"""Keys in errors of a data set that a source or a held-out set has too."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One data set with what makes prompts of its rows. columns: the data's columns by the names that rewards ask for.
    weight: of its prompts among those of all sources. environment: plays its rows."""

    rows: DataRows
    renderer: PromptRenderer
    columns: Mapping[str, str]
    weight: float = 1.0
    environment: str = ""

    def check_first(self) -> None:
        """Raise `UsageError` if the first row makes no prompt, or has a value that rewards could not get; other rows
        are checked when their turn comes."""
        row, place = self.rows.row(0), self.rows.place(0)
        self.values(row, self.renderer.render(row, place).value, place)

    def values(self, row: Mapping[str, Any], prompt: Any, place: str) -> dict[str, Any]:
        """Return the value of column ``data`` for a row: the prompt, and the columns of rewards. `UsageError` for what
        is no plain value."""
        values = {PROMPT: prompt} | {name: row[column] for name, column in self.columns.items()}
        for name, value in values.items():
            _check_plain(value, name, place)
        return values


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """The rows of one or several sources."""

    sources: Sequence[DataSource]

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return sum(len(source.rows) for source in self.sources)

    @property
    def renderer(self) -> PromptRenderer:
        """The renderer of the first source: all have one tokenizer and one longest prompt."""
        return self.sources[0].renderer

    def image_bytes(self, column: str, prompts: int) -> int:
        """Return the most bytes that the images of `prompts` prompts have: those of the largest rows, twice if rewards
        get them too. column: of images."""
        sizes = np.concatenate(
            [value_bytes(each.rows, column) * (1 + (column in each.columns.values())) for each in self.sources]
        )
        return int(np.resize(np.sort(sizes)[::-1], prompts).sum())

    def check_first(self) -> None:
        """As `DataSource.check_first`, of each source."""
        for source in self.sources:
            source.check_first()


def open_prompts(job: Job, tokenizer: TextTokenizer | None = None) -> PromptData:
    """Open the data that a job trains on. tokenizer: the model's, if it is loaded already.

    Raises `NotFound` for a file or column that is missing, `UsageError` for data that makes no prompts, and
    `Impossible` for fewer prompts than the steps of the job need.
    """
    data = PromptData(sources=_opened(job, _training(job), tokenizer))
    _check_epochs(job, len(data))
    return data


def open_held_out(job: Job, tokenizer: TextTokenizer | None = None) -> dict[str, PromptData]:
    """Open the sets of held-out prompts, by their names; that of `evaluation.path` is "". What one leaves open
    is as in the training data."""
    parts = _held_out(job)
    opened = _opened(job, list(parts.values()), tokenizer)
    return {name: PromptData(sources=[source]) for name, source in zip(parts, opened, strict=True)}


def open_all(job: Job) -> tuple[PromptData, list[PromptData]]:
    """Open the training data and each set of held-out prompts, as the two functions above do: all files before the
    tokenizer."""
    training = _training(job)
    held_out = list(_held_out(job).values()) if job.evaluation.path else []
    opened = _opened(job, [*training, *held_out], None)
    data = PromptData(sources=opened[: len(training)])
    _check_epochs(job, len(data))
    return data, [PromptData(sources=[source]) for source in opened[len(training) :]]


def _training(job: Job) -> list[_Part]:
    sources = enumerate(job.data.sources)
    parts = [
        _Part(_of_part(job.data, part), f"data.sources.{at}", part.weight, part.environment) for at, part in sources
    ]
    return parts or [_Part(job.data, "data")]


def _held_out(job: Job) -> dict[str, _Part]:
    settings = msgspec.structs.replace(job.data, split=job.evaluation.split)
    played = job.evaluation.environment
    parts = {"": _Part(_of_part(settings, job.evaluation), "evaluation", environment=played)}
    for at, part in enumerate(job.evaluation.sets):
        parts[part.name] = _Part(_of_part(settings, part), f"evaluation.sets.{at}", environment=part.environment)
    return parts


def _check_epochs(job: Job, rows: int) -> None:
    prompts = job.steps * job.trainer.prompts_per_step
    if job.data.epochs and job.data.epochs * rows < prompts:
        raise Impossible(
            f"steps={job.steps} × prompts_per_step={job.trainer.prompts_per_step} are {prompts:,} prompts; "
            f"{job.data.path} has {rows:,} rows × epochs={job.data.epochs} = "
            f"{job.data.epochs * rows:,}: set "
            f"steps={job.data.epochs * rows // job.trainer.prompts_per_step}, or data.epochs=0 for as many "
            "as it takes"
        )


class _Part(NamedTuple):
    """A data set to open. key: its table, for errors."""

    settings: DataSettings
    key: str
    weight: float = 1.0
    environment: str = ""


def _of_part(settings: DataSettings, part: DataPart) -> DataSettings:
    """Return the settings of one data set; what it leaves open is that of `settings`."""
    own = part.prompt or part.template
    return msgspec.structs.replace(
        settings,
        sources=(),
        path=part.path,
        subset=part.subset,
        split=part.split or settings.split,
        prompt=(part.prompt if own else "") or settings.prompt,
        template=part.template if own else settings.template,
        response=part.response or settings.response,
        columns=part.columns or settings.columns,
    )


def _opened(job: Job, parts: Sequence[_Part], tokenizer: TextTokenizer | None) -> list[DataSource]:
    """Open data sets. Paths and columns are checked before a tokenizer is loaded, which takes seconds."""
    learns = job.algorithm.kind == "sft"
    rows_of, columns_of = [], []
    for part in parts:
        with _named(part.key):
            rows_of.append(open_data(part.settings.path, split=part.settings.split, subset=part.settings.subset))
            check_columns(part.settings, rows_of[-1].columns, learns_response=learns)
            columns_of.append(reward_columns(job, part.settings, rows_of[-1].columns, part.environment))
    tokenizer = tokenizer or load_tokenizer(job.model)
    vision = _vision(job) if job.data.images else None
    if vision is not None and not tokenizer.chat_template:
        tokenizer.chat_template = vision.chat_template
    return [
        _source(part, tokenizer, rows, columns, vision, learns_response=learns)
        for part, rows, columns in zip(parts, rows_of, columns_of, strict=True)
    ]


def _vision(job: Job) -> VisionProcessor:
    model = job.model
    path = model.tokenizer or model.path
    return VisionProcessor(path, revision=revision_of(model, path) or "", trust_remote_code=model.trust_remote_code)


def _source(
    part: _Part,
    tokenizer: TextTokenizer,
    rows: DataRows,
    columns: Mapping[str, str],
    vision: VisionProcessor | None,
    *,
    learns_response: bool,
) -> DataSource:
    with _named(part.key):
        renderer = PromptRenderer(
            part.settings, tokenizer, rows.columns, learns_response=learns_response, vision=vision
        )
    rows = rows.select(tuple(dict.fromkeys((*renderer.columns, *columns.values()))))
    for name in renderer.columns:
        if (at := rows.first_missing(name)) is not None:
            raise UsageError(f'{rows.place(at)}: column "{name}" has no value; each row needs one, for its prompt')
    return DataSource(rows=rows, renderer=renderer, columns=columns, weight=part.weight, environment=part.environment)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Name the table `key` in errors about ``data``."""
    try:
        yield
    except UsageError as error:
        text = _KEYS.sub(rf"{key}.\1", str(error))
        raise type(error)(text if key in text or key == "data" else f"{key}: {text}") from error


# ---------------------------------------------------------------- columns of rewards


def reward_columns(job: Job, settings: DataSettings, has: Sequence[str], environment: str = "") -> dict[str, str]:
    """Return the data's columns that the rewards of a job get, or the environment of this name (empty: the only one),
    by the names that they use. Imports the modules of reward functions.

    A function gets the parameters that it names; one with ``**kwargs``, and an environment, gets the names of
    `data.columns`, or every column but that of images if there are none. Raises `NotFound` for a column that is
    missing.
    """
    named = _named_columns(settings, has)
    every = list(settings.columns or [name for name in named if name != settings.images])
    wanted: list[str] = []
    playing = [each for name, each in environments_of(job).items() if environment in ("", name)]
    scoring: list[RewardSettings | EnvironmentSettings] = [*job.reward, *playing]
    for scored in scoring:
        if scored.function:
            wanted += load_reward(scored.function, scored.args).columns(named, offered=every)
        elif isinstance(scored, EnvironmentSettings):
            wanted += every
    return {name: named[name] for name in dict.fromkeys(wanted) if name not in (*GIVEN, PROMPT)}


def _named_columns(settings: DataSettings, has: Sequence[str]) -> dict[str, str]:
    """Return every name that a reward may ask for, and its column: those of the data, and those of `data.columns`."""
    for name, column in settings.columns.items():
        if column not in has:
            raise NotFound(
                f'data.columns: {name} = "{column}" is no column of {settings.path}, which has '
                f"{listing(has)}{near(column, has)}"
            )
    return {name: name for name in has} | dict(settings.columns)


_PLAIN: Final = (str, int, float, bool, bytes, type(None))


def _check_plain(value: Any, name: str, place: str) -> None:
    """Raise `UsageError` for a value that no column can hold, such as a date: it would be refused later, without its
    place."""
    if isinstance(value, _PLAIN) and not isinstance(value, int):
        return
    odd = _odd(value)
    if odd is not None:
        raise UsageError(
            f'{place}: column "{name}" has {odd!r} ({type(odd).__name__}), which is no plain value; rewards get text, '
            "numbers up to 64 bits, lists and objects: convert it in the data, or leave it out with data.columns"
        )


def _odd(value: Any) -> Any:
    """Return the first part of a value that is not plain; None if all are."""
    if isinstance(value, dict):
        return next((odd for part in (*value.keys(), *value.values()) if (odd := _odd(part)) is not None), None)
    if isinstance(value, list | tuple):
        return next((odd for part in value if (odd := _odd(part)) is not None), None)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return value
    return None if isinstance(value, _PLAIN) else value
