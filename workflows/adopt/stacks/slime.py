"""slime: options of its ``train.py`` and ``train_async.py``, those of Megatron among them."""

from __future__ import annotations

from typing import Final

from transferqueue.workflows.adopt.mapping import (
    DRAWN_WHOLE,
    EXPERTS,
    IMAGES,
    KERNELS,
    KL_ESTIMATORS,
    LOGS,
    OWN_QUEUE,
    PACKED,
    RESUMES,
    SCHEDULES,
    SHARDED,
    Gpus,
    OurValues,
    Plain,
    Refuse,
    Settings,
    Stack,
    divided,
    flag,
    interval,
    kept,
    label_column,
    layout,
    mapped,
    no_effect,
    number,
    one_of,
    only_if,
    parts_of,
    refused,
    texts,
    whole,
)

_MODEL: Final = "a model is as its config.json says"
_ESTIMATORS: Final = {
    "grpo": {"algorithm.kind": "grpo"},
    "gspo": {"algorithm.kind": "gspo"},
    "reinforce_plus_plus": {"algorithm.kind": "reinforce_pp"},
    "ppo": {"algorithm.kind": "ppo"},
}
_SCORES: Final = {
    "deepscaler": (
        "from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward as score",
        "score(text, right)",
    ),
    "dapo": ("from slime.rollout.rm_hub.math_dapo_utils import compute_score as score", 'score(text, right)["score"]'),
    "math": ("from slime.rollout.rm_hub.math_utils import grade_answer_verl as score", "score(text, right)"),
    "f1": ("from slime.rollout.rm_hub.f1 import f1_score as score", "score(text, right)[0]"),
}
"""The import and the call of slime's rewards that take a response and its label."""


def _estimator(value: Plain, settings: Settings) -> OurValues:
    if value not in _ESTIMATORS:
        raise Refuse(f"there is no advantage {value!r} here; there are {', '.join(_ESTIMATORS)}")
    return OurValues(_ESTIMATORS[value])


def _compares(settings: Settings) -> bool:
    return settings["advantage-estimator"] in ("grpo", "gspo")


def _uses_kl(settings: Settings) -> bool:
    return settings.is_on("use-kl-loss")


def _rows(settings: Settings) -> int:
    return settings.whole("rollout-batch-size") * settings.whole("n-samples-per-prompt")


def _minibatches(value: Plain, settings: Settings) -> int:
    return parts_of(_rows(settings), whole(value), "global-batch-size")


def _epochs(value: Plain, settings: Settings) -> Plain:
    return OurValues({}, "num-rollout says it") if settings["num-rollout"] is not None else whole(value)


def _rm_type(value: Plain, settings: Settings) -> OurValues:
    if value not in _SCORES:
        raise Refuse(f"adopted_rewards.py has no call of {value!r}; write a function and name it in reward.function")
    return OurValues({"reward.0.function": "adopted_rewards:reward"}, "adopted_rewards.py calls slime's function")


def _custom_rm(value: Plain, settings: Settings) -> Plain:
    raise Refuse("a function of slime's samples: write one of TRL's form, and name it in reward.function")


def _rollout(value: Plain, settings: Settings) -> OurValues:
    name = str(value).rpartition(".")[2]
    if name == "generate_rollout" and settings.entry.endswith("train_async.py"):
        return OurValues({"pacing.mode": "delayed"}, "train_async.py generates one rollout ahead")
    if name == "generate_rollout":
        return OurValues({}, "slime's own")
    if name == "generate_rollout_fully_async":
        return OurValues({"pacing.mode": "async"}, "generation never waits for a step")
    raise Refuse("a rollout of your own: write it as an environment (`[[environment]]`)")


def _source(value: Plain, settings: Settings) -> OurValues:
    name = str(value).rpartition(".")[2]
    if name not in ("RolloutDataSource", "RolloutDataSourceWithBuffer", "QueueDataSource"):
        raise Refuse("a data source of your own: write its rows to a file, and set data.path")
    return OurValues({}, "reads --prompt-data")


def _evals(value: Plain, settings: Settings) -> OurValues:
    words = texts(value)
    if len(words) % 2:
        raise Refuse("names and paths come in pairs")
    pairs = list(zip(words[::2], words[1::2], strict=True))
    by_key = {"evaluation.path": pairs[0][1]}
    for place, (name, path) in enumerate(pairs[1:]):
        by_key |= {f"evaluation.sets.{place}.name": name, f"evaluation.sets.{place}.path": path}
    return OurValues(by_key, f"{pairs[0][0]} is the first set" if len(pairs) > 1 else "")


def _warmup(value: Plain, settings: Settings) -> Plain:
    if number(value) == 0:
        return 0
    if not settings.whole("num-rollout"):
        raise Refuse("a share of the steps, whose number num-rollout does not say; set trainer.warmup")
    return round(number(value) * settings.whole("num-rollout"))


def _context(value: Plain, settings: Settings) -> Plain:
    prompt = whole(value) - settings.whole("rollout-max-response-len")
    if prompt <= 0:
        raise Refuse(
            f"{value} tokens leave none for the prompt beside rollout-max-response-len; set data.prompt_tokens_max"
        )
    return prompt


def _gpus(settings: Settings) -> Gpus:
    nodes = settings.whole("actor-num-nodes")
    train = nodes * settings.whole("actor-num-gpus-per-node")
    per_engine = settings.whole("rollout-num-gpus-per-engine")
    shared = settings.is_on("colocate") or not settings.whole("rollout-num-gpus")
    return Gpus(train, settings.whole("rollout-num-gpus") or train, shared=shared, nodes=nodes, per_engine=per_engine)


def _rewards(settings: Settings) -> str:
    if settings["rm-type"] not in _SCORES:
        return ""
    load, call = _SCORES[settings["rm-type"]]
    return f'''"""slime's reward in the form that `reward.function` takes. Needs slime in this environment."""

{load}

from transferqueue.workflows.job.rewards import text_of


def reward(completions, label, **columns):
    """Return the score of each row."""
    return [
        float({call}) for text, right in zip(map(text_of, completions), label, strict=True)
    ]
'''


def _json() -> Plain:
    raise Refuse("set model.template_args to this table")


def _filter(value: Plain) -> Plain:
    if "nonzero_std" not in str(value):
        raise Refuse("a filter of your own; algorithm.filter_equal drops groups with equal rewards")
    return True


def _over_sample(value: Plain, settings: Settings) -> Plain:
    if settings.entry.endswith("train_async.py"):
        return OurValues({}, "generation runs ahead anyway")
    return whole(value) / settings.whole("rollout-batch-size")


def _kl_in_reward(value: Plain) -> Plain:
    if number(value) == 0:
        return OurValues({}, "off")
    return OurValues({"algorithm.kl": number(value), "algorithm.kl_in": "reward"})


_PROFILES: Final = ("memory-*", "profile-target", "record-memory-history")
_BUFFER: Final = ("fetch-trajectory-retry-times", "min-batch-collection-ratio", "rollout-task-type")
_FUNCTIONS: Final = (
    "buffer-filter-path",
    "eval-function-path",
    "rollout-all-samples-process-path",
    "rollout-data-postprocess-path",
    "rollout-sample-filter-path",
    "rollout-sample-hook-path",
)
_OWN_FUNCTION: Final = "a function of slime's samples: write it as a reward, or as an environment (`[[environment]]`)"
_RULES: Final = (
    # ------------------------------------------------------------ model and data
    kept("hf-checkpoint", "model.path"),
    no_effect("ref-load", "the reference is model.path at its start; set reference.path for another"),
    refused("ref-ckpt-step", "set reference.path"),
    no_effect("load", RESUMES),
    no_effect("model-name", _MODEL),
    kept("prompt-data", "data.path"),
    kept("input-key", "data.prompt", default="input"),
    mapped("label-key", "data.columns", label_column),
    no_effect("metadata-key", "rewards get every column"),
    no_effect("loss-mask-type", "read by slime's SFT rollout alone"),
    refused("multimodal-keys", IMAGES),
    refused("tool-key", "tools are in one file (model.tools)"),
    no_effect("apply-chat-template", "a model with a chat template gets it"),
    mapped(
        "apply-chat-template-kwargs",
        "model.template_args",
        lambda v, s: OurValues({}, "none") if v in ("{}", {}) else _json(),
    ),
    kept("rollout-shuffle", "data.shuffle", default=False),
    kept("rollout-seed", "seed", default=42),
    no_effect("seed", "rollout-seed says it"),
    kept("rollout-max-prompt-len", "data.prompt_tokens_max"),
    mapped("rollout-max-context-len", "data.prompt_tokens_max", _context, why="less rollout-max-response-len"),
    mapped("data-source-path", "data.path", _source),
    no_effect("disable-rollout-global-dataset", "read with a data source of your own"),
    # ------------------------------------------------------------ steps
    kept("num-rollout", "steps"),
    mapped("num-epoch", "data.epochs", _epochs),
    kept("rollout-batch-size", "trainer.prompts_per_step"),
    kept("n-samples-per-prompt", "sampling.group_size", default=1),
    mapped("global-batch-size", "algorithm.minibatches", _minibatches, why="rows of a step / global-batch-size"),
    kept("num-steps-per-rollout", "algorithm.minibatches"),
    mapped("over-sampling-batch-size", "pacing.over_sample", _over_sample, why="/ rollout-batch-size"),
    mapped("dynamic-sampling-filter-path", "algorithm.filter_equal", lambda v, s: _filter(v)),
    refused(
        "partial-rollout",
        'see pacing.mode = "async", where responses go on under the next weights',
        unless=(False, "false"),
    ),
    refused("mask-offpolicy-in-partial-rollout", "every token counts", unless=(False, "false")),
    # ------------------------------------------------------------ sampling
    kept("rollout-max-response-len", "sampling.tokens_max"),
    kept("rollout-temperature", "sampling.temperature", default=1.0),
    refused("rollout-top-p", DRAWN_WHOLE, unless=(1, "1", "1.0")),
    refused("rollout-top-k", DRAWN_WHOLE, unless=(-1, "-1")),
    mapped("rollout-stop", "sampling.stop", lambda v, s: texts(v)),
    refused("rollout-stop-token-ids", "set sampling.stop to their texts"),
    no_effect("rollout-skip-special-tokens", "rewards get text without special tokens"),
    mapped(
        "rollout-function-path",
        "pacing.mode",
        _rollout,
        default="slime.rollout.sglang_rollout.generate_rollout",
    ),
    refused("custom-generate-function-path", "a rollout of your own: write it as an environment (`[[environment]]`)"),
    layout("rollout-num-gpus"),
    no_effect("prefill-num-servers", "see engine.count"),
    no_effect("rollout-data-transport", OWN_QUEUE),
    layout("rollout-num-gpus-per-engine", default=1),
    mapped(
        "sglang-mem-fraction-static",
        "engine.0.options.gpu_memory_utilization",
        lambda v, s: number(v),
        why="vLLM's share of the device",
    ),
    kept("sglang-max-running-requests", "engine.0.slots"),
    kept("sglang-server-concurrency", "engine.0.slots"),
    refused("sglang-*", "an argument of SGLang: put vLLM's into engine.0.options"),
    refused("rollout-external-engine-addrs", "set engine.kind and engine.url"),
    # ------------------------------------------------------------ rewards
    mapped("rm-type", "reward.0.function", _rm_type),
    mapped("custom-rm-path", "reward.0.function", _custom_rm),
    refused("rm-url", "a reward server: write a function that asks it, and name it in reward.function"),
    refused("reward-key", "a reward is one number"),
    refused("group-rm", "rewards are of rows", unless=(False, "false")),
    refused("custom-reward-post-process-path", "rewards are compared within their group"),
    # ------------------------------------------------------------ the algorithm
    mapped("advantage-estimator", "algorithm.kind", _estimator, default="grpo"),
    mapped(
        "disable-grpo-std-normalization",
        "algorithm.std",
        only_if(_compares, "of groups", lambda v, s: divided(not flag(v), 1e-6)),
        default=False,
    ),
    refused("disable-rewards-normalization", "rewards are compared within their group", unless=(False, "false")),
    mapped("normalize-advantages", "algorithm.whiten", lambda v, s: s.is_on("normalize-advantages")),
    mapped(
        "calculate-per-token-loss",
        "algorithm.aggregate",
        lambda v, s: "tokens" if s.is_on("calculate-per-token-loss") else "rows",
        default=False,
    ),
    kept("eps-clip", "algorithm.clip_low", default=0.2),
    kept("eps-clip-high", "algorithm.clip_high"),
    kept("eps-clip-c", "algorithm.dual_clip"),
    kept("value-clip", "algorithm.value_clip"),
    mapped("use-kl-loss", "algorithm.kl_in", only_if(_uses_kl, "off", lambda v, s: "loss")),
    mapped("kl-loss-coef", "algorithm.kl", only_if(_uses_kl, "use-kl-loss is off")),
    mapped(
        "kl-loss-type",
        "algorithm.kl_estimator",
        only_if(_uses_kl, "use-kl-loss is off", one_of(KL_ESTIMATORS)),
        default="k1",
    ),
    mapped("kl-coef", "algorithm.kl", lambda v, s: _kl_in_reward(v)),
    kept("entropy-coef", "algorithm.entropy"),
    kept("gamma", "algorithm.gamma"),
    mapped(
        "lambd",
        "algorithm.lam",
        only_if(lambda s: s["advantage-estimator"] == "ppo", "ppo alone reads it"),
        default=1.0,
    ),
    mapped(
        "use-tis", "algorithm.tis_max", only_if(lambda s: s.is_on("use-tis"), "off", lambda v, s: s.number("tis-clip"))
    ),
    no_effect("tis-clip", "read with use-tis", default=2.0),
    refused("tis-clip-low", "importance weights have an upper bound alone", unless=(0, "0")),
    refused("custom-tis-function-path", "importance weights are of tokens, and bounded (algorithm.tis_max)"),
    mapped(
        "use-rollout-logprobs",
        "algorithm.old",
        lambda v, s: "rollout" if s.is_on("use-rollout-logprobs") else "trainer",
    ),
    refused("loss-type", "slime's own loss", unless=("policy_loss",)),
    refused("use-opd", 'see algorithm.kind = "distill"', unless=(False, "false")),
    refused("opd-*", 'see algorithm.kind = "distill"'),
    no_effect("opsm-delta", "read with use-opsm"),
    refused("keep-old-actor", 'see algorithm.old = "rollout"', unless=(False, "false")),
    no_effect("use-rollout-entropy", "figures of every step are written"),
    no_effect("get-mismatch-metrics", "figures of every step are written"),
    refused("use-opsm", "rows are not masked by their ratio", unless=(False, "false")),
    refused("use-unbiased-kl", "the estimator of the KL is algorithm.kl_estimator", unless=(False, "false")),
    refused("use-routing-replay", "routes of SGLang are not replayed", unless=(False, "false")),
    refused("use-rollout-routing-replay", "routes of SGLang are not replayed", unless=(False, "false")),
    kept("ref-update-interval", "reference.sync_every"),
    refused("disable-compute-advantages-and-returns", 'see algorithm.kind = "sft"', unless=(False, "false")),
    refused("num-critic-only-steps", "policy and critic train together from the first step", unless=(0, "0")),
    # ------------------------------------------------------------ the optimizer
    refused("optimizer", "AdamW trains", unless=("adam",)),
    refused("use-stateless-adam", "AdamW trains", unless=(False, "false")),
    refused("reset-optimizer-states", "AdamW keeps its states from step to step", unless=(False, "false")),
    refused("only-train-params-name-list", "every weight is trained, or adapters are (trainer.lora_rank)"),
    refused("freeze-*", "every weight is trained, or adapters are (trainer.lora_rank)"),
    kept("lr", "trainer.lr", default=1e-6),
    mapped("lr-decay-style", "trainer.schedule", one_of(SCHEDULES)),
    refused("min-lr", "a schedule ends at 0 here", unless=(0, "0", "0.0")),
    kept("lr-warmup-iters", "trainer.warmup"),
    mapped("lr-warmup-fraction", "trainer.warmup", _warmup),
    kept("weight-decay", "trainer.weight_decay", default=0.01),
    mapped("adam-beta1", "trainer.betas", lambda v, s: [s.number("adam-beta1"), s.number("adam-beta2")], default=0.9),
    mapped("adam-beta2", "trainer.betas", lambda v, s: [s.number("adam-beta1"), s.number("adam-beta2")], default=0.999),
    kept("clip-grad", "trainer.gradient_norm_max", default=1.0),
    no_effect("use-precision-aware-optimizer", SHARDED),
    no_effect("optimizer-cpu-offload", SHARDED),
    no_effect("overlap-cpu-optimizer-d2h-h2d", SHARDED),
    no_effect("use-distributed-optimizer", SHARDED),
    mapped(
        "recompute-granularity",
        "trainer.gradient_checkpointing",
        lambda v, s: OurValues({"trainer.gradient_checkpointing": True}, ""),
    ),
    no_effect("recompute-method", "of recompute-granularity"),
    no_effect("recompute-num-layers", "of recompute-granularity"),
    kept("max-tokens-per-gpu", "trainer.micro_tokens"),
    kept("log-probs-max-tokens-per-gpu", "reference.tokens"),
    no_effect("log-probs-chunk-size", KERNELS),
    *(no_effect(name, KERNELS) for name in ("recompute-loss-function", "allgather-cp", "qwen-gdn-backend")),
    *(no_effect(name, KERNELS) for name in ("megatron-deepgemm-*", "transformer-impl", "bf16")),
    refused("fp8-*", "models are not quantized"),
    no_effect("use-dynamic-batch-size", PACKED),
    no_effect("micro-batch-size", PACKED),
    no_effect("balance-data", PACKED),
    no_effect("balance-by-flops", PACKED),
    no_effect("data-pad-size-multiplier", PACKED),
    no_effect("tensor-model-parallel-size", SHARDED),
    no_effect("pipeline-model-parallel-size", SHARDED),
    no_effect("context-parallel-size", SHARDED),
    no_effect("expert-model-parallel-size", SHARDED),
    no_effect("expert-tensor-parallel-size", SHARDED),
    no_effect("sequence-parallel", SHARDED),
    no_effect("decoder-first-pipeline-num-layers", SHARDED),
    no_effect("decoder-last-pipeline-num-layers", SHARDED),
    no_effect("accumulate-allreduce-grads-in-fp32", KERNELS),
    no_effect("attention-softmax-in-fp32", KERNELS),
    no_effect("attention-backend", KERNELS),
    no_effect("no-check-for-nan-in-loss-and-grad", KERNELS),
    no_effect("no-gradient-accumulation-fusion", KERNELS),
    refused("attention-dropout", "models train without dropout", unless=(0, "0", "0.0")),
    refused("hidden-dropout", "models train without dropout", unless=(0, "0", "0.0")),
    no_effect("train-backend", SHARDED),
    no_effect("update-weight-*", "weights come by the queue's channel"),
    kept("update-weights-interval", "weights.every"),
    refused("moe-aux-loss-coeff", EXPERTS, unless=(0, "0", "0.0")),
    refused("moe-z-loss-coeff", EXPERTS, unless=(0, "0", "0.0")),
    refused("moe-router-bias-update-rate", "the bias of experts is not trained", unless=(0, "0", "0.0")),
    refused("moe-input-jitter-eps", "no noise is added to what routers read", unless=(0, "0", "0.0")),
    refused("moe-expert-capacity-factor", "no token is dropped by an expert", unless=(-1, "-1")),
    no_effect("moe-*", _MODEL),
    refused("enable-mtp-training", "layers of several tokens are not trained", unless=(False, "false")),
    refused("mtp-*", "layers of several tokens are not trained"),
    refused("deterministic-mode", "see reproducible = true", unless=(False, "false")),
    *(
        no_effect(name, _MODEL)
        for name in (
            "swiglu",
            "num-layers",
            "hidden-size",
            "ffn-hidden-size",
            "num-attention-heads",
            "group-query-attention",
            "num-query-groups",
            "use-rotary-position-embeddings",
            "disable-bias-linear",
            "normalization",
            "norm-epsilon",
            "rotary-base",
            "rotary-percent",
            "vocab-size",
            "kv-channels",
            "qk-layernorm",
            "untie-embeddings-and-output-weights",
            "add-qkv-bias",
            "position-embedding-type",
            "num-experts",
            "use-gated-attention",
            "attention-output-gate",
            "apply-layernorm-1p",
            "spec",
            "megatron-to-hf-mode",
            "padded-vocab-size",
        )
    ),
    # ------------------------------------------------------------ the run
    layout("actor-num-nodes", default=1),
    layout("actor-num-gpus-per-node", default=8),
    layout("num-gpus-per-node"),
    layout("colocate"),
    no_effect("offload", "see pacing.mode"),
    no_effect("release-train", "see pacing.mode"),
    no_effect("offload-train", "see pacing.mode"),
    no_effect("offload-rollout", "see pacing.mode"),
    no_effect("no-offload-train", "see pacing.mode"),
    no_effect("no-offload-rollout", "see pacing.mode"),
    no_effect("save", LOGS),
    mapped("save-interval", "checkpoint.every", interval, default=0),
    mapped("eval-interval", "evaluation.every", interval),
    mapped("eval-prompt-data", "evaluation.path", _evals),
    kept("n-samples-per-eval-prompt", "evaluation.samples"),
    kept("eval-temperature", "evaluation.temperature"),
    refused("eval-max-response-len", "evaluation has sampling.tokens_max"),
    refused("eval-max-context-len", "evaluation has sampling.tokens_max"),
    refused("eval-top-p", "evaluation draws from the whole distribution", unless=(1, "1", "1.0")),
    refused("eval-top-k", "evaluation draws from the whole distribution", unless=(-1, "-1")),
    refused("eval-input-key", "evaluation has data.prompt"),
    refused("eval-label-key", "evaluation has the columns of data.columns"),
    refused("eval-tool-key", "tools are in one file (model.tools)"),
    refused("eval-max-prompt-len", "evaluation has data.prompt_tokens_max"),
    refused("eval-min-new-tokens", DRAWN_WHOLE),
    refused("eval-reward-key", "a reward is one number"),
    refused("eval-config", "name its sets in evaluation.sets"),
    no_effect("skip-eval-before-train", "an evaluation before the run is always made"),
    mapped("use-wandb", "log.to", only_if(lambda s: s.is_on("use-wandb"), "off", lambda v, s: ["wandb"])),
    no_effect("wandb-*", LOGS),
    no_effect("disable-wandb-random-suffix", LOGS),
    mapped(
        "use-tensorboard",
        "log.to",
        only_if(lambda s: s.is_on("use-tensorboard"), "off", lambda v, s: ["tensorboard"]),
    ),
    no_effect("tb-*", LOGS),
    no_effect("log-*", "see `transferqueue samples RUN`"),
    no_effect("save-debug-*", "see `transferqueue samples RUN`"),
    refused("load-debug-rollout-data*", "a job generates and trains"),
    refused("load-forge-rollout-data", "a job generates and trains"),
    refused("debug-train-only", "a job generates and trains", unless=(False, "false")),
    refused("debug-rollout-only", "a job generates and trains", unless=(False, "false")),
    no_effect("use-fault-tolerance", "processes that die are started again, and their rows come again"),
    no_effect("rollout-health-check-*", "processes that die are started again, and their rows come again"),
    no_effect("train-env-vars", "variables of the environment: set them where the job starts"),
    no_effect("dump-details", "see `transferqueue samples RUN`"),
    *(no_effect(name, "profiling: see transferqueue profile and trace") for name in _PROFILES),
    no_effect("check-weight-update-equal", "weights come by the queue's channel"),
    no_effect("http-proxy", "of slime's router"),
    no_effect("use-distributed-post", "of slime's router"),
    no_effect("ci-*", "of slime's own tests"),
    no_effect("distributed-*", SHARDED),
    refused("rollout-buffer-url", "a server of your own makes rows: write it as an environment (`[[environment]]`)"),
    *(no_effect(name, "read with rollout-buffer-url") for name in _BUFFER),
    *(refused(name, _OWN_FUNCTION) for name in _FUNCTIONS),
    no_effect("start-rollout-id", RESUMES),
    no_effect("async-save", "a checkpoint has model, optimizer and queue"),
    no_effect("no-save-optim", "a checkpoint has model, optimizer and queue"),
    no_effect("save-hf", "transferqueue export writes the model"),
    refused("megatron-config-path", "a file of roles: their devices are of engine and trainer here"),
    refused("custom-config-path", "a file of further arguments: give them after the script"),
    refused("custom-*", "a function of slime's own"),
)


SLIME: Final = Stack(
    name="slime",
    rules=_RULES,
    always={
        "algorithm.old": ("trainer", "slime's ratio is to log-probs that its trainer computes"),
    },
    entries=("train_async.py", "train.py"),
    marks=("hf-checkpoint",),
    overrides=False,
    gpus=_gpus,
    rewards=_rewards,
    extra="torch",
    version="main of August 2026",
    on_queue=(
        "transferqueue serve --durability process, and TRANSFERQUEUE_ADDRESS where slime's rollout manager runs",
        "then the same command with --data-source-path transferqueue.adapters.trainers.slime.QueueDataSource:",
        "prompt groups that were begun outlive a crash; transferqueue docs slime",
    ),
)
"""slime's table."""
