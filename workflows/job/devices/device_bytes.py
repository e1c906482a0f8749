"""The bytes that one process takes on each of its devices, by arithmetic. No torch here.

With P parameters of the model, and n bytes of a number of the named dtype:

| process | weights | gradients | moments | copies | activations | KV cache |
|---|---|---|---|---|---|---|
| trainer | P · n(master) | P · 4 | 2 · P · n(master) | P · n(model), under autocast | all layers, `micro_tokens` | – |
| scorer | P · n(model) | – | – | – | one layer, or the logits, of `tokens` | – |
| engine | P · n(model) | – | – | – | one layer of prompts, or a second cache | `slots` of the longest row |

Weights, gradients and moments are exact. A rank of ``fsdp2`` has its share of them, from loading on, and two layers
whole in place of all copies. Under LoRA only the adapters have gradients and moments. Activations are an estimate for a
decoder of Llama's form whose attention keeps no scores; a trainer in float32 also has a mask of its longest response.
What comes once they are freed stands in their place if it is more: the step's own gradient where weights are not
float32, and the optimizer's temporary tensors. vLLM takes its share of the device for all three.
`tests/workflows/job/test_device_bytes.py` compares with what torch holds on a CPU.

A trainer and an engine that use a device in turn (mode ``colocated``) hold what stays of both, and the larger of what
each adds in its turn: the trainer keeps weights and moments; an engine keeps its weights, but for vLLM, which sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from transferqueue.adapters.scoring.batching import PATHS_MAX
from transferqueue.workflows.job.devices.model_sizes import ModelSizes
from transferqueue.workflows.job.settings.job import EngineSettings, Job
from transferqueue.workflows.job.settings.sizes import batch_rows, tokens_of_row

CACHE: Final = "kv_cache_memory_bytes"
"""Option of vLLM: bytes of its KV cache on each device."""
TURN: Final = "in turn"
"""Part of a trainer and an engine that use a device in turn: of the one that adds more."""
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES: Final = 1 << 29
"""Context and libraries of a process on a GPU: about half a GiB. Not measured here."""
LOGITS_MAX: Final = 1 << 27
"""Logits that `transferqueue.adapters.scoring` computes at a time on a GPU."""
_BUCKET_BYTES: Final = 1 << 28
"""Gradients that ranks of ``ddp`` sum in one call."""
_LOGITS_COPIES: Final = 3
"""Logits, their softmax and their gradient."""
_LOGITS_SCORED: Final = 2
"""Logits, and their exponentials in `logsumexp`."""
BEGIN_TOKENS_MAX: Final = 16384
"""Most tokens, padding included, of prompts that the transformers engine reads at once."""
ROOM_TOKENS: Final = 64
"""Room of a row in its cache beyond the tokens that it begins with."""


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes of one process on each of its devices.

    Args:
        parts: by what they hold; default: none, the sizes of the model are not known.
    """

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def trained(job: Job, sizes: ModelSizes, *, critic: bool = False) -> DeviceBytes:
    """Return the bytes of one rank of the trainer, or of the trainer of the critic."""
    settings = job.trainer
    sharded = settings.parallel == "fsdp2" and not critic
    ranks = settings.ranks if sharded else 1
    lora = settings.lora_rank if not critic else 0
    adapters = lora * _adapted(sizes)
    learned = adapters or sizes.parameters
    master = NUMBER_BYTES[settings.master_dtype]
    compute = NUMBER_BYTES[job.model.dtype]
    base = compute if lora and not sharded else master
    own = 0 if master == 4 else learned * master // ranks  # gradient of the step, beside the float32 sums
    step = own + learned * master // ranks + (min(_BUCKET_BYTES, learned * 4) if settings.parallel == "ddp" else 0)
    copies = _copies(sizes, base, compute, sharded=sharded)
    activations = _activations(
        sizes,
        settings.micro_tokens,
        compute,
        residual=base,
        paths=min(PATHS_MAX, batch_rows(job)),
        recomputed=settings.gradient_checkpointing,
        copies=0 if sharded else copies,
    )
    logits = _logits(sizes, settings.micro_tokens, base, copies=_LOGITS_COPIES)
    return DeviceBytes(
        parts={
            "weights": (sizes.parameters * base + adapters * master) // ranks,
            "gradients": learned * 4 // ranks,
            "moments": 2 * learned * master // ranks,
            "copies": copies,
            "activations": max(
                activations + logits + _mask(job, compute), step
            ),  # those are freed when the optimizer begins
        },
    )


def in_turn(trainer: DeviceBytes, engine: DeviceBytes, *, sleeps: bool) -> DeviceBytes:
    """Return the bytes of a trainer and an engine that use a device in turn. sleeps: nothing stays of the engine."""
    stays = {name: trainer.parts[name] for name in ("weights", "moments")}
    kept = {} if sleeps else {"engine weights": engine.parts["weights"]}
    training = trainer.total - sum(stays.values())
    generation = engine.total - sum(kept.values())
    return DeviceBytes(parts=stays | kept | {TURN: max(training, generation)})


def scored(sizes: ModelSizes, dtype: str, tokens: int) -> DeviceBytes:
    """Return the bytes of a model that makes forward passes of at most `tokens` tokens."""
    number = NUMBER_BYTES[dtype]
    logits = _logits(sizes, tokens, number, copies=_LOGITS_SCORED)
    activations = max(tokens * _layer_scored(sizes, number, PATHS_MAX), logits)
    return DeviceBytes(parts={"weights": sizes.parameters * number, "activations": activations})


def generated(job: Job, sizes: ModelSizes, engine: EngineSettings) -> DeviceBytes:
    """Return the bytes of an engine that computes in a process of the job. vLLM gets a cache of the declared bytes
    (``options.kv_cache_memory_bytes``), or what its share leaves for one, and measures its activations itself."""
    number = NUMBER_BYTES[job.model.dtype]
    if engine.kind == "vllm":
        weights = sizes.parameters * number // engine.tensor_parallel
        return DeviceBytes(parts={"weights": weights, "KV cache": int(engine.options.get(CACHE, 0))})
    prompt, longest = job.data.prompt_tokens_max, tokens_of_row(job)
    token = engine.slots * cache_bytes(sizes, job.model.dtype)  # in each slot
    cache, room = longest * token, ROOM_TOKENS * token
    read = max(prompt, min(engine.slots * prompt, BEGIN_TOKENS_MAX))
    begins = prompt * token + room + read * _layer_scored(sizes, number)
    joins = 2 * cache + room
    logits = _LOGITS_COPIES * engine.slots * sizes.vocabulary * NUMBER_BYTES["float32"]
    return DeviceBytes(
        parts={
            "weights": sizes.parameters * number,
            "activations": max(begins, joins) - cache + logits,
            "KV cache": cache,
        }
    )


def cache_bytes(sizes: ModelSizes, dtype: str) -> int:
    """Return the bytes of keys and values of one token, in all layers."""
    return 2 * sizes.layers * sizes.keys * NUMBER_BYTES[dtype]


def _copies(sizes: ModelSizes, base: int, compute: int, *, sharded: bool) -> int:
    """Weights in the dtype of the passes, which autocast keeps until the backward pass has ended. ``fsdp2`` gathers
    one layer while it computes another, and has the embedding and the output layer whole meanwhile."""
    if sharded:
        ends = min(sizes.parameters, 2 * sizes.vocabulary * sizes.hidden)
        layer = (sizes.parameters - ends) // max(1, sizes.layers)
        return (ends + 2 * layer) * compute
    return 0 if base == compute else sizes.parameters * compute


def _activations(
    sizes: ModelSizes, tokens: int, compute: int, *, residual: int, paths: int, recomputed: bool, copies: int
) -> int:
    """With gradient checkpointing the inputs of all layers, and one layer: it is computed again when the copies of the
    weights of the others have gone. paths: at most as many rows of a pass share a token."""
    layer = tokens * _layer(sizes, compute, residual, paths)
    if recomputed:
        gone = copies - copies // max(1, sizes.layers)
        return tokens * sizes.layers * sizes.hidden * residual + max(0, layer - gone)
    return sizes.layers * layer


def _mask(job: Job, compute: int) -> int:
    """The mask of the longest response after a shared prompt: a number for each of its tokens and each of its row, once
    for all layers. The GPU's kernel for 16-bit numbers needs none."""
    tokens = job.trainer.micro_tokens
    if compute < 4 or batch_rows(job) == 1:
        return 0
    return min(tokens, job.sampling.tokens_max) * min(tokens, tokens_of_row(job)) * compute


def _layer(sizes: ModelSizes, compute: int, residual: int, paths: int) -> int:
    """What the backward pass of a layer needs of one token: the inputs and results of both norms, which compute in
    float32, and so of those of heads; the inputs of the linear layers; queries, keys and values, which attention holds
    for each row that shares the token, and its result; gate, its activation, up and their product."""
    norms = 2 * sizes.hidden * (4 + max(residual, compute))
    if sizes.head_norms:
        norms += (sizes.queries + sizes.keys) * (4 + compute)
    attention = sizes.hidden + 3 * sizes.queries + 2 * sizes.keys * paths
    forward = sizes.hidden + 4 * sizes.inner
    return norms + compute * (attention + forward)


def _layer_scored(sizes: ModelSizes, number: int, paths: int = 1) -> int:
    """What a layer without a gradient holds of one token at most. Before its last linear layer: its input, the sum with
    attention, their norm and its result; the activation of the gate, up and their product. In attention: its input and
    the norm, queries and result, keys and values, also of each row that shares the token."""
    forward = 4 * sizes.hidden + 3 * sizes.inner
    return number * max(forward, 2 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys * (1 + paths))


def _logits(sizes: ModelSizes, tokens: int, stored: int, *, copies: int) -> int:
    """Logits are float32, of a part of the tokens at a time; so is then the output layer."""
    head = 0 if stored == 4 else sizes.vocabulary * sizes.hidden * 4
    return copies * min(tokens * sizes.vocabulary, LOGITS_MAX) * 4 + head


def _adapted(sizes: ModelSizes) -> int:
    """Numbers of the adapters of rank 1: inputs and outputs of every linear layer."""
    attention = 2 * (sizes.hidden + sizes.queries) + 2 * (sizes.hidden + sizes.keys)
    return sizes.layers * (attention + 3 * (sizes.hidden + sizes.inner))
