"""Passes the metrics of a run to a logger: TensorBoard, Weights & Biases, MLflow, or your own function.

- A logger is a function of a step and its metrics, ``log(step, {"reward": 0.5, ...})``.
- It runs in the supervisor, as part of the flow's `observe`; stages do not know it and never wait for it.
- It gets numbers: the finite values of the events that stages report per step. A mapping, such as a histogram of
  staleness, becomes one number for each of its keys: ``staleness/0``.
- A logger's library is loaded when the logger is created. No extra installs it.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from transferqueue.errors import NotFound, UsageError
from transferqueue.workflows.flow.events import Event, Figures

Observe = Callable[[str, Event], None]

STEP: Final = "step"
"""Kind of the metrics of a trainer step."""
EVALUATION: Final = "evaluation"
"""Kind of the metrics of an evaluation; logged at the step before it."""
DISPATCH: Final = "dispatch"
"""Kind of the metrics of a dispatcher, which works ahead of the trainer; logged at the trainer's latest step, as
``dispatch/NAME``."""
RANKER: Final = "ranker"
"""Kind of the metrics of a refit of the dispatcher's ranker; logged in the same way, as ``ranker/NAME``."""


class Logger(Protocol):
    """Stores metrics of steps. Called by one thread; steps ascend, and a step may come twice."""

    def __call__(self, step: int, figures: Mapping[str, float], /) -> None:
        """Store metrics of a step.

        Args:
            step: number of the step.
            figures: the metrics, by name.
        """


def logged(log: Logger, observe: Observe = lambda label, event: None) -> Observe:
    """Return an `observe` for a flow that passes each step and evaluation to a logger.

    Args:
        log: the logger.
        observe: is called with every event, too; default: does nothing.

    Example:
        >>> seen = []
        >>> hear = logged(lambda step, figures: seen.append((step, dict(figures))))
        >>> values = {"step": 3, "loss": 0.5, "staleness": {"0": 1, "1": 3}}
        >>> hear("train-0", Figures(kind="step", at=0.0, values=values))
        >>> seen
        [(3, {'loss': 0.5, 'staleness/0': 1.0, 'staleness/1': 3.0})]
    """
    last = 0

    def hear(label: str, event: Event) -> None:
        nonlocal last
        if isinstance(event, Figures) and event.kind in (STEP, EVALUATION):
            last = int(event.values.get("step", last))
            log(last, figures_of(event))
        elif isinstance(event, Figures) and event.kind in (DISPATCH, RANKER):
            log(last, {f"{event.kind}/{name}": value for name, value in figures_of(event).items()})
        observe(label, event)

    return hear


def figures_of(event: Figures) -> dict[str, float]:
    """Return the numbers of an event, under names with their origin."""
    within = f"{event.kind}/{event.values['when']}/" if "when" in event.values else ""
    figures: dict[str, float] = {}
    for name, value in event.values.items():
        if isinstance(value, Mapping):
            figures |= {f"{name}/{key}": number for key, number in value.items()}
        elif name != STEP:
            figures[f"{within}{name}"] = value
    return {name: float(value) for name, value in figures.items() if _number(value)}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def tensorboard(directory: Path) -> Generator[Logger]:
    """Write event files to `directory` by torch's writer, which needs the package tensorboard. Closed at the end."""
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
    """Log to a run of Weights & Biases. terms: arguments of ``wandb.init``, such as name, mode="offline", config.

    The run is finished at the end, as failed if the flow raised.
    """
    directory.mkdir(parents=True, exist_ok=True)
    run = _library("wandb", "wandb").init(project=project, dir=str(directory), **terms)
    failed = True
    try:
        yield lambda step, figures: run.log(dict(figures), step=step)
        failed = False
    finally:
        run.finish(exit_code=int(failed))


@contextmanager
def mlflow(directory: Path, **terms: Any) -> Generator[Logger]:
    """Log to a run of MLflow: of the server that MLFLOW_TRACKING_URI names, else of a database in `directory`. terms:
    arguments of ``mlflow.start_run``, such as run_name.

    The run is ended as failed if the flow raised.
    """
    library = _library("mlflow", "mlflow")
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        directory.mkdir(parents=True, exist_ok=True)
        library.set_tracking_uri(f"sqlite:///{directory.absolute()}/mlflow.db")
    with library.start_run(**terms):
        yield lambda step, figures: library.log_metrics(
            {_NO_METRIC.sub("_", name): value for name, value in figures.items()}, step=step
        )


_NO_METRIC: Final = re.compile(r"[^\w\-. /]")
"""Characters that a metric's name must not have in each version of MLflow."""


LOGGERS: Final = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
"""Loggers by name; each is called with the folder of a run."""


def logger_named(name: str) -> Callable[[Path], Any]:
    """Return a logger by its name: a context manager that is called with the folder of a run.

    Args:
        name: ``"tensorboard"``, ``"wandb"`` or ``"mlflow"``.

    Raises:
        NotFound: another name; the text lists the known ones.
    """
    if name not in LOGGERS:
        raise NotFound(f"logger {name!r} is unknown; there are {', '.join(LOGGERS)}")
    return LOGGERS[name]


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise UsageError(f"logging to {package} needs a package that is not here: pip install {package}") from missing
