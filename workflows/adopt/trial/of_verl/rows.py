"""The rows of a step of verl, in the order that the native job takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from transferqueue.workflows.adopt.trial.compare import SideStep

FIELDS: Final = ("prompts", "responses", "rm_scores", "advantages", "raw_prompt")
"""verl's fields of a row in the queue that are no columns of its data."""


def recorded(
    number: int, steps: int, keys: Sequence[str], rows: dict[str, list[Any]], figures: dict[str, float], prompt: str
) -> SideStep:
    """Return a step.

    Args:
        number: of the step, from 1.
        steps: of the whole run.
        keys: of its rows in the queue: ``PROMPT_SAMPLE_OUTPUT``.
        rows: by field, in the order of `keys`.
        figures: of verl, by our names.
        prompt: name of the column of prompts.
    """
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
        data=[{prompt: rows["raw_prompt"][at], **{name: rows[name][at] for name in columns}} for at in first],
        completions=rows["responses"],
    )


def _in_group(key: str) -> tuple[str, int, int]:
    group, sample, output = key.rsplit("_", 2)
    return group, int(sample), int(output)
