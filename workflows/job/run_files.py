"""The names that checkpoints and models have in the folder of a run, and how `model.path` names them. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from transferqueue.errors import NotFound, UsageError
from transferqueue.transport.system.private_files import write_durably
from transferqueue.workflows.job import names

JOB: Final = "job.toml"
CHECKPOINTS: Final = "checkpoints"
"""Folder of a run that holds the checkpoints of each trainer."""
MODEL: Final = "model"
"""Folder of a finished run with the policy after its last step; of a run with adapters, merged."""
CONFIG: Final = "config.json"
STATE: Final = "state.json"
"""File of a checkpoint that describes it."""
STEPS: Final = "steps.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"
SAMPLES: Final = "samples.jsonl"
"""Responses as text, of a job that does not record its rows."""
STEP_ROWS: Final = "step_rows.jsonl"
"""For each step the rows in the order in which its trainer took them."""
SAMPLER: Final = "sampler.jsonl"
"""For each step its prompts, where `data.sampler` chooses them, and the pass rates that were new then."""
_FIRST_PROMPT: Final = "first-prompt"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTERS: Final = "adapter_model.safetensors"
_NAMED: Final = re.compile(r"step-(\d{8,})")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"step-{step:08}"


def checkpoint_steps(directory: Path) -> list[int]:
    """Return the steps of all complete checkpoints in `directory`, ascending."""
    if not directory.is_dir():
        return []
    named = (_NAMED.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(match.group(1)) for match in named if match)


def no_checkpoint(run: Path | str) -> NotFound:
    """The error for a run without a checkpoint."""
    return NotFound(
        f"the run in {run} has no checkpoint, and checkpoint.every says how often one is written; go on with "
        "the run (train --resume) until its first"
    )


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of figures. One that a killed process left unfinished is passed over."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def first_prompt(folder: Path | None) -> int:
    """Return the number of the first prompt of the run's table: 0, or of a run that went on with a new table, the
    number after those that it had trained."""
    path = None if folder is None else folder / _FIRST_PROMPT
    return int(path.read_text()) if path is not None and path.exists() else 0


def set_first_prompt(folder: Path, number: int) -> None:
    """Note it, durably: rows of the new table follow."""
    write_durably(folder / _FIRST_PROMPT, f"{number}\n".encode())


def model_directory(path: str) -> str:
    """Return the directory of the model that `path` names. A run stands for its policy: as it was written at the end,
    else in the newest checkpoint. Any other path stands for itself.

    Raises `NotFound` for a run without a checkpoint, `UsageError` for a directory of adapters alone.
    """
    place = Path(path).expanduser()
    if path and _is_run(place, CONFIG):
        if (place / MODEL).is_dir():
            return str(place / MODEL)
        path = str(place := _newest_checkpoint(place))
    if (place / ADAPTER_CONFIG).is_file() and not (place / CONFIG).is_file():
        raise UsageError(
            f"{path} has adapters alone: write the whole model by `transferqueue export RUN --merge OUT`, and give OUT"
        )
    return path


def adapter_directory(path: str) -> str:
    """Return the directory of the adapters that `path` names. A run stands for those of its newest checkpoint. Any
    other path stands for itself. Raises `NotFound` for a run without a checkpoint."""
    place = Path(path).expanduser()
    return str(_newest_checkpoint(place)) if _is_run(place, ADAPTER_CONFIG) else path


def _is_run(place: Path, config: str) -> bool:
    """Whether `place` is the folder of a run, and no directory with that configuration."""
    return (place / JOB).is_file() and not (place / config).is_file()


def _newest_checkpoint(run: Path) -> Path:
    directory = run / CHECKPOINTS / names.TRAIN
    if not (steps := checkpoint_steps(directory)):
        raise no_checkpoint(run)
    return checkpoint_path(directory, steps[-1])
