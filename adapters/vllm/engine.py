"""A generator over vLLM's engine in this process: streaming, with weights read from a channel of the queue.

A thread steps the engine (`engines.stepped`), so a request, a pause or new weights come in between two steps. An update
keeps the running requests: the workers load the weights (`adapters.vllm.weight_transfer`), and the requests go on with
their context computed again, or with the caches that they have (`kv`). vLLM reports which version drew which token.

With ``enable_lora``, adapters that a channel has beside its weights are not merged: each version becomes a LoRA request
of vLLM. Completions end with the adapters that they began with, and new ones get the newest. A batch has up to
``max_loras`` versions; vLLM lets the completions of further ones wait until those of one have ended.

On a CPU the engine's core computes in this process too: messages between two processes took as long as the tokens of a
small model. There vLLM (0.32) dies of a request with a seed whose prompt it computes in parts: torch's random numbers
have no offset there. So prompts are computed whole by default, and where the options say otherwise, no seed is sent.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.system_utils import set_env_var
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from transferqueue.adapters.engines.completion import completed, context, seed_of, tokens_left
from transferqueue.adapters.engines.stepped import SteppedGenerator, SteppedRequest
from transferqueue.adapters.protocols import Caches, Completion, Pause, Prompt, Sampling, Unsupported, WeightSource
from transferqueue.adapters.vllm import plugin as vllm_plugin
from transferqueue.adapters.vllm.weight_transfer import others_run, refused
from transferqueue.adapters.weights import ChannelWeights, WeightHandoff, check_fits, checkpoint_specs
from transferqueue.errors import Disconnected, SchemaError, TransferQueueError, UsageError
from transferqueue.transport.system.file_lock import FileLock, remove_unlocked

ON_CPU: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of an engine's processes on a CPU, where they are not set. The engine has ``OMP_NUM_THREADS`` threads on
any core; vLLM would bind the threads of every engine of the machine to the same cores, and leave one core idle. Core
and worker compute in this process: two processes less to start, and no messages between them."""
ON_CPU_EAGER: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""A further one with ``enforce_eager``: vLLM would still compile functions of its sampler, with a C++ compiler, when
the first rows come."""

_ROUTES: Final = "enable_return_routed_experts"
"""The argument with which vLLM returns the experts of each token."""
_OF_ROUTES: Final = ("routed", "aux_output", "auxiliary output", "model runner")
"""What a refusal of routes names: them, or the newer model runner, which nothing else asks for."""
_WITH_ROUTES: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Its newer model runner returns them, which it does not choose on a CPU without Triton."""
_FOLDER: Final = "transferqueue-lora-"
"""Begins the name of a folder for files of adapters; beside it lies its lock."""


@dataclass(frozen=True)
class _Adapters:
    """Adapters of a version, and the request by which vLLM knows them. Each load has a name, number and directory of
    its own, so vLLM confuses them with no earlier ones, nor with the caches that those wrote."""

    place: tuple[str, str]
    version: int
    request: LoRARequest


class _Row:
    """A completion that is being generated."""

    __slots__ = ("adapters", "index", "internal", "name", "owner", "prompt", "sample", "sampling")

    def __init__(self, owner: SteppedRequest, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> None:
        self.owner, self.index, self.sample, self.prompt, self.sampling = owner, index, sample, prompt, sampling
        self.name = self.internal = ""
        """Its ids of vLLM: outside and inside."""
        self.adapters: _Adapters | None = None
        """That all its tokens are drawn with; None: none, or merged ones."""


class _Batch:
    """All rows of an engine.

    Args:
        engine: of vLLM.
        takes_seeds: whether it can carry out requests with a seed.
        salt: returns that of the caches of new requests; "": none.
    """

    def __init__(self, engine: LLMEngine, *, takes_seeds: bool, salt: Callable[[], str]) -> None:
        self._engine, self._takes_seeds, self._salt = engine, takes_seeds, salt
        self.adapters: _Adapters | None = None
        """Of new rows."""
        self._rows: dict[str, _Row] = {}
        self._names = itertools.count()
        self._failure: BaseException | None = None

    def add(self, rows: Sequence[_Row]) -> None:
        """See `stepped.SteppedBatch`."""
        if self._failure is not None:
            raise Disconnected(f"the engine died: {self._failure}") from self._failure
        salt = self._salt()
        salted = {"cache_salt": salt} if salt else {}
        lora = None if self.adapters is None else self.adapters.request
        with _deaths():
            for row in rows:
                name = f"tq-{next(self._names)}"
                request = {"prompt_token_ids": context(row.prompt).tolist(), **salted}
                row.internal = self._engine.add_request(name, request, self._parameters(row), lora_request=lora)
                row.name, row.adapters, self._rows[name] = name, self.adapters, row

    def running(self) -> list[_Row]:
        """Rows that are unfinished."""
        return [*self._rows.values()]

    def _parameters(self, row: _Row) -> SamplingParams:
        sampling = row.sampling
        return SamplingParams(
            max_tokens=tokens_left(row.prompt, sampling),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_ids),
            seed=seed_of(sampling, row.index, row.sample, row.prompt) if self._takes_seeds else None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def cached_tokens(self) -> int:
        """See `stepped.SteppedBatch`."""
        found = 0
        for row in self._rows.values():
            if row.adapters is not None:  # an update leaves its cache as it is
                continue
            state = self._engine.output_processor.request_states.get(row.internal)
            drawn = 0 if state is None else state.detokenizer.num_output_tokens()
            found += state.prompt_len + drawn - 1 if drawn else 0
        return found

    def step(self, version: int) -> list[tuple[_Row, Completion]]:
        """See `stepped.SteppedBatch`. A step that fails is the engine's last."""
        try:
            with _deaths():
                return self._finished(self._engine.step())
        except BaseException as failure:
            self._failure = failure
            raise

    def take(self, request: SteppedRequest) -> list[tuple[_Row, Completion]]:
        """See `stepped.SteppedBatch`."""
        names = {row.internal: row for row in request.rows if row.name in self._rows}
        if not names:
            return []
        if self._failure is None:
            with suppress(EngineDeadError):
                self._engine.engine_core.abort_requests(list(names))
        ends = [EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT) for name in names]
        return self._finished(self._engine.output_processor.process_outputs(ends).request_outputs)

    def _finished(self, outputs: Sequence[Any]) -> list[tuple[_Row, Completion]]:
        ended = [output for output in outputs if output.finished and output.request_id in self._rows]
        rows = [self._rows.pop(output.request_id) for output in ended]
        return [(row, _completion(row, output.outputs[0])) for row, output in zip(rows, ended, strict=True)]


class VllmGenerator(SteppedGenerator):
    """A generator (`protocols.Generator`) over vLLM's ``LLMEngine``.

    Blocks while the engine starts (seconds to minutes). Prompts and completions are token ids; no tokenizer is needed.
    On a GPU the engine's core is a process of its own, and with the option ``enable_sleep_mode`` it can `sleep`.

    Args:
        model: a directory or name that vLLM loads.
        version: of the weights that it loads at start; default 0.
        routes: default False. True: completions have the experts that the model chose (`Completion.routes`).
        **engine: further arguments of ``EngineArgs``.

    Raises:
        Unsupported: `routes` of a vLLM or a model that gives none.
    """

    reads_channel: Final = True
    """Its workers read weights of a channel themselves (`adapters.weights.WeightUpdater`)."""

    def __init__(self, model: str, *, version: int = 0, routes: bool = False, **engine: Any) -> None:
        vllm_plugin.register()
        if routes and _ROUTES not in EngineArgs.__dataclass_fields__:
            raise Unsupported(
                f"this vLLM gives no routes of experts (EngineArgs has no {_ROUTES}): install 0.32 or newer, or "
                'generate with an engine of kind "transformers"'
            )
        arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": vllm_plugin.BACKEND},
            "disable_log_stats": True,
            **({_ROUTES: True} if routes else {}),
            **engine,
        }
        if current_platform.is_cpu() and "max_num_batched_tokens" not in engine:
            arguments.setdefault("enable_chunked_prefill", False)
        super().__init__("vLLM engine", version)
        self._wanted = checkpoint_specs(Path(model))
        self._channel: tuple[str, str] | None = None
        self._update_begun = False
        """Whether vLLM is in an update of weights, since the end of one failed."""
        self._relay = WeightHandoff()
        self._sleeps = bool(engine.get("enable_sleep_mode")) and not current_platform.is_cpu()
        with _variables(arguments, _WITH_ROUTES if routes else {}), _no_routes() if routes else nullcontext():
            options = EngineArgs(**arguments)
            if options.enable_lora and options.tensor_parallel_size * options.pipeline_parallel_size > 1:
                raise UsageError(
                    "enable_lora with several workers (tensor_parallel_size, pipeline_parallel_size), which take "
                    "merged weights: leave it out"
                )
            self._engine = LLMEngine.from_engine_args(options)
        self._engine.engine_core.set_weight_version(str(version))
        config = self._engine.vllm_config
        in_parts = config.scheduler_config.enable_chunked_prefill
        self._context_max = config.model_config.max_model_len
        self._several = config.parallel_config.world_size > 1
        """Whether there are several workers: then an error of one ends them."""
        lora = config.lora_config
        self._rank_max = 0 if lora is None else lora.max_lora_rank
        """Of adapters; 0: they are merged."""
        folder, lock = (None, None) if lora is None else _folder()
        self._folder: tempfile.TemporaryDirectory[str] | None = folder
        self._lock: FileLock | None = lock
        self._loads = 0
        """Number of updates that were begun: a version may come again, from another channel or trainer."""
        self._rows = _Batch(self._engine, takes_seeds=not (current_platform.is_cpu() and in_parts), salt=self._salt)

    def _row(self, request: SteppedRequest, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> _Row:
        return _Row(request, index, sample, prompt, sampling)

    def _batch(self, request: SteppedRequest) -> _Batch:
        return self._rows

    # ------------------------------------------------------------ control

    def sleep(self) -> None:
        """Move the weights to host memory and free the key-value cache, until `wake`. Requests wait, and those that run
        are computed again. Does nothing without the option ``enable_sleep_mode``, and on a CPU.

        Raises:
            DeadlineExceeded: it took longer than 60 s.
        """
        if self._sleeps:
            self.pause(Pause.KEEP)
            self._core("sleep", 1, "keep")

    def wake(self) -> None:
        """Bring weights and cache back to the device."""
        if self._sleeps:
            self._core("wake_up", None)
            self.resume()

    def _still(self, mode: Pause) -> None:
        self._core("pause_scheduler", "keep", False)

    def _going(self) -> None:
        self._core("resume_scheduler")

    def _salt(self) -> str:
        """Return what keeps new requests from caches of older weights; "": they may share them."""
        return f"load {self._loads}" if self.kv is Caches.SALT else ""

    def _core(self, call: str, *arguments: Any) -> Any:
        """Call the engine's core, in this process or in its own."""
        client = self._engine.engine_core
        with _deaths():
            if isinstance(client, InprocClient):
                return getattr(client.engine_core, call)(*arguments)
            return client.call_utility(call, *arguments)

    def _check(self, source: WeightSource) -> None:
        check_fits(source, self._wanted)
        if isinstance(source, ChannelWeights) and source.rank > self._rank_max > 0:
            raise SchemaError(
                f"version {source.version} has adapters of rank {source.rank}, and the engine takes those up to "
                f"max_lora_rank={self._rank_max}: open it with a larger one"
            )

    def _load(self, source: WeightSource, version: int, timeout_s: float) -> None:
        """The workers read weights of a channel (`weights.ChannelWeights`) directly; other weights are published once
        to a queue that this adapter embeds."""
        place, version_there = self._relay.place(source)
        self._loads += 1
        adapters, rows = self._adapters(source, place, version), self._rows.running()
        if any((row.adapters is None) is not (adapters is None) for row in rows):
            # vLLM (0.32) on a CPU draws rows without adapters with those of others in their batch.
            running, has = ("without", "some") if adapters else ("with", "none")
            raise SchemaError(
                f"requests run {running} adapters, and version {version} has {has}, which vLLM may confuse in a batch; "
                "pause(Pause.WAIT) first"
            )
        stays = bool(rows) and adapters is not None
        if stays and place != self._channel:
            raise SchemaError(others_run(version))
        update_info = {"version": version_there, "timeout_s": timeout_s, "stays": stays, "merged": not self._rank_max}
        try:
            with _deaths():
                if place != self._channel:
                    self._connect(place)
                self._fetch(update_info | {"adapters": adapters.request.lora_path if adapters else ""})
                if adapters is not None:
                    self._add(adapters, is_fetched=not stays)
                if not stays:
                    self._apply(version)
            self._rows.adapters = adapters
        finally:
            self._remove_unused()

    def _connect(self, place: tuple[str, str]) -> None:
        """The workers read this channel from now on, and hold nothing of the one before."""
        address, channel = place
        self._workers("init_weight_transfer_engine", init_info={"address": address, "channel": channel})
        self._channel = place

    def _add(self, adapters: _Adapters, *, is_fetched: bool) -> None:
        """Let vLLM read the adapters, before any weight changes. is_fetched: the workers hold a version to load."""
        try:
            self._engine.add_lora(adapters.request)
        except EngineDeadError:
            raise
        except Exception as error:
            if is_fetched:
                self._connect(adapters.place)  # so that the version is not held
            raise SchemaError(f"vLLM does not take the adapters of version {adapters.version}: {error}") from error

    def _fetch(self, update_info: Mapping[str, Any]) -> None:
        if not self._update_begun:
            self._workers("start_weight_update")
        self._update_begun = False  # an error of the next call ends vLLM's update
        with self._changing_weights() if self._several else nullcontext():
            try:
                self._workers("update_weights", update_info=dict(update_info))
            except Exception as error:
                if (refusal := refused(error)) is None:
                    raise
                raise refusal from error
        self._update_begun = True

    def _apply(self, version: int) -> None:
        """The workers load what they fetched, which takes adapters out of vLLM's memory until a request has them."""
        self._core("pause_scheduler", "keep", self.kv is Caches.RECOMPUTE)
        with self._changing_weights():
            self._workers("finish_weight_update")
            self._update_begun = False
            self._engine.engine_core.set_weight_version(str(version))
        if self._paused is None:
            self._going()

    def _adapters(self, source: WeightSource, place: tuple[str, str], version: int) -> _Adapters | None:
        """Return how vLLM is to know the adapters of a version; None: it has none, or they are merged."""
        if self._folder is None or not isinstance(source, ChannelWeights) or not source.rank:
            return None
        number = self._loads
        name, path = f"{place[1]} {version}, load {number}", str(Path(self._folder.name) / str(number))
        return _Adapters(place, version, LoRARequest(lora_name=name, lora_int_id=number, lora_path=path))

    def _remove_unused(self) -> None:
        """Remove the files of adapters that no request has: vLLM reads them again where it has no memory left."""
        used = {adapters.request.lora_path for row in self._rows.running() if (adapters := row.adapters)}
        used |= {self._rows.adapters.request.lora_path} if self._rows.adapters else set()
        for path in Path(self._folder.name).iterdir() if self._folder else ():
            if str(path) not in used:
                shutil.rmtree(path, ignore_errors=True)  # what is left goes with the folder

    def _workers(self, call: str, **arguments: Any) -> None:
        self._engine.collective_rpc(call, kwargs=arguments)

    def close(self) -> None:
        """Abort the running requests, and stop the engine and its processes."""
        if not self._closed:
            super().close()
            self._engine.engine_core.shutdown()
            self._relay.close()
            if self._folder is not None and self._lock is not None:
                self._folder.cleanup()
                self._lock.release()


def _folder() -> tuple[tempfile.TemporaryDirectory[str], FileLock]:
    """Return a folder for files of adapters, and its lock. Folders that killed processes left here are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*.lock"):
        if remove_unlocked(left):
            shutil.rmtree(left.with_suffix(""), ignore_errors=True)
    while True:
        folder = tempfile.TemporaryDirectory(prefix=_FOLDER)
        if (lock := FileLock(f"{folder.name}.lock")).take():
            return folder, lock
        folder.cleanup()  # another process just looked whether the lock is held


@contextmanager
def _variables(arguments: Mapping[str, Any], further: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that an engine's processes inherit on a CPU, and further ones, until the block ends."""
    wanted = ON_CPU | (ON_CPU_EAGER if arguments.get("enforce_eager") else {}) if current_platform.is_cpu() else {}
    with ExitStack() as stack:
        for name, value in {**wanted, **further}.items():
            if name not in os.environ:
                stack.enter_context(set_env_var(name, value))
        yield


@contextmanager
def _no_routes() -> Iterator[None]:
    """Raise vLLM's refusal of routes as one of ours."""
    try:
        yield
    except TransferQueueError:
        raise
    except ValueError as error:
        if not any(word in str(error).lower() for word in _OF_ROUTES):
            raise
        raise Unsupported(
            f"vLLM does not start with routes of experts: {error}; generate with an engine of kind "
            '"transformers", or leave algorithm.router_replay out'
        ) from error


@contextmanager
def _deaths() -> Iterator[None]:
    """Raise vLLM's error of a dead engine as one of ours."""
    try:
        yield
    except EngineDeadError as error:
        raise Disconnected(f"the engine died: {error}") from error


def _completion(row: _Row, output: Any) -> Completion:
    ids = output.token_ids
    logprobs = [position[token].logprob for position, token in zip(output.logprobs or (), ids, strict=True)]
    if row.adapters is not None:
        spans = [(row.adapters.version, len(ids))] if len(ids) else []
    else:
        spans = [(int(span.version), span.end - span.start) for span in output.weight_versions or ()]
    found = completed(row.index, row.sample, row.prompt, ids, logprobs, output.finish_reason, spans)
    # A row that was computed again, with newer weights, has the experts of both times: the last ones count.
    routes = output.routed_experts
    read = len(row.prompt.ids) + len(found.ids) - 1
    return found if routes is None else replace(found, routes=routes[max(0, len(routes) - read) :].astype(np.int16))
