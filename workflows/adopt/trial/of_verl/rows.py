"""The rows of a step of verl, in the order that the native job takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from transferqueue.errors import UsageError
from transferqueue.workflows.adopt.trial.compare import SideStep
from transferqueue.workflows.adopt.trial.side import carried

FIELDS: Final = ("prompts", "responses", "rm_scores", "advantages", "raw_prompt")
"""verl's fields of a row in the queue that are no columns of its data."""


def recorded(
    number: int, steps: int, keys: Sequence[str], rows: dict[str, list[Any]], figures: dict[str, float], prompt: str
) -> SideStep:
    """Return a step. Raises `UsageError` if it has no rows, or a column of the data that no message carries.

    Args:
        number: of the step, from 1.
        steps: of the whole run.
        keys: of its rows in the queue: ``PROMPT_SAMPLE_OUTPUT``.
        rows: by field, in the order of `keys`.
        figures: of verl, by our names.
        prompt: name of the column of prompts.
    """
    if not keys:
        raise UsageError(f"verl's step {number} has no rows, so there is nothing to compare")
    order = sorted(range(len(keys)), key=lambda place: _in_group(keys[place]))
    rows = {name: [values[place] for place in order] for name, values in rows.items()}
    groups = [_in_group(keys[place])[0] for place in order]
    first = [place for place, group in enumerate(groups) if group not in groups[:place]]
    columns = [name for name in rows if name not in FIELDS]
    return SideStep(
        step=number,
        figures={"reward": sum(map(sum, rows["rm_scores"])) / len(keys), **figures},
        prompts=rows["prompts"],
        rows=[
            (ids, advantages[0]) for ids, advantages in zip(rows["responses"], rows["advantages"], strict=True) if ids
        ],
        steps=steps,
        data=[
            {
                prompt: carried(prompt, rows["raw_prompt"][at]),
                **{name: carried(name, rows[name][at]) for name in columns},
            }
            for at in first
        ],
        completions=rows["responses"],
        advantages=rows["advantages"],
    )


def _in_group(key: str) -> tuple[str, int, int]:
    group, sample, output = key.rsplit("_", 2)
    return group, int(sample), int(output)
