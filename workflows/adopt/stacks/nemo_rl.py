"""NeMo-RL: keys of ``examples/run_grpo.py`` (YAML, and overrides ``a.b=c``)."""

from __future__ import annotations

from typing import Final

from transferqueue.workflows.adopt.mapping import (
    DRAWN_WHOLE,
    DTYPES,
    IMAGES,
    KERNELS,
    KL_ESTIMATORS,
    LOGS,
    OWN_QUEUE,
    PACKED,
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
_MEGATRON: Final = "policy.megatron_cfg"
_DTENSOR: Final = "policy.dtensor_cfg"
_DATA_SETS: Final = {
    "OpenMathInstruct-2": ("nvidia/OpenMathInstruct-2", "train_1M", "{problem}", "expected_answer"),
    "DAPOMath17K": ("BytedTsinghua-SIA/DAPO-Math-17k", "train", "", ""),
    "DAPOMathAIME2024": ("BytedTsinghua-SIA/AIME-2024", "train", "", ""),
    "gsm8k": ("openai/gsm8k", "train", "{question}", "answer"),
    "DeepScaler": ("agentica-org/DeepScaleR-Preview-Dataset", "train", "{problem}", "answer"),
    "AIME2024": ("HuggingFaceH4/aime_2024", "train", "{problem}", "answer"),
}
"""Data sets that NeMo-RL calls by names of its own: id, split, template, column of the answer."""


def _megatron(settings: Settings) -> bool:
    return settings.is_on(f"{_MEGATRON}.enabled")


def _dtensor(settings: Settings) -> bool:
    return not _megatron(settings)


def _off_policy(settings: Settings) -> bool:
    return settings.is_on("grpo.async_grpo.enabled")


def _shaped(settings: Settings) -> bool:
    return settings.is_on("grpo.reward_shaping.enabled")


def _lora(settings: Settings) -> bool:
    return settings.is_on(f"{_DTENSOR}.lora_cfg.enabled") and _dtensor(settings)


def _estimator(value: Plain, settings: Settings) -> OurValues:
    if value == "reinforce_plus_plus":
        return OurValues({"algorithm.kind": "reinforce_pp"})
    if value != "grpo":
        raise Refuse(f"there is no advantage {value!r} here; there are grpo and reinforce_plus_plus")
    return OurValues({})


def _compares(settings: Settings) -> bool:
    return settings["grpo.adv_estimator.name"] in (None, "grpo")


def _normalizes(value: Plain, settings: Settings) -> OurValues:
    return divided(flag(value), 1e-6)


def _leave_one_out(value: Plain, settings: Settings) -> OurValues:
    if not flag(value):
        return OurValues({"algorithm.kind": "grpo"})
    if settings.is_on("grpo.normalize_rewards"):
        raise Refuse("a baseline of the others goes with std none (kind rloo); grpo centres with the row itself")
    return OurValues({"algorithm.kind": "rloo"})


def _minibatches(value: Plain, settings: Settings) -> int:
    rows = settings.whole("grpo.num_prompts_per_step") * settings.whole("grpo.num_generations_per_prompt")
    return parts_of(rows, whole(value), "policy.train_global_batch_size")


def _clip(value: Plain, settings: Settings) -> Plain:
    return OurValues({}, "of positive advantages") if value is None else number(value)


def _truncation(value: Plain, settings: Settings) -> OurValues:
    if not settings.is_on("loss_fn.use_importance_sampling_correction"):
        return OurValues({}, "use_importance_sampling_correction is off")
    if settings["loss_fn.truncated_importance_sampling_type"] != "tis":
        raise Refuse("importance weights are of tokens here, and bounded (tis)")
    return OurValues({"algorithm.tis_max": number(value)})


def _correction(value: Plain, settings: Settings) -> OurValues:
    if flag(value) and settings["loss_fn.truncated_importance_sampling_ratio"] is None:
        raise Refuse("importance weights are bounded here: set algorithm.tis_max")
    return OurValues({}, "read with truncated_importance_sampling_ratio" if flag(value) else "off")


def _data_set(value: Plain, settings: Settings) -> Plain:
    if value not in _DATA_SETS:
        raise Refuse(f"{value!r} is a class of NeMo-RL's: write its rows to a file, and set data.path")
    path, split, template, answer = _DATA_SETS[value]
    by_key = {"data.path": path, "data.split": split}
    by_key |= {"data.template": template} if template else {}
    by_key |= {"data.columns.answer": answer} if answer else {}
    by_key |= {"data.subset": "main"} if value == "gsm8k" else {}
    return OurValues(by_key, "the data set that NeMo-RL's class loads")


def _validation(value: Plain, settings: Settings) -> Plain:
    if value not in _DATA_SETS:
        raise Refuse(f"{value!r} is a class of NeMo-RL's: write its rows to a file, and set evaluation.path")
    return OurValues({"evaluation.path": _DATA_SETS[value][0], "evaluation.split": _DATA_SETS[value][1]})


def _input(value: Plain, settings: Settings) -> OurValues:
    return OurValues({"data.template": f"{{{value}}}"})


def _answer(value: Plain, settings: Settings) -> OurValues:
    return OurValues({"data.columns.answer": str(value)})


def _environment(value: Plain, settings: Settings) -> OurValues:
    if value != "math":
        raise Refuse(f"{value!r} is an environment of NeMo-RL's: write it as one of yours (`[[environment]]`)")
    return OurValues(
        {"reward.0.function": "transferqueue.workflows.job.rewards:last_number"},
        "compares the final number; math_verify also compares formulas",
    )


def _schedule(value: Plain, settings: Settings) -> OurValues:
    warmup, schedule = 0, "constant"
    for part in value if isinstance(value, list) else [value]:
        name = str(part.get("name", "")).rpartition(".")[2] if isinstance(part, dict) else ""
        arguments = (part.get("kwargs") or {}) if isinstance(part, dict) else {}
        if name == "LinearLR" and number(arguments.get("end_factor", 1)) == 1:
            warmup = whole(arguments.get("total_iters", 0))
        elif name == "CosineAnnealingLR" and not number(arguments.get("eta_min", 0)):
            schedule = "cosine"
        elif name not in ("ConstantLR", ""):
            raise Refuse(f"there is no schedule {name} here; there are a linear warmup, then constant or cosine")
    return OurValues({"trainer.warmup": warmup, "trainer.schedule": schedule}, "the rate rises from 0")


def _total(value: Plain, settings: Settings) -> OurValues:
    longest = settings.whole("data.max_input_seq_length") + settings.whole("policy.generation.max_new_tokens")
    if longest > whole(value):
        raise Refuse(f"prompt and response have bounds of their own here, {longest} together: lower one of them")
    return OurValues({}, "the sum of both bounds")


def _log(value: Plain, settings: Settings) -> OurValues:
    names = [name for name in ("tensorboard", "wandb", "mlflow") if settings.is_on(f"logger.{name}_enabled")]
    return OurValues({"log.to": names} if names else {}, "" if flag(value) else "off")


def _gpus(settings: Settings) -> Gpus:
    nodes, per_node = settings.whole("cluster.num_nodes"), settings.whole("cluster.gpus_per_node")
    per_engine = settings.whole("policy.generation.vllm_cfg.tensor_parallel_size") or 1
    if settings["policy.generation.colocated.enabled"] is None or settings.is_on("policy.generation.colocated.enabled"):
        return Gpus(nodes * per_node, nodes * per_node, shared=True, nodes=nodes, per_engine=per_engine)
    engine_nodes = settings.whole("policy.generation.colocated.resources.num_nodes")
    engine_gpus = settings.whole("policy.generation.colocated.resources.gpus_per_node") or per_node
    generate = engine_nodes * engine_gpus if nodes > 1 else engine_gpus
    return Gpus(max(1, nodes * per_node - generate), generate, nodes=nodes, per_engine=per_engine)


def _no_dropout(value: Plain) -> OurValues:
    if number(value):
        raise Refuse("adapters have no dropout here")
    return OurValues({}, "none")


_OFF: Final = (False, "false", None)
_UNREAD: Final = (
    "grpo.best_at_k_*",
    "grpo.combined_training_*",
    "grpo.dynamic_sampling_oversample_ratio",
    "grpo.invalid_tool_call_strategy",
    "grpo.num_val_generations_per_prompt",
    "grpo.use_best_at_k",
    "grpo.use_combined_training",
    "grpo.zero_variance_prompt_filtering",
    "policy.activation_checkpointing_enabled",
    "sif_dir",
)
"""Keys of its examples that its code does not name."""
_RULES: Final = (
    # ------------------------------------------------------------ steps
    kept("grpo.num_prompts_per_step", "trainer.prompts_per_step"),
    kept("grpo.num_generations_per_prompt", "sampling.group_size"),
    kept("grpo.max_num_steps", "steps"),
    kept("grpo.max_num_epochs", "data.epochs"),
    refused("grpo.max_rollout_turns", "episodes are environments here (`[[environment]]`)", unless=(1, "1")),
    mapped("grpo.val_period", "evaluation.every", interval),
    no_effect("grpo.val_at_start", "an evaluation before the run is always made"),
    no_effect("grpo.val_at_end", "an evaluation after the run is always made"),
    no_effect("grpo.val_batch_size", "evaluation takes rows as engines are free"),
    refused("grpo.val_start_at", "evaluations come every evaluation.every steps", unless=(-1, 0)),
    kept("grpo.max_val_samples", "evaluation.rows"),
    kept("grpo.val_num_generations_per_prompt", "evaluation.samples"),
    refused("grpo.stop_at_validation_metric", "see evaluation.patience"),
    no_effect("grpo.stop_at_validation_threshold", "read with stop_at_validation_metric"),
    kept("grpo.seed", "seed"),
    # ------------------------------------------------------------ the algorithm
    mapped("grpo.normalize_rewards", "algorithm.std", only_if(_compares, "grpo alone reads it", _normalizes)),
    mapped(
        "grpo.use_leave_one_out_baseline", "algorithm.kind", only_if(_compares, "grpo alone reads it", _leave_one_out)
    ),
    mapped("grpo.adv_estimator.name", "algorithm.kind", _estimator),
    no_effect("grpo.adv_estimator.*", "as in grpo"),
    kept("grpo.overlong_filtering", "algorithm.mask_truncated"),
    refused("grpo.advantage_clip_low", "advantages are not clipped"),
    refused("grpo.advantage_clip_high", "advantages are not clipped"),
    kept("grpo.use_dynamic_sampling", "algorithm.filter_equal"),
    no_effect("grpo.dynamic_sampling_max_gen_batches", "groups with equal rewards are replaced until the step is full"),
    no_effect("grpo.batch_multiplier", "the queue keeps engines supplied"),
    no_effect("grpo.deduplicate_multimodal_data", "equal values of rows are stored once"),
    no_effect("grpo.debug_payload_metrics", LOGS),
    refused("policy.is_vlm", IMAGES, unless=_OFF),
    refused("policy.tokenizer.video.*", IMAGES),
    no_effect("policy.disable_modelopt_layer_spec", "of quantized models"),
    no_effect("_*", "a value that other keys of the file name"),
    *(no_effect(name, "NeMo-RL of this version does not read it") for name in _UNREAD),
    mapped(
        "grpo.reward_shaping.overlong_buffer_length",
        "algorithm.overlong_buffer",
        only_if(_shaped, "reward_shaping is off"),
    ),
    mapped(
        "grpo.reward_shaping.overlong_buffer_penalty",
        "algorithm.overlong_penalty",
        only_if(_shaped, "reward_shaping is off"),
    ),
    no_effect("grpo.reward_shaping.enabled", "algorithm.overlong_buffer says it"),
    no_effect("grpo.reward_shaping.max_response_length", "sampling.tokens_max says it"),
    refused("grpo.reward_shaping.stop_properly_penalty_coef", "see algorithm.mask_truncated and overlong_buffer"),
    refused("grpo.reward_scaling.enabled", "rewards are as their functions return them", unless=_OFF),
    no_effect("grpo.reward_scaling.*", "read with reward_scaling.enabled"),
    refused("grpo.seq_logprob_error_threshold", "rows are not masked by their ratio"),
    refused("grpo.invalid_tool_call_advantage", "an advantage follows from the reward"),
    refused("grpo.malformed_thinking_advantage", "an advantage follows from the reward"),
    mapped("grpo.async_grpo.enabled", "pacing.mode", lambda v, s: "async" if flag(v) else "sync"),
    mapped(
        "grpo.async_grpo.max_trajectory_age_steps", "pacing.max_staleness", only_if(_off_policy, "async_grpo is off")
    ),
    mapped("grpo.async_grpo.in_flight_weight_updates", "weights.in_flight", only_if(_off_policy, "async_grpo is off")),
    no_effect("grpo.async_grpo.*", "see pacing"),
    no_effect("grpo.async_grpo", "off"),
    mapped(
        "async_rl.sampler.max_staleness_versions", "pacing.max_staleness", only_if(_off_policy, "async_grpo is off")
    ),
    no_effect("async_rl.*", "see pacing; failed calls are tried again, and rows of dead processes come again"),
    refused("grpo.penalize_*", "an advantage follows from the reward", unless=_OFF),
    no_effect("grpo.skip_reference_policy_logprobs_calculation", "without algorithm.kl there is no reference"),
    no_effect("grpo.calculate_advantages_on_gpu", KERNELS),
    refused("reward_penalties.penalize_*", "an advantage follows from the reward", unless=_OFF),
    no_effect("reward_penalties.*", "read with a penalty"),
    kept("loss_fn.reference_policy_kl_penalty", "algorithm.kl"),
    mapped("loss_fn.reference_policy_kl_type", "algorithm.kl_estimator", one_of(KL_ESTIMATORS)),
    mapped("loss_fn.use_kl_in_reward", "algorithm.kl_in", lambda v, s: "reward" if flag(v) else "loss"),
    refused("loss_fn.kl_input_clamp_value", "the KL of a token is not clamped"),
    refused("loss_fn.kl_output_clamp_value", "the KL of a token is not clamped"),
    kept("loss_fn.ratio_clip_min", "algorithm.clip_low"),
    kept("loss_fn.ratio_clip_max", "algorithm.clip_high"),
    kept("loss_fn.ratio_clip_c", "algorithm.dual_clip"),
    mapped("loss_fn.token_level_loss", "algorithm.aggregate", lambda v, s: "tokens" if flag(v) else "rows"),
    mapped(
        "loss_fn.sequence_level_importance_ratios", "algorithm.ratio", lambda v, s: "sequence" if flag(v) else "token"
    ),
    mapped("loss_fn.use_importance_sampling_correction", "algorithm.tis_max", _correction),
    mapped("loss_fn.truncated_importance_sampling_ratio", "algorithm.tis_max", _truncation),
    no_effect("loss_fn.truncated_importance_sampling_type", "read with truncated_importance_sampling_ratio"),
    refused("loss_fn.truncated_importance_sampling_ratio_min", "importance weights have an upper bound alone"),
    refused("loss_fn.use_on_policy_kl_approximation", "the KL is of the tokens drawn", unless=_OFF),
    no_effect("loss_fn.force_on_policy_ratio", "a step of one update has ratio 1 (algorithm.old)"),
    refused("loss_fn.use_cispo", "the ratio is clipped, not its weight", unless=_OFF),
    refused("loss_fn.disable_ppo_ratio", "the loss has a ratio", unless=_OFF),
    refused("loss_fn.positive_example_nll_weight", "there is no loss of right answers alone", unless=(0, "0.0")),
    # ------------------------------------------------------------ model and optimizer
    kept("policy.model_name", "model.path"),
    kept("policy.tokenizer.name", "model.tokenizer"),
    mapped("policy.tokenizer.chat_template_kwargs", "model.template_args", lambda v, s: v),
    no_effect("policy.tokenizer.chat_template_kwargs.*", "set model.template_args"),
    refused(
        "policy.tokenizer.chat_template", "put the template in a file, and set model.chat_template", unless=("default",)
    ),
    no_effect("policy.tokenizer.use_fastokens", KERNELS),
    refused("policy.hf_config_overrides.*", "a model is as its config.json says"),
    refused("policy.hf_config_overrides", "a model is as its config.json says", unless=({},)),
    mapped(
        "policy.train_global_batch_size",
        "algorithm.minibatches",
        _minibatches,
        why="rows of a step / train_global_batch_size",
    ),
    mapped("policy.max_total_sequence_length", "data.prompt_tokens_max", _total),
    mapped("policy.precision", "model.dtype", one_of(DTYPES)),
    kept("policy.max_grad_norm", "trainer.gradient_norm_max"),
    mapped("policy.optimizer.kwargs.lr", "trainer.lr", only_if(_dtensor, "Megatron trains")),
    mapped("policy.optimizer.kwargs.weight_decay", "trainer.weight_decay", only_if(_dtensor, "Megatron trains")),
    mapped("policy.optimizer.kwargs.betas", "trainer.betas", only_if(_dtensor, "Megatron trains")),
    no_effect("policy.optimizer.kwargs.*", KERNELS),
    refused("policy.optimizer.name", "AdamW trains", unless=("torch.optim.AdamW",)),
    mapped("policy.scheduler", "trainer.schedule", only_if(_dtensor, "Megatron trains", _schedule)),
    mapped(f"{_MEGATRON}.optimizer.lr", "trainer.lr", only_if(_megatron, "DTensor trains")),
    mapped(f"{_MEGATRON}.optimizer.weight_decay", "trainer.weight_decay", only_if(_megatron, "DTensor trains")),
    mapped(
        f"{_MEGATRON}.optimizer.adam_beta1",
        "trainer.betas",
        only_if(_megatron, "DTensor trains", lambda v, s: [number(v), s.number(f"{_MEGATRON}.optimizer.adam_beta2")]),
    ),
    mapped(f"{_MEGATRON}.scheduler.lr_warmup_iters", "trainer.warmup", only_if(_megatron, "DTensor trains")),
    mapped(
        f"{_MEGATRON}.scheduler.lr_decay_style",
        "trainer.schedule",
        only_if(_megatron, "DTensor trains", one_of(SCHEDULES)),
    ),
    mapped(
        f"{_MEGATRON}.activation_checkpointing", "trainer.gradient_checkpointing", only_if(_megatron, "DTensor trains")
    ),
    refused(f"{_MEGATRON}.peft.enabled", "adapters of Megatron's own kind", unless=_OFF),
    refused(f"{_MEGATRON}.fp8_cfg.enabled", "passes are in model.dtype", unless=_OFF),
    no_effect(f"{_MEGATRON}.*", SHARDED),
    mapped(
        f"{_DTENSOR}.activation_checkpointing", "trainer.gradient_checkpointing", only_if(_dtensor, "Megatron trains")
    ),
    mapped(f"{_DTENSOR}.lora_cfg.dim", "trainer.lora_rank", only_if(_lora, "lora_cfg is off")),
    mapped(f"{_DTENSOR}.lora_cfg.alpha", "trainer.lora_alpha", only_if(_lora, "lora_cfg is off")),
    mapped(
        f"{_DTENSOR}.lora_cfg.target_modules",
        "trainer.lora_targets",
        only_if(
            _lora, "lora_cfg is off", lambda v, s: [] if s.is_on(f"{_DTENSOR}.lora_cfg.match_all_linear") else texts(v)
        ),
    ),
    mapped(f"{_DTENSOR}.lora_cfg.dropout", "", only_if(_lora, "lora_cfg is off", lambda v, s: _no_dropout(v))),
    no_effect(f"{_DTENSOR}.*", SHARDED),
    mapped(
        "policy.sequence_packing.train_mb_tokens",
        "trainer.micro_tokens",
        only_if(lambda s: s.is_on("policy.sequence_packing.enabled"), "sequence_packing is off"),
    ),
    mapped(
        "policy.dynamic_batching.train_mb_tokens",
        "trainer.micro_tokens",
        only_if(lambda s: s.is_on("policy.dynamic_batching.enabled"), "dynamic_batching is off"),
    ),
    no_effect("policy.sequence_packing.*", PACKED),
    no_effect("policy.dynamic_batching.*", PACKED),
    no_effect("policy.train_micro_batch_size", PACKED),
    no_effect("policy.logprob_batch_size", PACKED),
    no_effect("policy.logprob_chunk_size", KERNELS),
    no_effect("policy.generation_batch_size", PACKED),
    no_effect("policy.make_sequence_length_divisible_by", PACKED),
    no_effect("policy.offload_optimizer_for_logprob", SHARDED),
    refused("policy.draft.enabled", "no draft model is trained", unless=_OFF),
    no_effect("policy.draft.*", "read with policy.draft.enabled"),
    no_effect("policy.optimizer", "Megatron trains"),
    refused("policy.router_replay.enabled", "routes of vLLM are not replayed", unless=_OFF),
    no_effect("policy.router_replay.*", "read with router_replay.enabled"),
    refused("policy.quant_*", "models are not quantized"),
    no_effect("policy.refit_buffer_size_gb", "weights come by the queue's channel"),
    # ------------------------------------------------------------ generation
    mapped(
        "policy.generation.backend",
        "engine.0.kind",
        lambda v, s: (
            "vllm"
            if v == "vllm"
            else OurValues(
                {"engine.0.kind": "vllm"}, f"{v} is reached here as a server or not at all; vLLM runs in the job"
            )
        ),
    ),
    kept("policy.generation.max_new_tokens", "sampling.tokens_max"),
    kept("policy.generation.temperature", "sampling.temperature"),
    refused("policy.generation.top_p", DRAWN_WHOLE, unless=(1, "1.0")),
    refused("policy.generation.top_k", DRAWN_WHOLE),
    mapped("policy.generation.val_temperature", "evaluation.temperature", lambda v, s: number(v)),
    refused("policy.generation.val_top_p", "evaluation draws from the whole distribution", unless=(1, "1.0")),
    refused("policy.generation.val_top_k", "evaluation draws from the whole distribution"),
    mapped("policy.generation.stop_strings", "sampling.stop", lambda v, s: texts(v)),
    refused("policy.generation.stop_token_ids", "set sampling.stop to their texts"),
    layout("policy.generation.vllm_cfg.tensor_parallel_size"),
    mapped(
        "policy.generation.vllm_cfg.gpu_memory_utilization", f"{_ENGINE}gpu_memory_utilization", lambda v, s: number(v)
    ),
    mapped("policy.generation.vllm_cfg.enforce_eager", f"{_ENGINE}enforce_eager", lambda v, s: flag(v)),
    no_effect("policy.generation.vllm_cfg.max_model_len", "an engine takes the longest row"),
    no_effect("policy.generation.vllm_cfg.*", KERNELS),
    kept("policy.generation.vllm_kwargs.*", "engine.0.options.*"),
    no_effect("policy.generation.vllm_kwargs", "none", default=None),
    layout("policy.generation.colocated.enabled"),
    layout("policy.generation.colocated.resources.gpus_per_node"),
    layout("policy.generation.colocated.resources.num_nodes"),
    no_effect("policy.generation.*", "of how NeMo-RL runs its engines"),
    # ------------------------------------------------------------ data and rewards
    kept("data.max_input_seq_length", "data.prompt_tokens_max"),
    kept("data.shuffle", "data.shuffle"),
    no_effect("data.num_workers", "prompts are read by one process, ahead"),
    refused("data.use_multiple_dataloader", "name the parts in data.sources, with their weights", unless=_OFF),
    mapped(
        "data.train.dataset_name",
        "data.path",
        only_if(lambda s: s["data.train.data_path"] is None, "data_path says it", _data_set),
    ),
    kept("data.train.data_path", "data.path"),
    mapped("data.train.input_key", "data.template", _input),
    mapped("data.train.output_key", "data.columns", _answer),
    refused("data.train.split_validation_size", "set evaluation.path to rows of their own", unless=(0,)),
    no_effect("data.train.seed", "of split_validation_size"),
    mapped(
        "data.validation.dataset_name",
        "evaluation.path",
        only_if(lambda s: s["data.validation.data_path"] is None, "data_path says it", _validation),
    ),
    kept("data.validation.data_path", "evaluation.path"),
    refused("data.train", "several data sets: name them in data.sources"),
    no_effect("data.validation", "there is none"),
    refused("data.default.prompt_file", "put its text into data.template, with the column's name in the braces"),
    refused("data.default.system_prompt_file", "put its text into data.system"),
    mapped("data.default.env_name", "reward.0.function", _environment),
    mapped("data.default.input_key", "data.template", _input),
    mapped("data.default.output_key", "data.columns", _answer),
    no_effect("data.default.dataset_name", "read with data_path"),
    refused("data.default.processor", "a function of NeMo-RL's makes its prompts", unless=("math_hf_data_processor",)),
    refused("data.*", "NeMo-RL reads it; there is nothing like it here"),
    no_effect("env.math.num_workers", "see reward.processes"),
    refused("env.math.math_verify_impl", "NeMo-RL's verifier: reward.function compares numbers, or is yours"),
    no_effect("env.*", "of environments that no data set names"),
    # ------------------------------------------------------------ the run
    mapped(
        "checkpointing.save_period",
        "checkpoint.every",
        only_if(lambda s: s.is_on("checkpointing.enabled"), "checkpointing is off", interval),
    ),
    mapped(
        "checkpointing.enabled",
        "checkpoint.every",
        lambda v, s: OurValues({} if flag(v) else {"checkpoint.every": 0}, ""),
    ),
    mapped(
        "checkpointing.keep_top_k", "checkpoint.keep", lambda v, s: whole(v), why="the newest ones; see checkpoint.best"
    ),
    no_effect("checkpointing.*", "a checkpoint has model, optimizer and queue"),
    mapped("logger.wandb_enabled", "log.to", _log),
    mapped("logger.tensorboard_enabled", "log.to", _log),
    mapped("logger.mlflow_enabled", "log.to", _log),
    refused("logger.swanlab_enabled", "name a function of yours in log.to", unless=_OFF),
    no_effect("logger.*", LOGS),
    layout("cluster.gpus_per_node"),
    layout("cluster.num_nodes"),
    no_effect("cluster.*", "see on and ray.options"),
    no_effect("data_plane*", OWN_QUEUE),
    refused("on_policy_distillation.*", 'see algorithm.kind = "distill"'),
    refused("on_policy_distillation", 'see algorithm.kind = "distill"'),
    no_effect("checkpoint_dir", LOGS),
)


NEMO_RL: Final = Stack(
    name="nemo-rl",
    rules=_RULES,
    always={
        "algorithm.old": ("trainer", "NeMo-RL's ratio is to log-probs that its policy computes before the step"),
        "algorithm.kind": ("grpo", "of run_grpo.py"),
    },
    entries=("run_grpo.py", "run_grpo_math.py"),
    marks=("policy", "grpo"),
    overrides=True,
    gpus=_gpus,
    version="main of August 2026",
    extra="drop-in",
    on_queue=(
        "in the environment of NeMo-RL and of its workers; then there",
        "transferqueue drop-in on",
        "and the same command with data_plane.enabled=true data_plane.impl=transfer_queue: NeMo-RL's own adapter",
        "transferqueue docs nemo-rl says what ran, and how its factory takes our client instead",
    ),
)
"""NeMo-RL's table."""
