"""TRL: keys of ``trl grpo`` and ``trl rloo`` (``--key value``, or YAML), those of GRPOConfig and ModelConfig."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from transferqueue.workflows.adopt.mapping import (
    DRAWN_WHOLE,
    EPSILON,
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
    flag,
    interval,
    kept,
    layout,
    loggers,
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
from transferqueue.workflows.job.devices.model_sizes import EXPERT_KEYS, local_config, text_config

_STOCK: Final = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Reward functions of ``trl.rewards`` that its command line takes by name, without arguments."""


def _processes(settings: Settings) -> int:
    return settings.whole("num_processes") or 1


def _rows(settings: Settings) -> int:
    """Rows of one generation."""
    if settings["generation_batch_size"] is not None:
        return settings.whole("generation_batch_size")
    updates = settings.whole("steps_per_generation") or settings.whole("gradient_accumulation_steps")
    return settings.whole("per_device_train_batch_size") * _processes(settings) * updates


def _update_rows(settings: Settings) -> int:
    accumulated = settings.whole("gradient_accumulation_steps")
    return settings.whole("per_device_train_batch_size") * _processes(settings) * accumulated


def _prompts(value: Plain, settings: Settings) -> OurValues:
    """A generation's prompts are a step here; its updates are minibatches."""
    rows, group = _rows(settings), settings.whole("num_generations")
    prompts = parts_of(rows, group, "num_generations")
    minibatches = parts_of(rows, _update_rows(settings), "the rows of an update")
    return OurValues(
        {"trainer.prompts_per_step": prompts, "algorithm.minibatches": minibatches},
        f"{rows} rows of a generation / {group} of a prompt; {minibatches} updates of each",
    )


def _part_of_prompts(value: Plain, settings: Settings) -> OurValues:
    whole(value)
    return OurValues({}, "read with per_device_train_batch_size")


def _steps(value: Plain, settings: Settings) -> Plain:
    if whole(value) <= 0:
        return OurValues({}, "num_train_epochs says it")
    updates = max(1, _rows(settings) // max(1, _update_rows(settings))) * max(1, settings.whole("num_iterations"))
    return OurValues({"steps": max(1, whole(value) // updates)}, f"TRL counts updates, {updates} of a generation")


def _epochs(value: Plain, settings: Settings) -> Plain:
    if settings.whole("max_steps") > 0:
        return OurValues({"data.epochs": 0}, "max_steps says it")
    if isinstance(number(value), float):
        raise Refuse("epochs are whole here: set steps")
    return whole(value)


def _warmup_ratio(value: Plain, settings: Settings) -> Plain:
    if number(value) == 0:
        return 0
    if settings.whole("max_steps") <= 0:
        raise Refuse("a share of the steps, whose number max_steps does not say; set trainer.warmup")
    return round(number(value) * settings.whole("max_steps"))


def _loss(value: Plain, settings: Settings) -> Plain:
    losses = {"grpo": "rows", "dapo": "tokens", "bnpo": "tokens", "dr_grpo": "rows_max"}
    if value not in losses:
        raise Refuse(f"there is no loss {value!r} here; there are {', '.join(losses)}")
    return losses[value]


def _std(value: Plain, settings: Settings) -> Plain:
    named = {"group": "sample", "true": "sample", "none": "none", "false": "none"}
    if str(value).lower() not in named:
        raise Refuse(f"rewards are divided by the deviation of their group or not at all, not by that of the {value}")
    return named[str(value).lower()]


def _functions(value: Plain, settings: Settings) -> OurValues:
    weights = settings["reward_weights"]
    by_key: dict[str, Plain] = {}
    for place, name in enumerate(texts(value)):
        module, dot, function = name.rpartition(".")
        if name in _STOCK:
            named = f"trl.rewards:{name}"
        elif dot:
            named = f"{module}:{function}"
        else:
            raise Refuse(f"{name!r} takes arguments that TRL's command line fixes: write a function that calls it")
        by_key[f"reward.{place}.function"] = named
        if isinstance(weights, list) and place < len(weights):
            by_key[f"reward.{place}.weight"] = number(weights[place])
    return OurValues(by_key, "reward functions have TRL's form here")


def _reports(value: Plain, settings: Settings) -> Plain:
    return loggers(["tensorboard", "wandb", "mlflow"] if value == "all" else value, settings)


def _vllm(settings: Settings) -> bool:
    return settings.is_on("use_vllm")


def _lora(settings: Settings) -> bool:
    return settings.is_on("use_peft")


def _bf16(value: Plain, settings: Settings) -> Plain:
    return OurValues({"model.dtype": "bfloat16"} if flag(value) else {}, "")


def _truncated(settings: Settings) -> bool:
    return _vllm(settings) and settings.is_on("vllm_importance_sampling_correction")


def _corrects(value: Plain, settings: Settings) -> Plain:
    if not _truncated(settings):
        return OurValues({}, "off")
    if settings["vllm_importance_sampling_mode"] != "token_truncate":
        raise Refuse(
            f"the weight is {settings['vllm_importance_sampling_mode']}; here it is of tokens, and bounded "
            "(token_truncate, which is algorithm.tis_max)"
        )
    return OurValues({"algorithm.tis_max": settings.number("vllm_importance_sampling_clip_max")}, "")


def _corrected_kl(value: Plain, settings: Settings) -> Plain:
    if not flag(value) or settings.number("beta") == 0:
        return OurValues({}, "off")
    raise Refuse("TRL multiplies the KL by the importance ratio, whose gradient counts even at 1; set it to false")


def _router_loss(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """The router's loss of a mixture of experts, whose coefficient is the model's own where the job gives none."""
    if settings["router_aux_loss_coef"] is not None or settings["model_name_or_path"] is None:
        return
    config = local_config(str(settings["model_name_or_path"]), str(settings["model_revision"] or ""))
    if not config:
        yield "router_aux_loss_coef", "", f"{EXPERTS}: TRL adds the router's, if the model is a mixture of experts"
        return
    config = text_config(config)
    own = "that of its architecture" if any(config.get(key) for key in EXPERT_KEYS) else ""
    if coefficient := config.get("router_aux_loss_coef", own):
        yield "router_aux_loss_coef", str(coefficient), f"{EXPERTS}: TRL adds the router's, by the model's coefficient"


def _gpus(settings: Settings) -> Gpus:
    tensor_parallel = settings.whole("vllm_tensor_parallel_size") or 1
    return Gpus(_processes(settings), _processes(settings), shared=True, per_engine=tensor_parallel)


def _no_dropout() -> Plain:
    raise Refuse("adapters have no dropout here")


_EVALUATED: Final = "eval_strategy is no"
_EVALUATES: Final = "how transformers evaluates; see evaluation"
_CHECKPOINT: Final = "a checkpoint has model, optimizer and queue"
_RULES: Final = (
    # ------------------------------------------------------------ model and data
    kept("model_name_or_path", "model.path"),
    kept("model_revision", "model.revision"),
    kept("trust_remote_code", "model.trust_remote_code"),
    mapped("dtype", "model.dtype", lambda v, s: OurValues({}, "auto") if v == "auto" else v),
    mapped("torch_dtype", "model.dtype", lambda v, s: OurValues({}, "auto") if v == "auto" else v),
    mapped("bf16", "model.dtype", _bf16),
    mapped("fp16", "model.dtype", only_if(lambda s: s.is_on("fp16"), "off", lambda v, s: "float16")),
    mapped("chat_template_kwargs", "model.template_args", lambda v, s: v),
    refused("chat_template_path", "put the template in a file, and set model.chat_template"),
    no_effect("attn_implementation", KERNELS),
    refused("load_in_4bit", "models are not quantized", unless=(False, "false")),
    refused("load_in_8bit", "models are not quantized", unless=(False, "false")),
    no_effect("bnb_*", "read with load_in_4bit"),
    no_effect("use_bnb_nested_quant", "read with load_in_4bit"),
    refused("model_init_kwargs", "a model is as its config.json says"),
    kept("dataset_name", "data.path"),
    kept("dataset_config", "data.subset"),
    kept("dataset_train_split", "data.split"),
    mapped(
        "dataset_test_split", "evaluation.split", only_if(lambda s: s["eval_strategy"] not in (None, "no"), _EVALUATED)
    ),
    refused("dataset_streaming", "a data set is read whole", unless=(False, "false")),
    refused("datasets", "a mixture: name its parts in data.sources, with their weights"),
    kept("shuffle_dataset", "data.shuffle"),
    kept("max_prompt_length", "data.prompt_tokens_max"),
    kept("seed", "seed", default=42),
    refused("data_seed", "prompts are drawn by seed"),
    refused("full_determinism", "see reproducible = true", unless=(False, "false")),
    refused("train_sampling_strategy", "prompts are drawn by seed", unless=("random",)),
    no_effect("length_column_name", "read with train_sampling_strategy"),
    # ------------------------------------------------------------ rewards
    mapped("reward_funcs", "reward", _functions),
    mapped("reward_weights", "reward", lambda v, s: OurValues({}, "read with reward_funcs")),
    mapped(
        "reward_model_name_or_path",
        "reward",
        lambda v, s: OurValues({f"reward.{len(texts(s['reward_funcs'] or []))}.model": v}, ""),
    ),
    refused(
        "multi_objective_aggregation",
        "weighted rewards are summed, then compared within their group",
        unless=("sum_then_normalize",),
    ),
    # ------------------------------------------------------------ steps
    mapped("per_device_train_batch_size", "trainer.prompts_per_step", _prompts, default=8),
    mapped("gradient_accumulation_steps", "trainer.prompts_per_step", _part_of_prompts, default=1),
    mapped("steps_per_generation", "trainer.prompts_per_step", _part_of_prompts),
    mapped("generation_batch_size", "trainer.prompts_per_step", _part_of_prompts),
    kept("num_generations", "sampling.group_size", default=8),
    kept("num_iterations", "algorithm.epochs", default=1),
    mapped("max_steps", "steps", _steps, default=-1),
    mapped("num_train_epochs", "data.epochs", _epochs, default=3),
    kept("max_completion_length", "sampling.tokens_max", default=512),
    no_effect("num_generations_eval", "see evaluation.samples"),
    # ------------------------------------------------------------ sampling
    kept("temperature", "sampling.temperature", default=1.0),
    refused("top_p", DRAWN_WHOLE, unless=(1, "1", "1.0")),
    refused("top_k", DRAWN_WHOLE, unless=(0, "0", -1)),
    refused("min_p", DRAWN_WHOLE, unless=(0, "0.0")),
    refused("repetition_penalty", DRAWN_WHOLE, unless=(1, "1", "1.0")),
    refused("generation_kwargs", "an argument of the engine by its own name: put it into engine.0.options"),
    mapped("use_vllm", "engine.0.kind", lambda v, s: "vllm" if flag(v) else "transformers", default=False),
    no_effect("vllm_mode", "an engine is a process of the job; see pacing.mode"),
    no_effect("vllm_model_impl", KERNELS),
    no_effect("vllm_enable_sleep_mode", "see pacing.mode"),
    no_effect("vllm_server_base_url", "an engine is a process of the job; engine.kind vllm_server takes a url"),
    no_effect("vllm_server_host", "an engine is a process of the job; engine.kind vllm_server takes a url"),
    no_effect("vllm_server_port", "an engine is a process of the job; engine.kind vllm_server takes a url"),
    no_effect("vllm_server_timeout", "an engine is a process of the job"),
    no_effect("vllm_group_port", "weights come by the queue's channel"),
    mapped(
        "vllm_gpu_memory_utilization",
        "engine.0.options.gpu_memory_utilization",
        only_if(_vllm, "use_vllm is off", lambda v, s: number(v)),
        default=0.3,
    ),
    mapped(
        "vllm_max_model_length",
        "engine.0.options.max_model_len",
        only_if(_vllm, "use_vllm is off", lambda v, s: whole(v)),
    ),
    layout("vllm_tensor_parallel_size", default=1),
    refused("vllm_structured_outputs_regex", DRAWN_WHOLE),
    no_effect("cache_implementation", KERNELS),
    no_effect("use_transformers_paged", KERNELS),
    no_effect("use_transformers_continuous_batching", KERNELS),
    no_effect("transformers_continuous_batching_config", KERNELS),
    # ------------------------------------------------------------ the algorithm
    mapped("loss_type", "algorithm.aggregate", _loss, default="dapo"),
    mapped("scale_rewards", "algorithm.std", _std, default="group"),
    kept("beta", "algorithm.kl", default=0.0),
    kept("epsilon", "algorithm.clip_low", default=0.2),
    kept("epsilon_high", "algorithm.clip_high"),
    kept("delta", "algorithm.dual_clip"),
    mapped(
        "importance_sampling_level",
        "algorithm.ratio",
        one_of({"token": "token", "sequence": "sequence"}),
        default="token",
    ),
    kept("mask_truncated_completions", "algorithm.mask_truncated"),
    kept("entropy_coef", "algorithm.entropy"),
    refused("use_adaptive_entropy", "the coefficient of the entropy is fixed", unless=(False, "false")),
    no_effect("entropy_coef_*", "read with use_adaptive_entropy"),
    no_effect("entropy_target", "read with use_adaptive_entropy"),
    no_effect("sapo_*", "read by other losses"),
    no_effect("vespo_*", "read by other losses"),
    refused("top_entropy_quantile", "every token of a response counts", unless=(1, "1.0")),
    refused("off_policy_mask_threshold", "see pacing.max_staleness"),
    mapped("use_bias_correction_kl", "", _corrected_kl, default=True),
    mapped("vllm_importance_sampling_correction", "algorithm.tis_max", _corrects, default=True),
    no_effect(
        "vllm_importance_sampling_mode", "read with vllm_importance_sampling_correction", default="sequence_mask"
    ),
    no_effect("vllm_importance_sampling_clip_max", "read with vllm_importance_sampling_correction", default=3.0),
    no_effect("vllm_importance_sampling_cap", "read with vllm_importance_sampling_correction"),
    refused("vllm_importance_sampling_clip_min", "importance weights have an upper bound alone"),
    refused(
        "sync_ref_model", "the reference is not mixed; reference.sync_every replaces it whole", unless=(False, "false")
    ),
    no_effect("ref_model_mixup_alpha", "read with sync_ref_model"),
    no_effect("ref_model_sync_steps", "read with sync_ref_model"),
    refused("max_tool_calling_iterations", "episodes are environments here (`[[environment]]`)"),
    refused("disable_dropout", "models train without dropout", unless=(True, "true", False, "false")),
    # ------------------------------------------------------------ the optimizer
    kept("learning_rate", "trainer.lr", default=1e-6),
    mapped(
        "lr_scheduler_type",
        "trainer.schedule",
        one_of(SCHEDULES),
        default="linear",
    ),
    refused("lr_scheduler_kwargs", "a schedule ends at 0 here", unless=({},)),
    kept("warmup_steps", "trainer.warmup"),
    mapped("warmup_ratio", "trainer.warmup", _warmup_ratio),
    kept("weight_decay", "trainer.weight_decay", default=0.0),
    mapped("adam_beta1", "trainer.betas", lambda v, s: [s.number("adam_beta1"), s.number("adam_beta2")], default=0.9),
    mapped("adam_beta2", "trainer.betas", lambda v, s: [s.number("adam_beta1"), s.number("adam_beta2")], default=0.999),
    kept("max_grad_norm", "trainer.gradient_norm_max", default=1.0),
    refused("optim", "AdamW trains", unless=("adamw_torch", "adamw_torch_fused", "adamw_hf")),
    refused("optim_args", "AdamW has trainer.betas and trainer.weight_decay"),
    refused("adam_epsilon", EPSILON, unless=(1e-8, "1e-8", "1e-08", "1.0e-8")),
    refused("optim_target_modules", "an optimizer of your own"),
    no_effect("average_tokens_across_devices", "a step's loss is over the tokens of all ranks"),
    refused("label_smoothing_factor", "the loss is of the tokens that were drawn", unless=(0, "0.0")),
    refused("neftune_noise_alpha", "no noise is added to embeddings"),
    refused("router_aux_loss_coef", f"{EXPERTS}; a dense model has none: set it to 0", unless=(0, "0.0")),
    no_effect("gradient_checkpointing_kwargs", KERNELS),
    kept("gradient_checkpointing", "trainer.gradient_checkpointing", default=True),
    mapped("lora_r", "trainer.lora_rank", only_if(_lora, "use_peft is off"), default=16),
    mapped("lora_alpha", "trainer.lora_alpha", only_if(_lora, "use_peft is off"), default=32),
    mapped(
        "lora_target_modules",
        "trainer.lora_targets",
        only_if(_lora, "use_peft is off", lambda v, s: [] if v in ("all-linear", ["all-linear"]) else texts(v)),
    ),
    mapped(
        "lora_dropout",
        "",
        only_if(_lora, "use_peft is off", lambda v, s: OurValues({}, "none") if number(v) == 0 else _no_dropout()),
        default=0.05,
    ),
    no_effect("use_peft", "trainer.lora_rank says it"),
    refused("lora_target_parameters", "adapters are of layers (trainer.lora_targets)"),
    no_effect("lora_task_type", "of peft"),
    refused("use_dora", "adapters are plain LoRA", unless=(False, "false")),
    refused("use_rslora", "adapters are plain LoRA", unless=(False, "false")),
    refused("lora_modules_to_save", "adapters are trained alone"),
    # ------------------------------------------------------------ the run
    mapped("save_steps", "checkpoint.every", interval, default=500),
    refused("save_strategy", "checkpoints come every checkpoint.every steps", unless=("steps",)),
    kept("save_total_limit", "checkpoint.keep"),
    no_effect("save_only_model", _CHECKPOINT),
    no_effect("save_on_each_node", _CHECKPOINT),
    no_effect("enable_jit_checkpoint", _CHECKPOINT),
    refused("load_best_model_at_end", "see checkpoint.best", unless=(False, "false")),
    no_effect("metric_for_best_model", "read with load_best_model_at_end"),
    no_effect("greater_is_better", "read with load_best_model_at_end"),
    mapped(
        "eval_steps",
        "evaluation.every",
        only_if(lambda s: s["eval_strategy"] not in (None, "no"), _EVALUATED, interval),
    ),
    mapped(
        "eval_strategy",
        "evaluation.path",
        only_if(
            lambda s: s["eval_strategy"] not in (None, "no"),
            "off",
            lambda v, s: OurValues(
                {"evaluation.path": s["dataset_name"], "evaluation.split": s["dataset_test_split"] or "test"},
                "the test split of the data",
            ),
        ),
    ),
    no_effect("per_device_eval_batch_size", "evaluation takes rows as engines are free"),
    refused("eval_delay", "evaluations come every evaluation.every steps", unless=(0, "0")),
    no_effect("eval_on_start", "an evaluation before the run is always made"),
    no_effect("eval_*", _EVALUATES),
    no_effect("do_eval", _EVALUATES),
    no_effect("do_predict", _EVALUATES),
    no_effect("prediction_loss_only", _EVALUATES),
    no_effect("batch_eval_metrics", _EVALUATES),
    no_effect("include_for_metrics", _EVALUATES),
    no_effect("label_names", _EVALUATES),
    no_effect("*_full_eval", _EVALUATES),
    mapped("report_to", "log.to", _reports),
    mapped("run_name", "name", lambda v, s: str(v).replace("/", "-")),
    layout("num_processes", default=1),
    no_effect("output_dir", LOGS),
    no_effect("logging_steps", "figures of every step are written"),
    no_effect("logging_strategy", "figures of every step are written"),
    no_effect("logging_first_step", "figures of every step are written"),
    no_effect("log_completions", "see `transferqueue samples RUN`"),
    *(no_effect(name, LOGS) for name in ("log_level*", "log_on_each_node", "log_completions_hub_repo")),
    *(no_effect(name, LOGS) for name in ("logging_nan_inf_filter", "include_num_input_tokens_seen", "project")),
    *(no_effect(name, LOGS) for name in ("trackio_*", "skip_memory_metrics", "debug")),
    no_effect("num_completions_to_print", "see `transferqueue samples RUN`"),
    no_effect("log_unique_prompts", "see `transferqueue samples RUN`"),
    no_effect("resume_from_checkpoint", RESUMES),
    refused("ignore_data_skip", "a run goes on where its data was", unless=(False, "false")),
    no_effect("restore_callback_states_from_checkpoint", RESUMES),
    no_effect("overwrite_output_dir", LOGS),
    no_effect("push_to_hub", "transferqueue export writes the model"),
    no_effect("hub_*", "transferqueue export writes the model"),
    no_effect("use_liger_kernel", KERNELS),
    no_effect("use_liger_loss", KERNELS),
    no_effect("torch_compile", KERNELS),
    no_effect("torch_compile_*", KERNELS),
    no_effect("torch_empty_cache_steps", KERNELS),
    no_effect("liger_kernel_config", KERNELS),
    no_effect("use_cache", KERNELS),
    refused(
        "cast_lm_head_to_fp32",
        "the last layer multiplies in the dtype of the model",
        unless=(False, "false"),
    ),
    no_effect("tf32", KERNELS),
    no_effect("use_cpu", "devices are found; set trainer.devices"),
    no_effect("ds3_gather_for_generation", SHARDED),
    no_effect("deepspeed", SHARDED),
    no_effect("fsdp", SHARDED),
    no_effect("fsdp_config", SHARDED),
    no_effect("ddp_*", SHARDED),
    *(no_effect(name, SHARDED) for name in ("accelerator_config", "parallelism_config", "local_rank")),
    no_effect("ignore_bias_buffers", SHARDED),
    no_effect("accelerate_config", SHARDED),
    no_effect("config_file", SHARDED),
    no_effect("num_machines", SHARDED),
    no_effect("pad_to_multiple_of", PACKED),
    no_effect("auto_find_batch_size", PACKED),
    no_effect("remove_unused_columns", "rewards get every column"),
    no_effect("dataloader_*", "prompts are read by one process, ahead"),
    no_effect("disable_tqdm", LOGS),
    no_effect("do_train", "a job trains"),
    no_effect("env.*", "variables of the environment: set them where the job starts"),
    no_effect("config", "read"),
    refused("log_multimodal", IMAGES, unless=(True, "true", False, "false")),
)


TRL: Final = Stack(
    name="trl",
    rules=_RULES,
    always={
        "algorithm.kind": ("grpo", "of trl grpo"),
        "algorithm.old": ("trainer", "TRL's ratio is to log-probs that its trainer computes"),
        "pacing.mode": ("sync", "TRL generates a batch, then trains it"),
    },
    entries=("trl grpo", "trl/scripts/grpo.py", "trl.scripts.grpo"),
    marks=("model_name_or_path",),
    overrides=False,
    gpus=_gpus,
    of_model=_router_loss,
    version="1.16",
    extra="trl",
    on_queue=(
        "trl grpo takes no rollout_func: make the trainer in a program of yours, as transferqueue docs trl shows,",
        "with GRPOTrainer(…, rollout_func=rollouts, callbacks=[rollouts]) and rollouts = QueueRollouts(queue, …)",
        "AsyncGRPOTrainer: rollout_worker=QueueRolloutWorker(queue, …), weight_transfer and callbacks of it",
    ),
)
"""TRL's table."""
