"""The requirements of a job on this machine: packages of its engines and loggers, and devices. Checked before the
start."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from transferqueue.errors import NotFound, UsageError
from transferqueue.lazy import install_line
from transferqueue.workflows.job.settings.job import EngineKind, Job

_ENGINE_PACKAGES: Final[dict[EngineKind, tuple[str, str]]] = {
    "builtin": ("torch", "demo"),
    "transformers": ("torch", "train"),
    "vllm": ("vllm", "vllm"),
}
"""The module that a kind of engine imports, and the extra that installs it."""
_LOGGER_PACKAGES: Final = {name: name for name in ("tensorboard", "wandb", "mlflow")}
_CPU: Final = ("auto", "cpu")


def check_packages(job: Job) -> None:
    """Raise `UsageError` if a package of an engine or a logger of the job, or Ray, is not installed. Imports
    nothing."""
    if job.on == "ray" and find_spec("ray") is None:
        raise UsageError(f'on="ray" needs ray, which is not installed here: {install_line("ray")}')
    for place, engine in enumerate(job.engine if job.algorithm.kind != "sft" else ()):
        module, extra = _ENGINE_PACKAGES.get(engine.kind, ("", ""))
        if module and find_spec(module) is None:
            raise UsageError(
                f'engine.{place}.kind="{engine.kind}" needs {module}, which is not installed here: '
                f"{install_line(extra)}, or set another kind"
            )
    for logger in job.log.to:
        package = _LOGGER_PACKAGES.get(logger, "")
        if package and find_spec(package) is None:
            raise UsageError(
                f'log.to has "{logger}", which is not installed here: pip install {package}, or leave it out'
            )


def check_devices(job: Job) -> None:
    """Raise `UsageError` for a name that is no device, and `NotFound` for a device that this machine lacks. On Ray
    other machines compute, and none is looked for.

    Imports torch only if the job names a device other than the CPU.
    """
    for key, device in _devices(job) if job.on != "ray" else ():
        if device not in _CPU:
            _check_device(key, device)


def _devices(job: Job) -> Iterator[tuple[str, str]]:
    yield "trainer.device", job.trainer.device
    for key in ("reference", "critic", "teacher"):
        if (scorer := getattr(job, key)).path:
            yield f"{key}.device", scorer.device


def _check_device(key: str, device: str) -> None:
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            f'{key}={device!r} is no device; give "auto", "cpu" or "cuda", or "cuda:1" for the second'
        ) from error
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise NotFound(
            f'{key}={device!r}: this machine has {torch.cuda.device_count()} CUDA devices that torch sees; give "auto" '
            'or "cpu"'
        )
