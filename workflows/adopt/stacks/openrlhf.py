"""OpenRLHF: options of ``openrlhf.cli.train_ppo_ray`` (``--actor.adam.lr 5e-7``)."""

from __future__ import annotations

from typing import Final

from transferqueue.workflows.adopt.mapping import (
    DRAWN_WHOLE,
    DTYPES,
    EXPERTS,
    IMAGES,
    KERNELS,
    LOGS,
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

_ENGINE: Final = "engine.0.options."
_ESTIMATORS: Final[dict[str, dict[str, Plain]]] = {
    "group_norm": {"algorithm.kind": "grpo", "algorithm.std": "sample", "algorithm.std_eps": 1e-9},
    "dr_grpo": {"algorithm.kind": "dr_grpo"},
    "rloo": {"algorithm.kind": "rloo"},
    "reinforce": {"algorithm.kind": "reinforce_pp"},
    "reinforce_baseline": {"algorithm.kind": "grpo", "algorithm.std": "none", "algorithm.whiten": True},
    "gae": {"algorithm.kind": "ppo"},
}


def _estimator(value: Plain, settings: Settings) -> OurValues:
    if value not in _ESTIMATORS:
        raise Refuse(f"there is no advantage {value!r} here; there are {', '.join(_ESTIMATORS)}")
    by_key = dict(_ESTIMATORS[value])
    if value == "gae" and settings["critic.model_name_or_path"] is None:
        model = settings["reward.model_name_or_path"] if not settings["reward.remote_url"] else None
        by_key["critic.path"] = str(model or settings["actor.model_name_or_path"]).split(",")[0]
    return OurValues(by_key)


def _is_ppo(settings: Settings) -> bool:
    return bool(settings["algo.advantage.estimator"] == "gae")


def _minibatches(value: Plain, settings: Settings) -> int:
    rows = settings.whole("rollout.batch_size") * settings.whole("rollout.n_samples_per_prompt")
    return parts_of(rows, whole(value), "train.batch_size")


def _steps(settings: Settings) -> int:
    """Steps that the data is enough for at most; 0: not known."""
    samples = settings.whole("data.max_samples")
    return (
        0
        if not samples
        else samples * max(1, settings.whole("train.num_episodes")) // settings.whole("rollout.batch_size")
    )


def _samples(value: Plain, settings: Settings) -> OurValues:
    return OurValues(
        {"steps": max(1, _steps(settings))}, "max_samples × num_episodes / rollout.batch_size, if there are so many"
    )


def _warmup(value: Plain, settings: Settings) -> Plain:
    if number(value) == 0:
        return 0
    if not _steps(settings):
        raise Refuse("a share of the steps, whose number data.max_samples does not say; set trainer.warmup")
    return min(round(number(value) * _steps(settings)), _steps(settings) - 1)


def _lengths(value: Plain, settings: Settings) -> OurValues:
    longest, response = whole(value), settings.whole("rollout.max_new_tokens")
    response = response or longest // 2
    if response >= longest:
        raise Refuse(f"rollout.max_new_tokens={response} leaves no token of {longest} for the prompt")
    return OurValues(
        {"data.prompt_tokens_max": longest - response, "sampling.tokens_max": response},
        "prompt and response have bounds of their own"
        + ("" if settings["rollout.max_new_tokens"] else ": a half each"),
    )


def _two(value: Plain, settings: Settings) -> OurValues:
    low, high = [number(each) for each in texts(value)]
    return OurValues({"algorithm.clip_low": low, "algorithm.clip_high": high})


def _remote(value: Plain, settings: Settings) -> OurValues:
    places = [each for part in texts(value) for each in part.split(",")]
    if len(places) != 1 or not places[0].endswith(".py"):
        raise Refuse("a reward server: write a function that asks it, and name it in reward.function")
    return OurValues({"reward.0.function": "adopted_rewards:reward"}, "adopted_rewards.py calls its reward_func")


def _template(value: Plain, settings: Settings) -> OurValues:
    column = settings["data.input_key"] or "input"
    return OurValues({"data.template": str(value).replace("{}", f"{{{column}}}")})


def _correction(value: Plain, settings: Settings) -> OurValues:
    if settings["algo.advantage.is_correction_type"] != "tis":
        raise Refuse(
            f"the weight is {settings['algo.advantage.is_correction_type']}; here it is of tokens, and bounded (tis)"
        )
    low, high = [number(each) for each in texts(settings["algo.advantage.is_correction_threshold"])]
    return OurValues({"algorithm.tis_max": high}, f"its lower bound of {low} is not kept" if low else "")


def _pacing(value: Plain, settings: Settings) -> OurValues:
    return OurValues(
        {"pacing.mode": "async", "pacing.depth": max(1, settings.whole("train.async_queue_size"))},
        "a queue of so many batches",
    )


def _eval_dataset(value: Plain, settings: Settings) -> OurValues:
    return OurValues({"evaluation.path": str(value), "evaluation.split": settings["eval.split"] or "train"})


def _gpus(settings: Settings) -> Gpus:
    nodes = settings.whole("actor.num_nodes")
    train = nodes * settings.whole("actor.num_gpus_per_node")
    per_engine = settings.whole("vllm.tensor_parallel_size")
    generate = settings.whole("vllm.num_engines") * per_engine or per_engine
    shared = settings.is_on("train.colocate_all") and not settings.is_on("train.async_enable")
    return Gpus(train, generate, shared=shared, nodes=nodes, per_engine=per_engine)


def _rewards(settings: Settings) -> str:
    places = texts(settings["reward.remote_url"] or "")
    if not places[0].endswith(".py"):
        return ""
    return f'''"""OpenRLHF's reward function in the form that `reward.function` takes."""

from transferqueue.adapters.stages.reward_functions import load_callable
from transferqueue.workflows.job.rewards import text_of

reward_func = load_callable({f"{places[0]}:reward_func"!r}, "reward")


def reward(prompts, completions, label=None, **columns):
    """Return the score of each row; queries are prompts with their responses, as OpenRLHF gives them."""
    asked = [text_of(prompt) for prompt in prompts]
    queries = [prompt + text_of(completion) for prompt, completion in zip(asked, completions, strict=True)]
    scores = reward_func(queries, asked, label or [None] * len(queries))
    return [float(score) for score in (scores["rewards"] if isinstance(scores, dict) else scores)]
'''


def _mixture() -> Plain:
    raise Refuse("a mixture: name its parts in data.sources, with their weights")


def _no_floor(value: Plain) -> OurValues:
    if number(value):
        raise Refuse("a cosine ends at 0 here")
    return OurValues({}, "")


_NO_LORA: Final = "ds.lora.rank is 0"
_RULES: Final = (
    # ------------------------------------------------------------ models
    kept("actor.model_name_or_path", "model.path"),
    mapped(
        "reward.model_name_or_path",
        "reward.0.model",
        only_if(lambda s: not s["reward.remote_url"], "reward.remote_url goes before it"),
    ),
    mapped("critic.model_name_or_path", "critic.path", only_if(_is_ppo, "gae alone has a critic")),
    mapped("reward.remote_url", "reward.0.function", _remote),
    refused("train.agent_func_path", "an agent of OpenRLHF's: write it as an environment (`[[environment]]`)"),
    refused(
        "reward.normalize_enable",
        "rewards are compared within their group, or advantages whitened (algorithm.whiten)",
        unless=(False, "false"),
    ),
    refused("reward.clip_range", "rewards are not clipped"),
    kept("reward.overlong_buffer_len", "algorithm.overlong_buffer"),
    kept("reward.overlong_penalty_factor", "algorithm.overlong_penalty"),
    refused("reward.stop_properly_penalty_coef", "see algorithm.mask_truncated and overlong_buffer"),
    mapped("ds.param_dtype", "model.dtype", one_of(DTYPES), default="bf16"),
    refused("ds.load_in_4bit", "models are not quantized", unless=(False, "false")),
    mapped("ds.lora.rank", "trainer.lora_rank", lambda v, s: whole(v)),
    mapped("ds.lora.alpha", "trainer.lora_alpha", only_if(lambda s: s.whole("ds.lora.rank") > 0, _NO_LORA)),
    mapped(
        "ds.lora.target_modules",
        "trainer.lora_targets",
        only_if(lambda s: s.whole("ds.lora.rank") > 0, _NO_LORA, lambda v, s: [] if v == "all-linear" else texts(v)),
    ),
    refused("ds.lora.dropout", "adapters have no dropout here", unless=(0, "0", "0.0")),
    kept("actor.gradient_checkpointing_enable", "trainer.gradient_checkpointing"),
    no_effect("actor.gradient_checkpointing_reentrant", KERNELS),
    refused("actor.freeze_visual_encoder", IMAGES, unless=(False, "false")),
    refused("data.max_images_per_prompt", IMAGES, unless=(0, "0")),
    no_effect("data.image_key", "read with data.max_images_per_prompt"),
    # ------------------------------------------------------------ data
    mapped("data.prompt_dataset", "data.path", lambda v, s: v if "," not in str(v) else _mixture()),
    refused("data.prompt_probs", "a mixture: name its parts in data.sources, with their weights"),
    kept("data.prompt_split", "data.split"),
    kept("data.input_key", "data.prompt", default="input"),
    mapped("data.label_key", "data.columns", label_column),
    mapped("data.input_template", "data.template", _template),
    no_effect("data.apply_chat_template", "a model with a chat template gets it"),
    mapped("data.max_len", "data.prompt_tokens_max", _lengths, default=2048),
    mapped("rollout.max_new_tokens", "sampling.tokens_max", lambda v, s: whole(v)),
    mapped("data.max_samples", "steps", _samples),
    mapped("train.num_episodes", "data.epochs", lambda v, s: whole(v), default=1),
    no_effect("data.disable_fast_tokenizer", KERNELS),
    no_effect("data.dataloader_num_workers", "prompts are read by one process, ahead"),
    kept("train.seed", "seed", default=42),
    # ------------------------------------------------------------ steps
    kept("rollout.batch_size", "trainer.prompts_per_step", default=1024),
    kept("rollout.n_samples_per_prompt", "sampling.group_size", default=1),
    mapped(
        "train.batch_size", "algorithm.minibatches", _minibatches, default=128, why="rows of a step / train.batch_size"
    ),
    kept("train.max_epochs", "algorithm.epochs", default=1),
    no_effect("rollout.vllm_generate_batch_size", "the queue keeps engines supplied"),
    no_effect("train.micro_batch_size", PACKED),
    no_effect("rollout.micro_batch_size", PACKED),
    no_effect("train.dynamic_batch_enable", PACKED),
    kept("train.max_tokens_per_gpu", "trainer.micro_tokens"),
    kept("rollout.max_tokens_per_gpu", "reference.tokens"),
    # ------------------------------------------------------------ sampling
    kept("rollout.temperature", "sampling.temperature", default=1.0),
    refused("rollout.top_p", DRAWN_WHOLE, unless=(1, "1", "1.0")),
    layout("vllm.num_engines"),
    layout("vllm.tensor_parallel_size", default=1),
    mapped("vllm.gpu_memory_utilization", f"{_ENGINE}gpu_memory_utilization", lambda v, s: number(v)),
    mapped("vllm.enforce_eager", f"{_ENGINE}enforce_eager", lambda v, s: True),
    mapped("vllm.enable_prefix_caching", f"{_ENGINE}enable_prefix_caching", lambda v, s: True),
    no_effect("vllm.enable_sleep", "see pacing.mode"),
    no_effect("vllm.sync_backend", "weights come by the queue's channel"),
    no_effect("vllm.sync_with_ray", "weights come by the queue's channel"),
    # ------------------------------------------------------------ the algorithm
    mapped("algo.advantage.estimator", "algorithm.kind", _estimator, default="gae"),
    refused("algo.advantage.no_std_norm", "see algorithm.whiten", unless=(False, "false")),
    kept("algo.advantage.gamma", "algorithm.gamma", default=1.0),
    mapped("algo.advantage.lambd", "algorithm.lam", only_if(_is_ppo, "gae alone reads it"), default=1.0),
    kept("algo.kl.init_coef", "algorithm.kl", default=0.01),
    mapped(
        "algo.kl.use_loss",
        "algorithm.kl_in",
        lambda v, s: "loss" if s.is_on("algo.kl.use_loss") else "reward",
        default=False,
    ),
    kept("algo.kl.estimator", "algorithm.kl_estimator", default="k1"),
    refused("algo.kl.target", "the coefficient of the KL is fixed here"),
    no_effect("algo.kl.horizon", "read with algo.kl.target"),
    mapped(
        "algo.advantage.is_correction_enable",
        "algorithm.tis_max",
        only_if(lambda s: s.is_on("algo.advantage.is_correction_enable"), "off", _correction),
    ),
    no_effect("algo.advantage.is_correction_threshold", "read with is_correction_enable", default=[0.5, 5.0]),
    no_effect("algo.advantage.is_correction_type", "read with is_correction_enable", default="tis"),
    kept("algo.dynamic_filtering_enable", "algorithm.filter_equal"),
    mapped(
        "algo.dynamic_filtering_range",
        "algorithm.filter_equal",
        only_if(
            lambda s: [number(each) for each in texts(s["algo.dynamic_filtering_range"])] == [0, 1],
            "",
            lambda v, s: OurValues({}, "groups of all 0 or all 1 have equal rewards"),
        ),
        default=[0, 1],
    ),
    kept("actor.eps_clip", "algorithm.clip_low", default=0.2),
    mapped("actor.eps_clip_low_high", "algorithm.clip_low", _two),
    kept("actor.dual_clip", "algorithm.dual_clip"),
    mapped("actor.policy_loss_type", "algorithm.ratio", one_of({"ppo": "token", "gspo": "sequence"}), default="ppo"),
    kept("actor.entropy_coef", "algorithm.entropy"),
    refused("actor.aux_loss_coef", EXPERTS, unless=(0, "0", "0.0")),
    mapped("critic.value_clip", "algorithm.value_clip", only_if(_is_ppo, "gae alone has a critic"), default=0.5),
    # ------------------------------------------------------------ the optimizer
    refused("actor.optim", "AdamW trains", unless=("adam",)),
    kept("actor.adam.lr", "trainer.lr", default=1e-6),
    mapped("actor.adam.betas", "trainer.betas", lambda v, s: [number(each) for each in texts(v)], default=[0.9, 0.95]),
    kept("actor.adam.weight_decay", "trainer.weight_decay", default=0.0),
    no_effect("actor.adam.eps", "1e-8, as in OpenRLHF"),
    mapped(
        "actor.lr_scheduler",
        "trainer.schedule",
        one_of(SCHEDULES),
        default="cosine_with_min_lr",
    ),
    mapped("actor.lr_warmup_ratio", "trainer.warmup", _warmup, default=0.03),
    mapped(
        "actor.min_lr_ratio",
        "trainer.schedule",
        only_if(
            lambda s: s["actor.lr_scheduler"] == "cosine_with_min_lr",
            "read with cosine_with_min_lr",
            lambda v, s: _no_floor(v),
        ),
        default=0.1,
    ),
    kept("actor.max_norm", "trainer.gradient_norm_max", default=1.0),
    mapped("critic.adam.lr", "critic.lr", only_if(_is_ppo, "gae alone has a critic"), default=9e-6),
    refused("critic.freezing_steps", "policy and critic train together from the first step", unless=(-1, "-1")),
    no_effect("actor.muon.*", "read with actor.optim=muon"),
    no_effect("critic.*", "everything else of the critic's training is as in trainer"),
    # ------------------------------------------------------------ the run
    layout("actor.num_nodes", default=1),
    layout("actor.num_gpus_per_node", default=8),
    layout("train.colocate_all"),
    no_effect("train.colocate_actor_ref", "see reference.devices"),
    no_effect("train.colocate_critic_reward", "see critic.devices"),
    no_effect("ref.*", "see reference.devices"),
    no_effect("reward.num_nodes", "see reward.processes"),
    no_effect("reward.num_gpus_per_node", "see reward.processes"),
    no_effect("reward.offload", SHARDED),
    mapped("train.async_enable", "pacing.mode", only_if(lambda s: s.is_on("train.async_enable"), "off", _pacing)),
    no_effect("train.async_queue_path", "of OpenRLHF itself on this queue"),
    mapped("train.async_queue_size", "pacing.depth", lambda v, s: OurValues({}, "read with train.async_enable")),
    mapped(
        "train.partial_rollout_enable",
        "weights.in_flight",
        lambda v, s: OurValues(
            {"weights.in_flight": s.is_on("train.partial_rollout_enable")}, "weights change between two tokens"
        ),
    ),
    refused("train.enable_ema", "no mean of weights is kept", unless=(False, "false")),
    no_effect("train.ema_beta", "read with train.enable_ema"),
    refused("train.full_determinism_enable", "see reproducible = true", unless=(False, "false")),
    mapped("ckpt.save_steps", "checkpoint.every", interval, default=-1),
    kept("ckpt.max_num", "checkpoint.keep", default=3),
    no_effect("ckpt.load_enable", RESUMES),
    no_effect("ckpt.*", LOGS),
    mapped("eval.steps", "evaluation.every", interval),
    mapped("eval.dataset", "evaluation.path", _eval_dataset),
    no_effect("eval.split", "read with eval.dataset"),
    kept("eval.temperature", "evaluation.temperature"),
    kept("eval.n_samples_per_prompt", "evaluation.samples"),
    mapped(
        "logger.wandb.key",
        "log.to",
        lambda v, s: OurValues({"log.to": ["wandb"]}, "the key is wandb's own affair: wandb login"),
    ),
    mapped("logger.tensorboard_dir", "log.to", lambda v, s: OurValues({"log.to": ["tensorboard"]}, "")),
    no_effect("logger.*", LOGS),
    no_effect("ds.ring_attn_size", SHARDED),
    no_effect("ds.ring_attn_head_stride", SHARDED),
    no_effect("ds.packing_samples", PACKED),
    no_effect("ds.attn_implementation", KERNELS),
    no_effect("ds.experts_implementation", KERNELS),
    no_effect("ds.use_liger_kernel", KERNELS),
    no_effect("ds.deepcompile", KERNELS),
    no_effect("ds.*", SHARDED),
    no_effect("local_rank", SHARDED),
    no_effect("use_ms", "where models are fetched from"),
)


OPENRLHF: Final = Stack(
    name="openrlhf",
    rules=_RULES,
    always={
        "algorithm.old": ("trainer", "OpenRLHF's ratio is to log-probs that its actor computes"),
        "algorithm.aggregate": ("tokens", "OpenRLHF's loss is the mean over tokens"),
        "pacing.mode": ("sync", "OpenRLHF generates a batch, then trains it, without train.async_enable"),
    },
    entries=("openrlhf.cli.train_ppo_ray", "train_ppo_ray"),
    marks=("actor.model_name_or_path",),
    overrides=False,
    gpus=_gpus,
    rewards=_rewards,
    version="0.11",
    extra="torch",
    on_queue=(
        "examples/stacks/openrlhf.patch in its environment, transferqueue serve --durability process, and",
        "TRANSFERQUEUE_ADDRESS in the environment of Ray's workers; then the same command with --train.async_enable",
        "--train.async_queue_path transferqueue.adapters.trainers.openrlhf.RolloutQueues:",
        "batches outlive a crash; transferqueue docs openrlhf",
    ),
)
"""OpenRLHF's table."""
