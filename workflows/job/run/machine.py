"""What this machine has for a job: packages of its engines, environments and loggers, and GPUs. Looked at before the
start."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from shutil import which
from typing import Final

from transferqueue.errors import UsageError
from transferqueue.lazy import install_line
from transferqueue.workflows.flow.flow import threads_of_any
from transferqueue.workflows.job.devices.cores import THREADS, WAIT_POLICY, threads
from transferqueue.workflows.job.devices.placement import VISIBLE, FoundDevice, Placement
from transferqueue.workflows.job.settings.job import EngineKind, Job

_ENGINE_PACKAGES: Final[dict[EngineKind, tuple[str, str]]] = {
    "builtin": ("torch", "demo"),
    "transformers": ("torch", "train"),
    "vllm": ("vllm", "vllm"),
}
"""The module that a kind of engine imports, and the extra that installs it."""
_LOGGER_PACKAGES: Final = {name: name for name in ("tensorboard", "wandb", "mlflow")}
_LISTS: Final = "nvidia-smi"
_LIST_S: Final = 30.0
"""Longest time that it may take: with a broken driver it never ends."""
_QUERY: Final = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")


def check_packages(job: Job) -> None:
    """Raise `UsageError` if a package of an engine, an environment or a logger of the job, or Ray, is not installed.
    Imports nothing."""
    if job.on == "ray" and find_spec("ray") is None:
        raise UsageError(f'on="ray" needs ray, which is not installed here: {install_line("ray")}')
    for place, engine in enumerate(job.engine if job.algorithm.kind != "sft" else ()):
        module, extra = _ENGINE_PACKAGES.get(engine.kind, ("", ""))
        if module and find_spec(module) is None:
            raise UsageError(
                f'engine.{place}.kind="{engine.kind}" needs {module}, which is not installed here: '
                f"{install_line(extra)}, or set another kind"
            )
    for place, environment in enumerate(job.environment):
        if environment.url and find_spec("aiohttp") is None:
            raise UsageError(
                f"environment.{place}.url={environment.url!r} needs aiohttp, which is not installed here: "
                f"{install_line('http')}"
            )
    for logger in job.log.to:
        package = _LOGGER_PACKAGES.get(logger, "")
        if package and find_spec(package) is None:
            raise UsageError(
                f'log.to has "{logger}", which is not installed here: pip install {package}, or leave it out'
            )


def found_devices() -> list[FoundDevice]:
    """Return the GPUs that this process may use, as ``nvidia-smi`` lists them. Imports no torch. Empty on a machine
    without that program.

    Raises `UsageError` if it fails or takes longer than `_LIST_S`, or if ``CUDA_VISIBLE_DEVICES`` names a GPU that it
    does not list.
    """
    return _listed(os.environ.get(VISIBLE))


def gpu_bytes() -> list[int]:
    """Return the bytes of each GPU of this machine, also of those that this process does not see. Raises as
    `found_devices` does."""
    return [device.total for device in _listed(None)]


def _listed(visible: str | None) -> list[FoundDevice]:
    if (program := which(_LISTS)) is None:
        return []
    try:
        listed = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False, timeout=_LIST_S)
    except subprocess.TimeoutExpired as error:
        raise _unlisted(f"it did not end within {_LIST_S:g} s") from error
    if listed.returncode:
        raise _unlisted((listed.stderr or listed.stdout).strip()[:300])
    return devices_of(listed.stdout, visible)


def _unlisted(why: str) -> UsageError:
    return UsageError(f"{_LISTS}: {why}; repair the driver, or hide the program from PATH to run on the CPU")


def process_variables(job: Job, placement: Placement) -> dict[str, dict[str, str]]:
    """Return the variables of each process of the map, by label: its GPUs, and its threads unless the job or
    ``OMP_NUM_THREADS`` says those of all processes."""
    variables = placement.environments()
    if not job.threads and THREADS not in os.environ:
        given = {} if (policy := os.environ.get(WAIT_POLICY)) is None else {WAIT_POLICY: policy}
        for label, of_process in threads(placement.processes, job, len(os.sched_getaffinity(0))).items():
            variables[label] = variables.get(label, {}) | of_process | given
    return variables


def thread_line(job: Job, placement: Placement, processes: int) -> str:
    """Return how many threads each of so many processes has, for people."""
    if fixed := str(job.threads or os.environ.get(THREADS, "")):
        return f"threads: {fixed} in each process{'' if job.threads else f' ({THREADS})'}"
    found = process_variables(job, placement)
    shares = [f"{label} {of[THREADS]}" for label, of in found.items() if THREADS in of]
    return f"threads: {', '.join([*shares, f'of any other process {threads_of_any(processes)}'])}"


def devices_of(text: str, visible: str | None) -> list[FoundDevice]:
    r"""Return the GPUs of a list.

    Args:
        text: index, UUID, MiB of memory and MiB of free memory, a line for each GPU.
        visible: value of ``CUDA_VISIBLE_DEVICES``; None: every GPU.

    >>> [found.name for found in devices_of("0, GPU-a, 81559, 81000\n1, GPU-b, 81559, 80000", "1")]
    ['1']
    """
    listed: dict[str, FoundDevice] = {}
    for line in text.strip().splitlines():
        index, uuid, total, free = (cell.strip() for cell in line.split(","))
        listed |= {name: FoundDevice(name=name, total=int(total) << 20, free=int(free) << 20) for name in (uuid, index)}
    wanted = [name for name in listed if name.isdigit()] if visible is None else _names(visible)
    for name in wanted:
        if name not in listed:
            raise UsageError(
                f"{VISIBLE}={visible!r}: {_LISTS} does not list {name!r}; give indices or UUIDs of its GPUs"
            )
    return [listed[name] for name in wanted]


def _names(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
