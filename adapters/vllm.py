"""vLLM as a generator: its asynchronous engine, streaming, with weights read from a channel of the queue.

The engine's event loop runs in a thread of the adapter's own; every verb hands it a coroutine and waits. A change of
weights is: pause and keep what runs, load (`vllm_weights`), resume; running requests go on, their context computed anew.
vLLM itself says which version drew which token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue as queues
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

import transferqueue as tq
from transferqueue.adapters import vllm_plugin
from transferqueue.adapters.protocols import (
    GENERATE_S,
    PAUSE_S,
    Completion,
    Completions,
    Pause,
    Prompt,
    Sampling,
    TensorSpec,
    WeightSource,
)
from transferqueue.adapters.weights import ChannelWeights, check_fits
from transferqueue.errors import DeadlineExceeded, Disconnected, UsageError

T = TypeVar("T")

_RELAY: Final = "vllm"
"""Channel of the adapter's own queue, for weights that come from anywhere but a channel."""
_START_S: Final = 300.0


class VllmGenerator:
    """A generator (`protocols.Generator`) over vLLM's ``AsyncLLM``.

    model: a directory or name that vLLM loads. version: stamped on tokens of the weights that it is loaded with. engine:
    further arguments of ``AsyncEngineArgs``. Blocks while the engine starts (seconds to minutes). Prompts and completions
    are token ids; the tokenizer is not needed.
    """

    def __init__(self, model: str, *, version: int = 0, **engine: Any) -> None:
        vllm_plugin.register()
        arguments = {
            "model": model,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": {"backend": vllm_plugin.BACKEND},
            **engine,
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._ids = itertools.count()
        self._version = version
        self._wanted = checkpoint_specs(Path(model))
        self._channel: tuple[str, str] | None = None
        self._relay: tq.Queue | None = None
        self._relayed = -1
        self._paused = False
        self._closed = False
        try:
            self._engine, self._limit = self._wait(self._start(arguments), _START_S, "the engine did not start")
        except BaseException:
            self._stop_loop()
            raise

    async def _start(self, arguments: Mapping[str, Any]) -> tuple[AsyncLLM, int]:
        self._control = asyncio.Lock()
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        await engine.update_weight_version(str(self._version))
        return engine, engine.model_config.max_model_len

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be drawn with."""
        return self._version

    # ------------------------------------------------------------ completions

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, timeout_s: float = GENERATE_S) -> Completions:
        """Yield each completion when it is finished (`protocols.Generator.generate`)."""
        self._check(prompts, sampling)
        return self._generate(prompts, sampling, timeout_s)

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling, timeout_s: float) -> Completions:
        deadline = time.monotonic() + timeout_s
        finished: queues.SimpleQueue[Completion | BaseException] = queues.SimpleQueue()
        wanted = [(index, sample, prompt) for index, prompt in enumerate(prompts) for sample in range(prompt.samples)]
        running = self._submit(self._complete_all(wanted, sampling, finished))
        try:
            for _ in wanted:
                yield _next(finished, deadline, timeout_s)
        finally:
            running.cancel()

    async def _complete_all(
        self,
        wanted: Sequence[tuple[int, int, Prompt]],
        sampling: Sampling,
        finished: queues.SimpleQueue[Completion | BaseException],
    ) -> None:
        """Complete all at once; vLLM batches them. What is left when this is cancelled is aborted by vLLM."""

        async def one(index: int, sample: int, prompt: Prompt) -> None:
            finished.put(await self._complete(index, sample, prompt, sampling))

        try:
            async with asyncio.TaskGroup() as group:
                for each in wanted:
                    group.create_task(one(*each))
        except* EngineDeadError as dead:
            finished.put(Disconnected(f"the engine died: {dead.exceptions[0]}"))
        except* Exception as failures:  # noqa: BLE001  (raised where the completions are awaited)
            finished.put(failures.exceptions[0])

    async def _complete(self, index: int, sample: int, prompt: Prompt, sampling: Sampling) -> Completion:
        begun = prompt.begun
        ids = prompt.ids if begun is None else np.concatenate([prompt.ids, begun.ids])
        parameters = SamplingParams(
            max_tokens=sampling.tokens_max - (0 if begun is None else len(begun.ids)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_ids),
            seed=None if sampling.seed is None else _seed(sampling.seed, index, sample),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": ids.tolist()}
        async for output in self._engine.generate(request, parameters, f"tq-{next(self._ids)}"):
            if output.finished:
                return _completion(index, sample, begun, output.outputs[0])
        raise Disconnected("the engine ended a request without its last output")

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        if self._closed:
            raise Disconnected("the generator was closed")
        if not prompts:
            raise UsageError("generate was called with 0 prompts; give at least one")
        longest = max(len(prompt.ids) for prompt in prompts) + sampling.tokens_max
        if longest > self._limit:
            raise UsageError(
                f"a prompt with tokens_max={sampling.tokens_max} comes to {longest} tokens; the engine's max_model_len is {self._limit}"
            )
        for prompt in prompts:
            if prompt.begun is not None and len(prompt.begun.ids) >= sampling.tokens_max:
                raise UsageError(
                    f"a prompt was begun with {len(prompt.begun.ids)} tokens; tokens_max={sampling.tokens_max}"
                )

    # ------------------------------------------------------------ control

    def pause(self, mode: Pause, *, timeout_s: float = PAUSE_S) -> None:
        """Draw no token from the return on (`protocols.Generator.pause`)."""

        async def pause() -> None:
            async with self._control:
                await self._engine.pause_generation(mode=mode.value, clear_cache=True)
                self._paused = True

        try:
            self._wait(pause(), timeout_s, f"pause ({mode.value}) was not in force")
        except DeadlineExceeded:
            self.resume()
            raise

    def resume(self) -> None:
        """Go on."""
        if not self._closed:
            self._wait(self._resume(), PAUSE_S, "resume was not answered")

    async def _resume(self) -> None:
        async with self._control:
            await self._engine.resume_generation()
            self._paused = False

    def update_weights(self, source: WeightSource, version: int, *, timeout_s: float = PAUSE_S) -> None:
        """Load new weights between two tokens (`protocols.Generator.update_weights`).

        Weights of a channel (`weights.ChannelWeights`) are read by the workers where they lie; others are published once to
        a queue of the adapter's own.
        """
        check_fits(source, self._wanted)
        place, held = self._place(source, version)
        self._wait(
            self._update(place, held, version, timeout_s), timeout_s, f"weights of version {version} were not loaded"
        )
        self._version = version

    async def _update(self, place: tuple[str, str], held: int, version: int, timeout_s: float) -> None:
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
                    WeightTransferUpdateRequest({"version": held, "timeout_s": timeout_s})
                )
                await self._engine.finish_weight_update(str(version))
            finally:
                if not self._paused:
                    await self._engine.resume_generation()

    def _place(self, source: WeightSource, version: int) -> tuple[tuple[str, str], int]:
        """Where the workers find the weights: address and channel, and the version's number there."""
        if isinstance(source, ChannelWeights):
            return (source.address, source.channel), source.version
        if self._relay is None:
            self._relay = tq.connect(label="vllm relay")
        self._relayed += 1
        self._relay.weights(_RELAY, keep=1).publish(self._relayed, dict(source))
        return (self._relay.address, _RELAY), self._relayed

    def close(self) -> None:
        """Stop the engine and its processes."""
        if not self._closed:
            self._closed = True
            self._engine.shutdown()
            self._stop_loop()
            if self._relay is not None:
                self._relay.close()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------ the loop beside

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise Disconnected("the generator was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        waiting = self._submit(coroutine)
        try:
            return waiting.result(timeout_s)
        except TimeoutError as error:
            waiting.cancel()
            raise DeadlineExceeded(f"{what} after {timeout_s:g} s") from error
        except EngineDeadError as error:
            raise Disconnected(f"the engine died: {error}") from error


def _next(finished: queues.SimpleQueue[Completion | BaseException], deadline: float, timeout_s: float) -> Completion:
    try:
        found = finished.get(timeout=max(0.0, deadline - time.monotonic()))
    except queues.Empty as error:
        raise DeadlineExceeded(f"the request was not finished after {timeout_s:g} s") from error
    if isinstance(found, BaseException):
        raise found
    return found


def _completion(index: int, sample: int, begun: Completion | None, output: Any) -> Completion:
    ids = np.fromiter(output.token_ids, np.int32)
    logprobs = [
        position[token].logprob for position, token in zip(output.logprobs or (), output.token_ids, strict=True)
    ]
    spans = [
        (int(span.version), span.end - span.start) for span in output.weight_versions or () if span.end > span.start
    ]
    if begun is not None:
        ids, logprobs = np.concatenate([begun.ids, ids]), [*begun.logprobs, *logprobs]
        spans = _joined(begun.spans, spans)
        sample = begun.sample
    return Completion(
        prompt=index,
        sample=sample,
        ids=ids,
        logprobs=np.array(logprobs, np.float32),
        finish_reason=output.finish_reason,
        spans=tuple(spans),
    )


def _joined(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    if before and after and before[-1][0] == after[0][0]:
        return [*before[:-1], (after[0][0], before[-1][1] + after[0][1]), *after[1:]]
    return [*before, *after]


def _seed(seed: int, index: int, sample: int) -> int:
    """A seed for each completion: one for all of a prompt's samples would give them the same tokens."""
    return int(np.random.SeedSequence([seed, index, sample]).generate_state(1)[0])


def checkpoint_specs(directory: Path) -> dict[str, TensorSpec]:
    """Names and shapes of the tensors in a directory of safetensors files, read from their headers alone."""
    found: dict[str, TensorSpec] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = TensorSpec(tuple(entry["shape"]), entry["dtype"].lower())
    return found
