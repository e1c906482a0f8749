"""Engines from a job's settings: `open_engine` makes the generator that an entry of ``engine`` names.

| kind | adapter | slots | weights |
|---|---|---|---|
| builtin | the same, over `adapters.builtin.BuiltinModel` | rows that run at once | copied into the module |
| transformers | `adapters.engines.TransformersGenerator` | rows that run at once | copied into the module |
| vllm | `adapters.vllm.VllmGenerator` | ``max_num_seqs`` | its workers read the channel |
| vllm_server | `adapters.vllm.VllmServer` | requests sent at once | its workers read the channel |
| sglang_server | `adapters.engines.SglangServer` | requests sent at once | files in a folder (``options.weights``) |
| openai | `adapters.engines.OpenAIGenerator` | requests sent at once | none: it serves version 0 for ever |
| factory | what ``factory`` returns | argument of the factory | `update_weights` of the generator |

``options`` are arguments of the engine itself: of ``from_pretrained`` for transformers, of ``EngineArgs`` for
vllm, of the adapter's class for servers, of the function for a factory. The built-in one has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from transferqueue.adapters.engines.images import VisionProcessor, give_processor
from transferqueue.adapters.protocols import Caches, Generator
from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.errors import UsageError, listing
from transferqueue.lazy import install_line
from transferqueue.workflows.job.data.tokenizer import revision_of
from transferqueue.workflows.job.devices.repeat import repeat_bits
from transferqueue.workflows.job.graph import is_colocated
from transferqueue.workflows.job.settings.job import EngineKind, EngineSettings, Job
from transferqueue.workflows.job.settings.sizes import lora_requests

_CPU_CACHE_BYTES: Final = 256 << 20
"""Key-value cache of vLLM on a machine without an accelerator, where its own default is gigabytes.
``options.kv_cache_memory_bytes`` sets another."""

BEGINNING: Final = -1
"""Version of the weights that an engine starts with, until it follows the job's channel."""


def open_engine(settings: EngineSettings, job: Job, *, place: int = 0) -> Generator:
    """Start the engine, or connect to it. Blocks while it starts (seconds to minutes). The caller closes it.

    place: of `settings` in ``job.engine``, for error texts. The engine has the weights of `model.path`, as version -1,
    until they are updated. It generates at most ``settings.slots`` completions at once. In a
    ``reproducible`` job the transformers engine keeps each request apart, so that its numbers repeat bit for bit.

    Raises `UsageError` for options that the engine does not take and for an engine that is not installed, and
    `PeerError` if a server does not answer.
    """
    key = f"engine.{place}"
    try:
        return _with_caches(_OPEN[settings.kind](settings, job, key), job, key)
    except ImportError as error:
        remedy = install_line(_EXTRA[settings.kind]) if settings.kind in _EXTRA else "install it"
        raise UsageError(
            f'{key}.kind="{settings.kind}" needs a package that is not installed here: {error}; {remedy}, or set '
            "another kind"
        ) from error
    except TypeError as error:
        raise UsageError(
            f"{key}.options={settings.options!r}: the engine takes other arguments: {error}; remove the options "
            "that it does not take"
        ) from error


def _with_caches(engine: Generator, job: Job, key: str) -> Generator:
    """Set what becomes of the engine's caches when weights change. `UsageError` for one that only computes them
    again."""
    kv, attributes = Caches(job.weights.kv), cast("Any", engine)
    if hasattr(engine, "kv"):
        attributes.kv = kv
    elif kv is not Caches.RECOMPUTE:
        engine.close()
        raise UsageError(
            f'weights.kv="{kv.value}" with {key}: {type(engine).__name__} has no attribute kv (protocols.Caches), so '
            'it computes caches again; set weights.kv="recompute"'
        )
    return engine


def model_directory(settings: EngineSettings, job: Job) -> str:
    """Return the directory of the engine's model; a model that is named by an id is looked up in (or loaded into) the
    local cache of the hub."""
    return _directory(settings.model or job.model.path, job)


def _directory(path: str, job: Job) -> str:
    if Path(path).expanduser().is_dir():
        return str(Path(path).expanduser())
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, revision=revision_of(job.model, path)))
    except (OSError, ValueError) as error:
        raise UsageError(f"model {path}: neither a directory here nor a model that the hub gives: {error}") from error


# ---------------------------------------------------------------- one function a kind


def _builtin(settings: EngineSettings, job: Job, key: str) -> Generator:
    from transferqueue.adapters.builtin.model import BuiltinModel

    if settings.options:
        raise TypeError(f"{listing(settings.options)} is none of them; it has none")
    return _in_this_process(BuiltinModel.from_pretrained(model_directory(settings, job)), settings, job)


def _transformers(settings: EngineSettings, job: Job, key: str) -> Generator:
    import transformers

    directory = model_directory(settings, job)
    options = {"dtype": job.model.dtype, "trust_remote_code": job.model.trust_remote_code, **settings.options}
    kind = transformers.AutoModelForImageTextToText if job.data.images else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, **options)
    if job.data.images:  # where the model is to be, since it reads an image
        give_processor(model.to(_device()), VisionProcessor(directory, trust_remote_code=job.model.trust_remote_code))
    return _in_this_process(model, settings, job)


def _device() -> str:
    """The GPU that this process sees, or the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _in_this_process(model: Any, settings: EngineSettings, job: Job) -> Generator:
    """Generate with `model` here."""
    from transferqueue.adapters.engines.transformers import TransformersGenerator

    repeat_bits(job)
    return TransformersGenerator(
        model.to(_device()),
        version=BEGINNING,
        rows_max=settings.slots,
        shared_batch=not job.reproducible,
        routes=job.algorithm.router_replay,
    )


def _vllm(settings: EngineSettings, job: Job, key: str) -> Generator:
    import torch

    from transferqueue.adapters.vllm.engine import VllmGenerator

    here: dict[str, Any] = (
        {"enable_sleep_mode": is_colocated(job)}
        if torch.cuda.is_available()
        else {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES}
    )
    arguments = {
        "dtype": job.model.dtype,
        "trust_remote_code": job.model.trust_remote_code,
        "tensor_parallel_size": settings.tensor_parallel,
        "max_num_seqs": settings.slots,
        "routes": job.algorithm.router_replay,
        **here,
        **lora_requests(settings, job),
        **settings.options,
    }
    return VllmGenerator(model_directory(settings, job), version=BEGINNING, **arguments)


def _vllm_server(settings: EngineSettings, job: Job, key: str) -> Generator:
    from transferqueue.adapters.vllm.server import VllmServer

    return VllmServer(settings.url, **_server_arguments(settings, job))


def _sglang_server(settings: EngineSettings, job: Job, key: str) -> Generator:
    from transferqueue.adapters.engines.sglang_server import SglangServer

    return SglangServer(settings.url, **_server_arguments(settings, job))


def _server_arguments(settings: EngineSettings, job: Job) -> dict[str, Any]:
    given = {"connections_max": settings.slots, **settings.options}
    return given if "checkpoint" in given else {"checkpoint": local_checkpoint(job), **given}


def _openai(settings: EngineSettings, job: Job, key: str) -> Generator:
    from transferqueue.adapters.engines.openai import OpenAIGenerator

    # An endpoint may be a vLLM on a CPU, which dies of seeds, and none says so.
    arguments = {"connections_max": settings.slots, "seeds": False, **settings.options}
    return OpenAIGenerator(settings.url, settings.model or job.model.path, **arguments)


def _factory(settings: EngineSettings, job: Job, key: str) -> Generator:
    """An engine of the user's own, of the weights `BEGINNING`."""
    made = load_callable(settings.factory, f"{key}.factory")(
        model_directory(settings, job), slots=settings.slots, **settings.options
    )
    if not isinstance(made, Generator):
        raise UsageError(
            f"{key}.factory={settings.factory!r} returned {type(made).__name__}, which is no generator "
            "(transferqueue.adapters.protocols.Generator); `transferqueue conformance generator` tests one"
        )
    return made


_OPEN: Final[Mapping[EngineKind, Callable[[EngineSettings, Job, str], Generator]]] = {
    "builtin": _builtin,
    "transformers": _transformers,
    "vllm": _vllm,
    "vllm_server": _vllm_server,
    "sglang_server": _sglang_server,
    "openai": _openai,
    "factory": _factory,
}
_EXTRA: Final[Mapping[EngineKind, str]] = {
    "builtin": "demo",
    "transformers": "train",
    "vllm": "vllm",
    "vllm_server": "http",
    "sglang_server": "http",
    "openai": "http",
}


def local_checkpoint(job: Job) -> str | None:
    """Return the directory of the job's model, against which new weights are checked before a server gets them. None:
    it is neither on this machine nor on the hub; then the directory that the server reports counts."""
    try:
        return _directory(job.model.path, job)
    except (UsageError, ImportError):
        return None
