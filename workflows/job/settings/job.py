"""A job as a value: one frozen struct for each table of a job file, and `Job`, which holds them.

The structs hold the file's values; the defaults are in this module only. Open settings (an empty text, None) are filled
in by `transferqueue.workflows.job.settings.resolve`. Rules about one value are checked when a struct is made; rules
between tables by `transferqueue.workflows.job.settings.rules`.
"""

from __future__ import annotations

from typing import Any, Literal, dataclass_transform

import msgspec

AlgorithmKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "ppo", "distill", "sft"]
EngineKind = Literal["builtin", "transformers", "vllm", "vllm_server", "sglang_server", "openai"]
Mode = Literal["sync", "delayed", "async"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a job file: compared by value, unknown keys refused."""


class ModelSettings(_Table):
    """The policy. path: a Hugging Face directory or id, or the directory of a built-in model. tokenizer: a path (empty:
    the model's). chat_template: a file (empty: the tokenizer's)."""

    path: str
    revision: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    dtype: str = "bfloat16"
    trust_remote_code: bool = False


class DataSettings(_Table):
    """The prompts. path: Parquet, Arrow or JSONL, a file or a directory of them, or a directory that `datasets` saved.

    prompt: the column with the prompt, a text or a list of messages. template: makes the prompt from columns
    (``"{question}"``). system: a system message. response: the column with the answer, for sft. columns: names of the
    data's columns by the names that rewards ask for. overlong: what happens to a prompt over prompt_tokens_max tokens.
    """

    path: str
    split: str = "train"
    prompt: str = "prompt"
    template: str = ""
    system: str = ""
    response: str = ""
    columns: dict[str, str] = {}
    epochs: int = 0
    shuffle: bool = True
    prompt_tokens_max: int = 1024
    overlong: Literal["drop", "refuse"] = "drop"


class EngineSettings(_Table):
    """Processes that generate. count: number of them. slots: requests that one runs at a time. serves: the class of
    rows that dispatch by length may give it. site: where they run ("": where the job does);
    ``transferqueue train --site`` starts those of another site there. options: passed to the engine.
    """

    kind: EngineKind = "vllm"
    url: str = ""
    model: str = ""
    count: int = 1
    tensor_parallel: int = 1
    slots: int = 64
    serves: Literal["any", "tail", "regular"] = "any"
    site: str = ""
    options: dict[str, Any] = {}


class SamplingSettings(_Table):
    """How responses are drawn. group_size: responses of a prompt. budget: tokens that one lease adds to a response at
    most (0: no bound)."""

    group_size: int = 8
    tokens_max: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    budget: int = 0


class RewardSettings(_Table):
    """One term of the reward: exactly one of function (``module:function``, in TRL's form), model (a sequence
    classifier) and environment (``module:factory``). weight: 0 measures the term and does not reward it."""

    function: str = ""
    model: str = ""
    environment: str = ""
    weight: float = 1.0
    args: dict[str, Any] = {}
    processes: int = 1
    timeout_s: float = 60.0
    on_error: Literal["stop", "drop"] = "stop"


class AlgorithmSettings(_Table):
    """The algorithm. kind decides the open settings: empty texts, None, and 0 for clip_low and clip_high (see
    `defaults.filled`)."""

    kind: AlgorithmKind
    std: Literal["sample", "population", "none", ""] = ""
    std_eps: float = 1e-4
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float = 0.0
    ratio: Literal["token", "sequence", ""] = ""
    aggregate: Literal["tokens", "rows", "rows_max", ""] = ""
    old: Literal["rollout", "trainer"] = "rollout"
    tis_max: float = 0.0
    kl: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    filter_equal: bool | None = None
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    mask_truncated: bool = False
    gamma: float = 1.0
    lam: float = 0.95
    value_clip: float = 0.2
    whiten: bool | None = None
    epochs: int = 1
    minibatches: int = 1
    top_k: int = 0
    direction: Literal["reverse", "forward"] = "reverse"


class ScorerSettings(_Table):
    """A model that scores rows: the reference or the teacher. path: empty: there is none. tokens: of one packed forward
    pass."""

    path: str = ""
    device: str = "auto"
    dtype: str = ""
    tokens: int = 8192
    processes: int = 1


class CriticSettings(ScorerSettings):
    """The value model of ppo, and how it is trained."""

    lr: float = 1e-5


class TrainerSettings(_Table):
    """How the policy is trained. micro_tokens: tokens of one forward and backward pass. stream: begin with the rows
    that are ready.

    order: "ready" takes groups as they become ready; "ordinal" in the order of the data, so that a run with fixed seeds
    repeats bit for bit. patience_s: rank 0 waits so long for another rank in the middle of a step; then all ranks are
    started again.
    """

    prompts_per_step: int = 32
    device: str = "auto"
    parallel: Literal["single", "ddp", "fsdp2"] = "single"
    ranks: int = 1
    master_dtype: str = "float32"
    logits_dtype: str = "float32"
    micro_tokens: int = 8192
    stream: Literal["auto", "on", "off"] = "auto"
    order: Literal["ready", "ordinal"] = "ready"
    at_least: int = 1
    gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lr: float = 1e-6
    warmup: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_norm_max: float = 1.0
    patience_s: float = 600.0


class PacingSettings(_Table):
    """How far generation runs ahead. window: prompts from the oldest live one that a step may use, in batches.

    over_sample: batches of prompts that a synchronous job begins. A step takes the groups that are ready first.
    Generators then stop the others between two tokens: their rows go on under the next weights, and are trained up to
    ``ceil(over_sample) - 1`` versions later. Episodes are generated to their end.
    """

    mode: Mode = "async"
    depth: int | None = None
    max_staleness: int | None = None
    on_stale: Literal["requeue", "drop"] = "requeue"
    window: float = 1.0
    over_sample: float = 1.0


class DispatchSettings(_Table):
    """Which engine generates which row. kind: "given": any, in the order of the data; "length": by the expected length
    of the response (StreamRL), long ones first and where that is faster in engines with small batches. It adds a
    process, and helps where engines take several rounds for a step whose responses differ in length.
    """

    kind: Literal["given", "length"] = "given"


class ElasticSettings(_Table):
    """How many generating processes there are while the job runs: `min` to `max` (0: always the counts of ``engine``).
    More are started like the last of ``engine``.

    threshold: a process is added when generation takes longer than training by this share of the time that it would
    save.
    idle_s: with ``min = 0``, the last one ends after so long without a row. deadline_s: a process that is removed is
    killed after it.
    """

    min: int = 1
    max: int = 0
    threshold: float = 1.0
    idle_s: float = 60.0
    deadline_s: float = 60.0


class WeightsSettings(_Table):
    """How weights are published. background: only the copy to host memory stops the trainer. in_flight: engines change
    weights between two tokens."""

    background: bool = True
    dtype: str = "bfloat16"
    every: int = 1
    keep: int = 2
    sharded: Literal["auto", "on", "off"] = "auto"
    in_flight: bool = True


class CheckpointSettings(_Table):
    """Checkpoints of the trainer and its queue. every: steps between two (0: none). resume: auto, never, or a
    directory."""

    every: int = 50
    keep: int = 2
    resume: str = "auto"
    snapshot: bool = True


class EvaluationSettings(_Table):
    """Held-out prompts. path: empty: none are evaluated. every: steps between two evaluations (0: before and after
    only)."""

    path: str = ""
    split: str = "test"
    every: int = 50
    rows: int = 256
    samples: int = 1
    temperature: float = 0.0


class LogSettings(_Table):
    """Where figures go, and how many sample responses of each step are kept."""

    to: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)
    samples: int = 4


class QueueSettings(_Table):
    """The queue of the job. address: empty: the job runs its own server."""

    address: str = ""
    durability: Literal["memory", "process", "disk"] = "process"
    memory_gib: float = 8.0


class RaySettings(_Table):
    """How a job with ``on = "ray"`` is spread over the cluster. options: arguments of Ray's ``options`` of an actor
    (``num_gpus``, ``num_cpus``, ``resources``, ``label_selector``, …) by task, or by process (``rollout-1``). replicas:
    shards that store each row; with 2 no row is lost with a node. shard_gib: most memory of the shard on each node (0:
    as ``queue.memory_gib``, which is the server's).
    """

    options: dict[str, dict[str, Any]] = {}
    replicas: int = 1
    shard_gib: float = 0.0


class Job(_Table):
    """A whole job; `transferqueue.workflows.job.settings.read.job_from_file` reads one, `transferqueue train` runs one.

    on: where its processes run: on this machine, or as actors of the Ray cluster that ``RAY_ADDRESS`` names.
    """

    model: ModelSettings
    data: DataSettings
    algorithm: AlgorithmSettings
    name: str = ""
    seed: int = 0
    steps: int = 100
    on: Literal["processes", "ray"] = "processes"
    engine: tuple[EngineSettings, ...] = (EngineSettings(),)
    sampling: SamplingSettings = SamplingSettings()
    reward: tuple[RewardSettings, ...] = ()
    reference: ScorerSettings = ScorerSettings()
    critic: CriticSettings = CriticSettings()
    teacher: ScorerSettings = ScorerSettings()
    trainer: TrainerSettings = TrainerSettings()
    pacing: PacingSettings = PacingSettings()
    dispatch: DispatchSettings = DispatchSettings()
    elastic: ElasticSettings = ElasticSettings()
    weights: WeightsSettings = WeightsSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    log: LogSettings = LogSettings()
    queue: QueueSettings = QueueSettings()
    ray: RaySettings = RaySettings()
