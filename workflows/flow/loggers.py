"""Figures of a run, handed on to whoever keeps them: TensorBoard, Weights & Biases, or a function of your own.

The law:

- A logger is one function of a step and its figures, ``log(step, {"reward": 0.5, ...})``. Nothing else is asked of it.
- It hangs on the flow's `observe`, in the supervisor: no stage knows of it, and none waits for it.
- What it is told are numbers: of the events that stages report per step, those that are finite. Of rows by versions behind it
  is told the mean, as ``staleness``; of the ages of queues one number a task.
- The libraries are loaded when their logger is made, and are in no extra: who logs has them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.events import Event, Figures

Observe = Callable[[str, Event], None]

STEP: Final = "step"
"""Kind of the figures of one trainer step."""
EVALUATION: Final = "evaluation"
"""Kind of the figures of an evaluation; it is logged at the step before it."""


class Logger(Protocol):
    """Keeps figures of steps. Called by one thread; steps ascend, and one may come twice."""

    def __call__(self, step: int, figures: Mapping[str, float], /) -> None:
        """Keep `figures` of `step`."""


def logged(log: Logger, observe: Observe = lambda label, event: None) -> Observe:
    """An `observe` for a flow that tells `log` of each step and evaluation, and `observe` of every event.

    >>> seen = []
    >>> hear = logged(lambda step, figures: seen.append((step, dict(figures))))
    >>> hear("train-0", Figures(kind="step", at=0.0, values={"step": 3, "loss": 0.5, "staleness": {"0": 1, "1": 3}}))
    >>> seen
    [(3, {'loss': 0.5, 'staleness': 0.75})]
    """
    last = 0

    def hear(label: str, event: Event) -> None:
        nonlocal last
        if isinstance(event, Figures) and event.kind in (STEP, EVALUATION):
            last = int(event.values.get("step", last))
            log(last, figures_of(event))
        observe(label, event)

    return hear


def figures_of(event: Figures) -> dict[str, float]:
    """The numbers of an event, by names that say where they are from."""
    within = f"{event.kind}/{event.values['when']}/" if "when" in event.values else ""
    found: dict[str, float] = {}
    for name, value in event.values.items():
        if name == "staleness":
            found[name] = mean_staleness(value)
        elif isinstance(value, Mapping):
            found |= {f"{name}/{one}": number for one, number in value.items()}
        elif name != STEP:
            found[f"{within}{name}"] = value
    return {name: float(value) for name, value in found.items() if _number(value)}


def mean_staleness(rows: Mapping[str, int]) -> float:
    """Mean of the versions behind, of rows counted by them; 0 of none."""
    return sum(int(versions) * count for versions, count in rows.items()) / max(1, sum(rows.values()))


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def tensorboard(directory: Path) -> Generator[Logger]:
    """Event files in `directory`, by torch's writer, which needs the package tensorboard. Closed at the end."""
    writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(log_dir=str(directory))

    def log(step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def wandb(directory: Path, *, project: str = "transferqueue", **terms: Any) -> Generator[Logger]:
    """A run of Weights & Biases. terms: as of ``wandb.init``, such as name, mode="offline", config. Finished at the end, as
    failed if the flow raised."""
    directory.mkdir(parents=True, exist_ok=True)
    run = _library("wandb", "wandb").init(project=project, dir=str(directory), **terms)
    failed = True
    try:
        yield lambda step, figures: run.log(dict(figures), step=step)
        failed = False
    finally:
        run.finish(exit_code=int(failed))


LOGGERS: Final = {"tensorboard": tensorboard, "wandb": wandb}
"""Loggers by name: each is given the folder of a run."""


def logger_named(name: str) -> Callable[[Path], Any]:
    """One of `LOGGERS`; `NotFound` says which there are."""
    if name not in LOGGERS:
        raise NotFound(f"logger {name!r} is unknown; there are {', '.join(LOGGERS)}")
    return LOGGERS[name]


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise UsageError(f"logging to {package} needs a package that is not here: pip install {package}") from missing
