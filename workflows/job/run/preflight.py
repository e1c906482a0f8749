"""Checks of a job's files before it starts: packages, models, data, rewards, memory.

Rules that need no file: `transferqueue.workflows.job.settings.rules`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import transferqueue as tq
from transferqueue.adapters.builtin import is_builtin
from transferqueue.adapters.protocols import Unsupported
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.errors import Impossible, NotFound, PeerError, Unreachable, UsageError, listing
from transferqueue.workflows.job.data.prompt_data import PromptData, open_all
from transferqueue.workflows.job.data.sampler import BY_RATE
from transferqueue.workflows.job.data.source import groups_per_put
from transferqueue.workflows.job.data.tokenizer import TextTokenizer, class_environment, revision_of
from transferqueue.workflows.job.devices.cores import THREADS
from transferqueue.workflows.job.devices.device_bytes import NUMBER_BYTES
from transferqueue.workflows.job.devices.model_sizes import (
    is_model_id,
    layer_names,
    model_sizes,
    positions_of,
    why_not_in_hub,
)
from transferqueue.workflows.job.devices.placement import FoundDevice, Placement, device_map
from transferqueue.workflows.job.devices.repeat import REPEATING
from transferqueue.workflows.job.graph import stage_jobs
from transferqueue.workflows.job.run.machine import check_packages, found_devices
from transferqueue.workflows.job.run.on_ray import check_options, cluster_devices, is_placed_by_options
from transferqueue.workflows.job.settings.job import Job
from transferqueue.workflows.job.settings.rules import LOGGERS
from transferqueue.workflows.job.settings.sizes import (
    GIB,
    gib,
    group_rows,
    play_bytes,
    row_bytes,
    rows_kept,
    tokens_of_row,
    versions_kept,
)
from transferqueue.workflows.job.stages.rollout import stop_id

QUEUE_S: Final = 10.0
"""Longest wait for the server of ``queue.address``, or of an engine, to answer."""
_CONFIG: Final = "config.json"
_ROUTE_BYTES: Final = 2
"""Bytes of one chosen expert in the column `routes`."""


@dataclass(frozen=True, kw_only=True)
class JobBytes:
    """Most bytes that a job holds in its queue: one row without its images, all rows, of these the images, one version
    of the weights (0: not known before the model is loaded), and all kept versions."""

    row: int
    rows: int
    images: int
    version: int
    weights: int
    memory: int

    @property
    def total(self) -> int:
        """Rows and weights."""
        return self.rows + self.weights


def preflight(job: Job, *, code: Path | None = None) -> PromptData:
    """Check a job with its files and return its opened data. code: folder whose modules rewards may name.

    Imports the modules of reward functions, and loads the tokenizer. Raises `NotFound` for a model, a data file or a
    column that is missing, `UsageError` for data that makes no prompts and for packages that are not
    installed, `Impossible` for weights that do not fit into the memory of the queue.
    """
    check_packages(job)
    import_from(code)
    for key, path in _models(job):
        check_model(key, path)
        if not key.startswith("reward"):  # their tokens are their own
            check_positions(job, key, path)
    _check_builtin(job)
    check_routes(job)
    _check_targets(job)
    for key, named in _names(job):
        if named:
            load_callable(named, key)
    for key, path in _models(job):
        check_id(key, path, _revision(job, path))
    _check_resume(job.checkpoint.resume)
    data, held_out = open_all(job)
    for opened in (data, *held_out):
        opened.check_first()
    _check_stops(job, data.renderer.tokenizer)
    check_memory(job, data)
    return data


def placement_of(job: Job, *, site: str = "", devices: Sequence[FoundDevice] | None = None) -> Placement:
    """Return which process of a resolved job computes on which GPU.

    site: whose engines are placed ("": the processes at the job's own). devices: the GPUs; None: those of this
    machine, or with ``on = "ray"`` those of the cluster, which this process joins. A process for which ``ray.options``
    says where it is to be is not placed. Raises as `device_map` and `found_devices` do.
    """
    if job.on == "ray":
        check_options(job, stage_jobs(job, site=site))
    if devices is None:
        devices = cluster_devices() if job.on == "ray" else found_devices()
    processes = [process for process in stage_jobs(job, site=site) if not is_placed_by_options(job, process)]
    sizes = {path: model_sizes(path, _revision(job, path)) for _, path in _models(job)}
    return device_map(job, processes, devices, sizes)


def counted_models(job: Job) -> list[str]:
    """Return the models whose parameters are an estimate, a line for people for each."""
    lines = []
    for key, path in _models(job):
        sizes = model_sizes(path, _revision(job, path))
        if sizes is not None and sizes.is_counted:
            lines.append(
                f"{key}={path!r}: about {sizes.parameters:,} parameters, counted from its config.json as those of a "
                "decoder of Llama's form"
            )
    return lines


def check_queue(address: str) -> None:
    """Raise `UsageError` or `PeerError` if nothing answers at the address of ``queue.address`` ("": the job has a
    server of its own)."""
    if not address:
        return
    try:
        tq.connect(address, timeout_s=QUEUE_S, label="preflight").close()
    except PeerError as error:
        raise Unreachable(
            f'queue.address="{address}": {error}; start a server there (transferqueue serve), or leave it out: the run '
            "then starts its own"
        ) from error


def check_servers(job: Job) -> None:
    """Raise `Unreachable` if nothing accepts connections at the `url` of an engine or an environment. Those of other
    sites, and of a cluster, are asked there."""
    for key, url in _servers(job):
        address = urlsplit(url)
        try:
            port = address.port or (443 if address.scheme in ("https", "wss") else 80)
            socket.create_connection((address.hostname or "", port), QUEUE_S).close()
        except (OSError, ValueError) as error:
            raise Unreachable(
                f"{key}.url={url!r}: nothing accepts connections there: {error}; start the server, or give the address "
                "of one that runs"
            ) from error


def _servers(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the servers that processes on this machine use, by their tables."""
    is_asked = job.algorithm.kind != "sft" and job.on != "ray"
    here = {f"engine.{at}": engine for at, engine in enumerate(job.engine) if is_asked and not engine.site}
    for key, engine in here.items():
        if engine.url:
            yield key, engine.url
    for place, environment in enumerate(job.environment if here else ()):
        if environment.url:
            yield f"environment.{place}", environment.url


def _check_resume(path: str) -> None:
    if path and not Path(path).is_dir():
        raise NotFound(
            f"checkpoint.resume={path!r}: there is no such directory; give a run's folder or a checkpoint step-N, or "
            "leave it out"
        )


def _check_stops(job: Job, tokenizer: TextTokenizer) -> None:
    for text in job.sampling.stop:
        stop_id(tokenizer, text)


def _names(job: Job) -> Iterator[tuple[str, str]]:
    """Yield what the job names by text to be imported, by its key. It is checked before what takes longer."""
    for place, name in enumerate(job.log.to):
        yield f"log.to.{place}", "" if name in LOGGERS else name
    yield "data.sampler.by", "" if job.data.sampler.by == BY_RATE else job.data.sampler.by
    for reward in job.reward:
        yield "reward.function", reward.function
    for place, environment in enumerate(job.environment):
        for key in ("factory", "function", "agent"):
            yield f"environment.{place}.{key}", getattr(environment, key)
    for place, engine in enumerate(job.engine):
        yield f"engine.{place}.factory", engine.factory


def import_from(code: Path | None) -> None:
    """Let this process import modules of the folder `code`, and of the current one, as the processes of the job do."""
    for folder in (Path.cwd(), code):
        if folder is not None and str(folder.absolute()) not in sys.path:
            sys.path.insert(0, str(folder.absolute()))


def shared_variables(job: Job, tokenizer: TextTokenizer, code: Path | None) -> dict[str, str]:
    """Return the variables of all processes of a job.

    tokenizer: of the job. code: as of `importable`.
    """
    variables = importable(code) | class_environment(job.model, tokenizer)
    if job.reproducible:
        variables |= REPEATING
    if job.threads:
        variables[THREADS] = str(job.threads)
    return variables


def importable(code: Path | None) -> dict[str, str]:
    """Return the variables of a process that may import modules of the folder `code`."""
    if code is None:
        return {}
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(code.absolute()), before)))}


def check_model(key: str, path: str) -> None:
    """Raise `NotFound` for a path that is no directory of a model. An id of the hub is not looked at."""
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / _CONFIG).is_file():
        raise NotFound(f"{key}={path!r}: the directory has no {_CONFIG}; give one that save_pretrained wrote")
    if not folder.is_dir() and not is_model_id(path):
        raise NotFound(f"{key}={path!r}: there is no such directory")


def check_id(key: str, path: str, revision: str = "") -> None:
    """Raise `NotFound` for an id, in a revision, that neither the hub nor its cache has. Blocks while the hub is asked,
    a few seconds at most."""
    if why := why_not_in_hub(path, revision):
        raise NotFound(
            f"{key}={path!r}: there is no such directory, and the hub and its cache have no such model ({why}); give "
            "the directory of a model, the folder of a run, or an id of the hub"
        )


def check_positions(job: Job, key: str, path: str) -> None:
    """Raise `Impossible` if the longest row has more tokens than a model has positions."""
    positions, longest = positions_of(path, _revision(job, path)), tokens_of_row(job)
    if 0 < positions < longest:
        raise Impossible(
            f"{key}={path!r} has {positions:,} positions, and a row up to prompt_tokens_max="
            f"{job.data.prompt_tokens_max} + tokens_max={job.sampling.tokens_max} = {longest:,} tokens: set "
            f"sampling.tokens_max or data.prompt_tokens_max so that both are at most {positions}, or give a model with "
            "more positions"
        )


def _check_builtin(job: Job) -> None:
    for place, engine in enumerate(job.engine if job.algorithm.kind != "sft" else ()):
        path = engine.model or job.model.path
        if engine.kind == "builtin" and not is_builtin(path):
            raise UsageError(
                f'engine.{place}.kind="builtin" with the model {path!r}, which is no built-in one; set '
                'kind="transformers" or "vllm"'
            )


def check_routes(job: Job) -> None:
    """Raise `Unsupported` for vLLM on this machine's CPU: it gives routes by its newer model runner alone, which needs
    Triton. Engines of other sites, and of a cluster, say so when they start."""
    if not job.algorithm.router_replay or job.on == "ray":
        return
    here = [f"engine.{place}" for place, engine in enumerate(job.engine) if engine.kind == "vllm" and not engine.site]
    if here and not found_devices():
        raise Unsupported(
            f'router_replay=true with {here[0]}.kind="vllm", and no GPU: on a CPU vLLM gives no routes of experts; set '
            'kind="transformers", or leave algorithm.router_replay out'
        )


def _check_targets(job: Job) -> None:
    layers = layer_names(job.model.path)
    for target in job.trainer.lora_targets if layers else ():
        if target not in layers:
            raise NotFound(
                f"trainer.lora_targets has {target!r}, and {job.model.path} no such layer; it has "
                f"{listing(sorted(layers))}"
            )


def bytes_of(job: Job, data: PromptData | None = None) -> JobBytes:
    """Return the most bytes that the job holds in its queue. data: its prompts, whose images are counted: of the rows
    that are kept, and of a put, which finds room only in one piece."""
    sizes = model_sizes(job.model.path, job.model.revision)
    version = sizes.parameters * NUMBER_BYTES[job.weights.dtype] if sizes else 0
    kept = version * (versions_kept(job) + 1)  # one more while a version is being published
    replayed = sizes.layers * sizes.chosen_experts if sizes and job.algorithm.router_replay else 0
    row = row_bytes(job, route_bytes=_ROUTE_BYTES * replayed)
    images = 0
    if data is not None and job.data.images:
        images = data.image_bytes(job.data.images, rows_kept(job) // group_rows(job) + groups_per_put(job))
    return JobBytes(
        row=row,
        rows=rows_kept(job) * row + images + play_bytes(job),
        images=images,
        version=version,
        weights=kept,
        memory=int(job.queue.memory_gib * GIB),
    )


def check_memory(job: Job, data: PromptData | None = None) -> None:
    """Raise `Impossible` if rows and kept versions of the weights have no room, with the arithmetic. data: as of
    `bytes_of`."""
    held = bytes_of(job, data)
    if job.algorithm.kind != "sft" and held.total > held.memory:
        images = f", and images up to {gib(held.images)}" if held.images else ""
        raise Impossible(
            f"weights.keep={versions_kept(job)} and one more being published are {gib(held.weights)}, rows up to "
            f"{gib(held.rows)} ({held.row:,} bytes each{images}); memory_gib={job.queue.memory_gib:g}: set "
            f"queue.memory_gib={-(-held.total // GIB)}"
        )


def _revision(job: Job, path: str) -> str:
    return revision_of(job.model, path) or ""


def _models(job: Job) -> Iterator[tuple[str, str]]:
    yield "model.path", job.model.path
    for key in ("reference", "critic", "teacher"):
        if path := getattr(job, key).path:
            yield f"{key}.path", path
    for place, reward in enumerate(job.reward):
        if reward.model:
            yield f"reward.{place}.model", reward.model
    for place, engine in enumerate(job.engine):
        if engine.model and not engine.url:
            yield f"engine.{place}.model", engine.model
