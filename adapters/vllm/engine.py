"""A generator over vLLM's asynchronous engine: streaming, with weights read from a channel of the queue.

The engine's event loop runs in a background thread; every method submits a coroutine and waits for it. An update of
weights pauses the engine, keeps the running requests, loads the weights (`adapters.vllm.weights`) and resumes; running
requests continue with their context computed again. vLLM reports which version drew which token.

On a CPU, vLLM's processes get the variables `ON_CPU`. There vLLM (0.32) also dies of a request with a seed whose prompt
it computes in parts: torch's random numbers have no offset there. So prompts are computed whole by default, and where
the options say otherwise, no seed is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.system_utils import set_env_var
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from transferqueue.adapters.engines.completion import completed, context, seed_of, tokens_left
from transferqueue.adapters.engines.loop_engine import LoopEngine
from transferqueue.adapters.protocols import (
    PAUSE_S,
    Completion,
    Pause,
    Prompt,
    Sampling,
    WeightSource,
)
from transferqueue.adapters.vllm import plugin as vllm_plugin
from transferqueue.adapters.weights import WeightHandoff, check_fits, checkpoint_specs
from transferqueue.errors import Disconnected

T = TypeVar("T")

_START_S: Final = 300.0
ON_CPU: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of an engine's processes on a CPU, where they are not set. The engine has ``OMP_NUM_THREADS`` threads on
any core; vLLM would bind the threads of every engine of the machine to the same cores, and leave one core idle. Its
worker computes in the engine's process: one process less to start, and no copies between the two."""
ON_CPU_EAGER: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""A further one with ``enforce_eager``: vLLM would still compile functions of its sampler, with a C++ compiler, when
the first rows come."""


class VllmGenerator(LoopEngine):
    """A generator (`protocols.Generator`) over vLLM's ``AsyncLLM``, in this process.

    Blocks while the engine starts (seconds to minutes). Prompts and completions are token ids; no tokenizer is needed.
    On a GPU, with the option ``enable_sleep_mode``, it can `sleep`.

    Args:
        model: a directory or name that vLLM loads.
        version: of the weights that it loads at start; default 0.
        **engine: further arguments of ``AsyncEngineArgs``.

    Raises:
        DeadlineExceeded: the engine did not start within 300 s.
    """

    def __init__(self, model: str, *, version: int = 0, **engine: Any) -> None:
        vllm_plugin.register()
        arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": vllm_plugin.BACKEND},
            **engine,
        }
        if current_platform.is_cpu() and "max_num_batched_tokens" not in engine:
            arguments.setdefault("enable_chunked_prefill", False)
        super().__init__("vllm", version)
        self._control = asyncio.Lock()
        self._ids = itertools.count()
        self._wanted = checkpoint_specs(Path(model))
        self._channel: tuple[str, str] | None = None
        self._relay = WeightHandoff()
        self._paused = False
        self._takes_seeds = True
        self._sleeps = bool(engine.get("enable_sleep_mode")) and not current_platform.is_cpu()
        try:
            self._engine, self._context_max = self._wait(self._start(arguments), _START_S, "the engine did not start")
        except BaseException:
            self._beside.close()
            raise

    async def _start(self, arguments: Mapping[str, Any]) -> tuple[AsyncLLM, int]:
        with _variables(arguments):
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        await engine.update_weight_version(str(self._version))
        in_parts = engine.vllm_config.scheduler_config.enable_chunked_prefill
        self._takes_seeds = not (current_platform.is_cpu() and in_parts)
        return engine, engine.model_config.max_model_len

    async def _complete(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Completion:
        """Generate one completion; vLLM batches concurrent ones, and aborts one whose task is cancelled."""
        parameters = SamplingParams(
            max_tokens=tokens_left(prompt, sampling),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_ids),
            seed=seed_of(sampling, index, sample, prompt) if self._takes_seeds else None,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": context(prompt).tolist()}
        with _deaths():
            async for output in self._engine.generate(request, parameters, f"tq-{next(self._ids)}"):
                if output.finished:
                    return _completion(index, sample, prompt, output.outputs[0])
        raise Disconnected("the engine ended a request without its last output")

    # ------------------------------------------------------------ control

    def sleep(self) -> None:
        """Move the weights to host memory and free the key-value cache, until `wake`. Requests wait, and those that run
        are computed again. Does nothing without the option ``enable_sleep_mode``, and on a CPU.

        Raises:
            DeadlineExceeded: it took longer than 60 s.
        """
        if self._sleeps:
            self._wait(self._engine.sleep(level=1, mode="keep"), PAUSE_S, "the engine did not fall asleep")

    def wake(self) -> None:
        """Bring weights and cache back to the device.

        Raises:
            DeadlineExceeded: it took longer than 60 s.
        """
        if self._sleeps:
            self._wait(self._engine.wake_up(), PAUSE_S, "the engine did not wake")

    async def _pause(self, mode: Pause) -> None:
        async with self._control:
            await self._engine.pause_generation(mode=mode.value, clear_cache=True)
            self._paused = True

    async def _resume(self) -> None:
        async with self._control:
            await self._engine.resume_generation()
            self._paused = False

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Load new weights between two tokens (`protocols.Generator.update_weights`).

        The workers read weights of a channel (`weights.ChannelWeights`) directly; other weights are published once to
        a queue that this adapter embeds.
        """
        check_fits(source, self._wanted)
        place, version_there = self._relay.place(source)
        self._wait(
            self._update(place, version_there, version, timeout_s),
            timeout_s,
            f"weights of version {version} were not loaded",
        )
        self._version = version

    async def _update(self, place: tuple[str, str], version_there: int, version: int, timeout_s: float) -> None:
        async with self._control:
            if place != self._channel:
                address, channel = place
                await self._engine.init_weight_transfer_engine(
                    WeightTransferInitRequest({"address": address, "channel": channel})
                )
                self._channel = place
            if not self._paused:
                await self._engine.pause_generation(mode="keep", clear_cache=True)
            try:
                await self._engine.start_weight_update()
                await self._engine.update_weights(
                    WeightTransferUpdateRequest({"version": version_there, "timeout_s": timeout_s})
                )
                await self._engine.finish_weight_update(str(version))
            finally:
                if not self._paused:
                    await self._engine.resume_generation()

    def close(self) -> None:
        """Stop the engine and its processes."""
        if not self._beside.closed:
            self._engine.shutdown()
            self._beside.close()
            self._relay.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        with _deaths():
            return self._beside.wait(coroutine, timeout_s, what)


@contextmanager
def _variables(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Set the variables that an engine's processes inherit on a CPU, until the block ends."""
    wanted = ON_CPU | (ON_CPU_EAGER if arguments.get("enforce_eager") else {}) if current_platform.is_cpu() else {}
    with ExitStack() as stack:
        for name, value in wanted.items():
            if name not in os.environ:
                stack.enter_context(set_env_var(name, value))
        yield


@contextmanager
def _deaths() -> Iterator[None]:
    """Raise vLLM's error of a dead engine as one of ours."""
    try:
        yield
    except EngineDeadError as error:
        raise Disconnected(f"the engine died: {error}") from error


def _completion(index: int, sample: int, prompt: Prompt, output: Any) -> Completion:
    logprobs = [
        position[token].logprob for position, token in zip(output.logprobs or (), output.token_ids, strict=True)
    ]
    spans = [(int(span.version), span.end - span.start) for span in output.weight_versions or ()]
    return completed(index, sample, prompt, output.token_ids, logprobs, output.finish_reason, spans)
