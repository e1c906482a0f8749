"""The rollout stage with a real engine: the job's transformer, saved as a Llama, served by vLLM or transformers.

Weights change in flight: a thread beside the engine waits for the next version and loads it while completions are
generated. Generation never stops for an update, and a row may have tokens of two versions.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import transferqueue as tq
from transferqueue.adapters.protocols import Generator, PartialResult, Sampling, WeightSource
from transferqueue.adapters.stages.generation import Generate
from transferqueue.adapters.weights import WeightUpdater
from transferqueue.errors import PeerError
from transferqueue.workflows.flow.events import WEIGHTS
from transferqueue.workflows.flow.stage import STALL_S, Context, Work
from transferqueue.workflows.grpo.job import POLICY, JobSettings
from transferqueue.workflows.grpo.model.llama import save_llama
from transferqueue.workflows.grpo.model.tokenizer import EOS_ID
from transferqueue.workflows.grpo.stages.model_stages import UPDATE_S, Policy, tokens_max

_FOLLOW_S: Final = 3600.0
"""Longest wait for one version; then the thread waits again. It ends with the session."""


def vllm(directory: Path, version: int) -> Generator:
    """Serve a small model by vLLM's asynchronous engine: on a CPU, one thread, float32."""
    from transferqueue.adapters.vllm.engine import VllmGenerator

    return VllmGenerator(
        str(directory),
        version=version,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=128,
        kv_cache_memory_bytes=64 << 20,
    )


def transformers(directory: Path, version: int) -> Generator:
    """The same model by transformers, in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    from transferqueue.adapters.engines.transformers import TransformersGenerator

    torch.set_num_threads(1)
    return TransformersGenerator(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), version=version)


ENGINES: Final[Mapping[str, Callable[[Path, int], Generator]]] = {"vllm": vllm, "transformers": transformers}


@contextmanager
def rollout(context: Context) -> Iterator[Work]:
    """Factory of ``rollout``: waits for the first weights, starts the engine with them, and generates."""
    settings = context.settings(JobSettings)
    policy = Policy(settings.learning, context.queue.weights(POLICY))
    policy.refresh(timeout_s=STALL_S)
    sampling = Sampling(
        tokens_max=tokens_max(settings.learning), temperature=settings.learning.temperature, stop_ids=(EOS_ID,)
    )
    with tempfile.TemporaryDirectory(prefix="transferqueue-model-") as directory, context.span("engine start"):
        engine = ENGINES[settings.engine](save_llama(policy.model, Path(directory)), policy.version)
    generate = Generate(
        engine,
        sampling,
        token_versions=settings.in_parts,
        budget=settings.partial,
        max_staleness=settings.max_staleness,
    )
    with closing(engine), _following(context, engine, policy.version) as check:

        def work(batch: tq.Batch) -> Iterator[PartialResult]:
            check()
            yield from generate(batch)

        yield work


class _StageOver(Exception):
    """A version arrived after the end of the stage."""


@contextmanager
def _following(context: Context, engine: Generator, version: int) -> Iterator[Callable[[], None]]:
    """Update weights in flight until the block ends. Yields a check that raises the error that ended the updates, if any.

    Leaving waits for an update that has begun: a thread inside an engine's C++ code aborts the process when Python ends.
    """

    def update(source: WeightSource, new: int) -> None:
        with updating:
            if ended.is_set():
                raise _StageOver
            with context.span(WEIGHTS, new):
                engine.update_weights(source, new)

    def follow() -> None:
        try:
            while not ended.is_set():
                follower.follow(_FOLLOW_S)
        except (PeerError, _StageOver):
            return  # the queue is closed, or the stage is over
        except Exception as failure:  # noqa: BLE001  (raised by the check)
            failures.append(failure)

    def check() -> None:
        if failures:
            raise failures[0]

    failures: list[Exception] = []
    ended, updating = threading.Event(), threading.Lock()
    follower = WeightUpdater(context.queue, POLICY, update, version)
    threading.Thread(target=follow, name="weights", daemon=True).start()
    try:
        yield check
    finally:
        ended.set()
        if updating.acquire(timeout=UPDATE_S):  # an update that hangs longer ends with the process
            updating.release()  # one that begins now sees that the stage is over
