"""verl: keys of ``verl.trainer.main_ppo`` (Hydra: ``a.b=c``, or YAML)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from transferqueue.workflows.adopt.mapping import (
    DRAWN_WHOLE,
    DTYPES,
    EPSILON,
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
    Convert,
    Gpus,
    OurValues,
    Plain,
    Refuse,
    Settings,
    Stack,
    divided,
    interval,
    is_same,
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

ACTOR: Final = "actor_rollout_ref.actor"
ROLLOUT: Final = "actor_rollout_ref.rollout"
REF: Final = "actor_rollout_ref.ref"
MODEL: Final = "actor_rollout_ref.model"
_MEGATRON: Final = f"{ACTOR}.megatron.override_transformer_config"
_V1: Final = "trainer.v1"
_OF_CRITIC: Final = {
    "ppo_epochs": 1,
    "ppo_mini_batch_size": 256,
    "loss_agg_mode": "token-mean",
    "grad_clip": 1.0,
    "optim.weight_decay": 0.01,
    "optim.clip_grad": 1.0,
}
"""Settings of the critic's training, which are the policy's here, with verl's defaults of the policy."""
_OVERRIDES: Final = ("", "override_optimizer_config.")
_ROUTES: Final = "routes of vLLM are not replayed"
_BUFFERS: Final = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
_SKIPS: Final = ("rollout", "rollout_tq", "async_rollout")
_SCORES: Final = ("", "reward.")
"""Beginnings of the keys of verl's reward function: until 0.8, and since."""
_MODELS: Final = {"reward_model": "reward_model.model.path", "reward.reward_model": "reward.reward_model.model_path"}
"""Tables of verl's reward model, until 0.8 and since, each with the key of its path."""
_ENGINE: Final = "engine.0.options."


def _ppo(settings: Settings) -> bool:
    return bool(settings["algorithm.adv_estimator"] == "gae")


def _critic(settings: Settings) -> bool:
    return _ppo(settings)


def _kl_in_loss(settings: Settings) -> bool:
    return settings.is_on(f"{ACTOR}.use_kl_loss")


def _kl_in_reward(settings: Settings) -> bool:
    return settings.is_on("algorithm.use_kl_in_reward") and not _kl_in_loss(settings)


def _ahead(settings: Settings) -> bool:
    names = ("colocate_async", "separate_async")
    return settings.is_on("trainer.use_v1") and settings["trainer.v1.trainer_mode"] in names


def _mode(value: Plain, settings: Settings) -> OurValues:
    if value == "sync" or not settings.is_on("trainer.use_v1"):
        return OurValues({"pacing.mode": "sync"}, "a step's rows are generated, then trained")
    if not _ahead(settings):
        raise Refuse(f"there is no mode {value!r} here; see pacing.mode")
    own = "" if value == "separate_async" else "; verl shares them, here they are divided"
    return OurValues({"pacing.mode": "async"}, f"generation goes on beside training, on devices of its own{own}")


def _behind(value: Plain, settings: Settings) -> Plain:
    """Verl counts the step itself: a row of the newest weights has 1."""
    if (threshold := whole(value)) < 2:
        raise Refuse(
            f"{threshold} allows no row of older weights, so nothing is generated ahead; set trainer_mode=sync"
        )
    return threshold - 1


def _batches_ahead(mode: str) -> Convert:
    def convert(value: Plain, settings: Settings) -> Plain:
        if (batches := whole(value)) < 1:
            raise Refuse(f"{batches}: an asynchronous job is a batch ahead at least; set trainer_mode=sync")
        return batches

    return only_if(
        lambda settings: _ahead(settings) and settings["trainer.v1.trainer_mode"] == mode,
        f"trainer_mode is not {mode}",
        convert,
    )


def _as_actor(name: str, default: Plain) -> Convert:
    """Refuse a value of the critic that differs from the policy's."""

    def convert(value: Plain, settings: Settings) -> Plain:
        given = settings[name]
        actors = default if given is None else given
        if is_same(actors, value):
            return OurValues({}, "as in trainer")
        raise Refuse(f"policy and critic train alike, and {name} is {actors}; give both the same")

    return only_if(_critic, "gae alone has a critic", convert)


def _on_stale(value: Plain, settings: Settings) -> Plain:
    if value != "drop":
        raise Refuse("a row that is being generated is not waited for: an older one is generated again, or dropped")
    return value


def _kind(value: Plain, settings: Settings) -> Plain:
    kinds = {"grpo": "grpo", "gae": "ppo", "reinforce_plus_plus": "reinforce_pp", "rloo": "rloo"}
    if value not in kinds:
        raise Refuse(f"there is no advantage {value!r} here; there are {', '.join(kinds)}")
    return kinds[value]


def _std(value: Plain, settings: Settings) -> OurValues:
    return divided(str(value).lower() == "true", 1e-6)


def _files(ours: str, rest: str) -> Convert:
    """Return the function for ``data.train_files`` or ``data.val_files``: one file, or several."""

    def convert(value: Plain, settings: Settings) -> Plain:
        files = texts(value)
        if len(files) == 1:
            return files[0]
        if rest == "data.sources":
            by_key = {f"{rest}.{place}.path": file for place, file in enumerate(files)}
            return OurValues(by_key, "drawn in equal parts: set data.sources.N.weight to the rows of each")
        by_key = {f"{rest}.{place - 1}.path": file for place, file in enumerate(files) if place}
        by_key |= {f"{rest}.{place - 1}.name": f"set{place}" for place in range(1, len(files))}
        return OurValues({ours: files[0], **by_key}, "a set for each file")

    return convert


def _minibatches(value: Plain, settings: Settings) -> int:
    return parts_of(settings.whole("data.train_batch_size"), whole(value), "ppo_mini_batch_size")


def _warmup(value: Plain, settings: Settings) -> Plain:
    if number(value) <= 0:
        return 0
    steps = settings.whole("trainer.total_training_steps")
    if not steps:
        raise Refuse("a share of the steps, whose number trainer.total_training_steps does not say; set trainer.warmup")
    return round(number(value) * steps)


def _row_tokens(settings: Settings) -> int:
    return settings.whole("data.max_prompt_length") + settings.whole("data.max_response_length")


def _rows_to_tokens(value: Plain, settings: Settings) -> int:
    return whole(value) * _row_tokens(settings)


def _engine_kind(value: Plain, settings: Settings) -> Plain:
    if str(value) == "hf":
        return "transformers"
    why = (
        ""
        if value == "vllm"
        else f"{value} is reached here as a server (sglang_server) or not at all; vLLM runs in the job"
    )
    return OurValues({"engine.0.kind": "vllm"}, why) if why else "vllm"


def _epochs(value: Plain, settings: Settings) -> Plain:
    if len(texts(settings["data.train_files"] or "")) > 1:
        raise Refuse("several files are mixed by weight, without epochs: set steps")
    return whole(value)


def _targets(value: Plain, settings: Settings) -> Plain:
    return [] if value in ("all-linear", None) else texts(value)


def _gpus(settings: Settings) -> Gpus:
    nodes = settings.whole("trainer.nnodes")
    total = nodes * settings.whole("trainer.n_gpus_per_node")
    separate = settings.whole("rollout.nnodes") * settings.whole("rollout.n_gpus_per_node")
    if not separate:
        each = settings.whole(f"{ROLLOUT}.n_gpus_per_node") or settings.whole("trainer.n_gpus_per_node")
        separate = settings.whole(f"{ROLLOUT}.nnodes") * each
    tensor_parallel = settings.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    return Gpus(total, separate or total, shared=not separate, nodes=nodes, per_engine=tensor_parallel)


def _rewards(settings: Settings) -> str:
    if any(settings.is_on(f"{table}.enable") for table in _MODELS):
        return ""
    path, name = (
        next((each for at in _SCORES if (each := settings[f"{at}custom_reward_function.{key}"])), default)
        for key, default in (("path", None), ("name", "compute_score"))
    )
    load = "from verl.utils.reward_score import default_compute_score as compute_score"
    if path:
        load = (
            "from transferqueue.adapters.stages.reward_functions import load_callable\n\n"
            f'compute_score = load_callable({f"{path}:{name}"!r}, "reward")'
        )
    return _REWARDS.replace("LOAD", load)


_REWARDS: Final = '''"""verl's reward in the form that `reward.function` takes. Needs what verl's own reward needs."""

LOAD


def reward(completions, data_source, reward_model, extra_info=None, **columns):
    """Return the score of each row; the columns are those of verl's data files."""
    extras = extra_info or [None] * len(completions)
    scores = []
    for completion, source, model, extra in zip(completions, data_source, reward_model, extras, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        score = compute_score(
            data_source=source, solution_str=text, ground_truth=model["ground_truth"], extra_info=extra
        )
        scores.append(float(score["score"] if isinstance(score, dict) else score))
    return scores
'''


def _function(value: Plain, settings: Settings) -> OurValues:
    return OurValues({"reward.0.function": "adopted_rewards:reward"}, "adopted_rewards.py calls it")


def _is_on(name: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.is_on(name)


_MANAGER: Final = "adopted_rewards.py calls verl's function for each row, as the managers naive and dapo do"
_PROFILED: Final = "profiling: see transferqueue profile and trace"
_RULES: Final = (
    # ------------------------------------------------------------ the algorithm
    mapped("algorithm.adv_estimator", "algorithm.kind", _kind, default="gae"),
    mapped(
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.std",
        only_if(lambda s: s["algorithm.adv_estimator"] == "grpo", "grpo alone reads it", _std),
        default=True,
    ),
    kept("algorithm.gamma", "algorithm.gamma", default=1.0),
    mapped("algorithm.lam", "algorithm.lam", only_if(_ppo, "gae alone reads it"), default=1.0),
    mapped(
        "algorithm.use_kl_in_reward",
        "algorithm.kl_in",
        only_if(_kl_in_reward, "off", lambda v, s: "reward"),
        default=False,
    ),
    mapped(
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl",
        only_if(_kl_in_reward, "algorithm.use_kl_in_reward is off"),
        default=0.001,
    ),
    mapped(
        "algorithm.kl_penalty",
        "algorithm.kl_estimator",
        only_if(
            _kl_in_reward,
            "algorithm.use_kl_in_reward is off",
            one_of(KL_ESTIMATORS),
        ),
        default="kl",
    ),
    refused("algorithm.kl_ctrl.type", "the coefficient of the KL is fixed here", unless=("fixed",)),
    no_effect("algorithm.kl_ctrl.*", "read with kl_ctrl.type=adaptive alone"),
    refused("algorithm.use_pf_ppo", "rows are not weighted again by their rewards", unless=(False, "false")),
    no_effect("algorithm.pf_ppo.*", "read with algorithm.use_pf_ppo alone"),
    kept("algorithm.filter_groups.enable", "algorithm.filter_equal"),
    no_effect("algorithm.gdpo_reward_keys", "gdpo alone reads it"),
    no_effect("algorithm.filter_groups.*", "groups with equal rewards are replaced until the step is full"),
    mapped(
        "algorithm.rollout_correction.rollout_is_threshold",
        "algorithm.tis_max",
        only_if(lambda s: s["algorithm.rollout_correction.rollout_is"] == "token", "rollout_is is not token"),
    ),
    refused(
        "algorithm.rollout_correction.rollout_is", "importance weights are of tokens here", unless=("token", "null")
    ),
    refused(
        "algorithm.rollout_correction.*",
        "there are weights of tokens here (algorithm.tis_max), no rejection",
        unless=(False, "false", "null"),
    ),
    # ------------------------------------------------------------ the loss
    kept(f"{ACTOR}.clip_ratio_low", "algorithm.clip_low"),
    kept(f"{ACTOR}.clip_ratio_high", "algorithm.clip_high"),
    kept(f"{ACTOR}.clip_ratio", "algorithm.clip_low", default=0.2),
    kept(f"{ACTOR}.clip_ratio_c", "algorithm.dual_clip", default=3.0),
    mapped(
        f"{ACTOR}.loss_agg_mode",
        "algorithm.aggregate",
        one_of({"token-mean": "tokens", "seq-mean-token-mean": "rows", "seq-mean-token-sum-norm": "rows_max"}),
        default="token-mean",
    ),
    mapped(
        f"{ACTOR}.policy_loss.loss_mode",
        "algorithm.ratio",
        one_of({"vanilla": "token", "gspo": "sequence"}),
        default="vanilla",
    ),
    no_effect(f"{ACTOR}.policy_loss.*", "read by other losses"),
    mapped(f"{ACTOR}.use_kl_loss", "algorithm.kl_in", only_if(_kl_in_loss, "off", lambda v, s: "loss"), default=False),
    mapped(f"{ACTOR}.kl_loss_coef", "algorithm.kl", only_if(_kl_in_loss, "use_kl_loss is off"), default=0.001),
    mapped(
        f"{ACTOR}.kl_loss_type",
        "algorithm.kl_estimator",
        only_if(_kl_in_loss, "use_kl_loss is off", one_of(KL_ESTIMATORS)),
        default="low_var_kl",
    ),
    kept(f"{ACTOR}.entropy_coeff", "algorithm.entropy"),
    kept(f"{ACTOR}.ppo_epochs", "algorithm.epochs"),
    mapped(
        f"{ACTOR}.ppo_mini_batch_size",
        "algorithm.minibatches",
        _minibatches,
        default=256,
        why="data.train_batch_size / ppo_mini_batch_size, in prompts",
    ),
    # ------------------------------------------------------------ the optimizer
    kept(f"{ACTOR}.optim.lr", "trainer.lr", default=1e-6),
    kept(f"{ACTOR}.optim.weight_decay", "trainer.weight_decay", default=0.01),
    kept(f"{ACTOR}.optim.betas", "trainer.betas", default=[0.9, 0.999]),
    mapped(f"{ACTOR}.optim.lr_warmup_steps", "trainer.warmup", interval),
    mapped(f"{ACTOR}.optim.lr_warmup_steps_ratio", "trainer.warmup", _warmup),
    mapped(f"{ACTOR}.optim.lr_scheduler_type", "trainer.schedule", one_of(SCHEDULES)),
    mapped(f"{ACTOR}.optim.warmup_style", "trainer.schedule", one_of(SCHEDULES)),
    mapped(
        f"{ACTOR}.optim.lr_decay_style",
        "trainer.schedule",
        one_of(SCHEDULES),
    ),
    refused(f"{ACTOR}.optim.min_lr_ratio", "a schedule ends at 0 here", unless=(0, "0.0")),
    refused(f"{ACTOR}.optim.optimizer", "AdamW trains", unless=("AdamW", "adamw", "adam")),
    refused(f"{ACTOR}.optim.min_lr", "a schedule ends at 0 here", unless=(0, "0.0")),
    refused(f"{ACTOR}.optim.lr_warmup_init", "a warm-up begins at 0 here", unless=(0, "0.0")),
    refused(f"{ACTOR}.optim.lr_decay_steps", "a schedule ends with the run"),
    refused(f"{ACTOR}.optim.num_cycles", "a cosine schedule has half a cycle", unless=(0.5, "0.5")),
    *(refused(f"{ACTOR}.optim.{name}eps", EPSILON, unless=(1e-8, "1e-8", "1e-08")) for name in _OVERRIDES),
    no_effect(f"{ACTOR}.optim.override_optimizer_config.*", SHARDED),
    no_effect(f"{ACTOR}.optim.*", "of the schedule or of Megatron's optimizer"),
    kept(f"{ACTOR}.grad_clip", "trainer.gradient_norm_max"),
    kept(f"{ACTOR}.optim.clip_grad", "trainer.gradient_norm_max"),
    # ------------------------------------------------------------ passes and memory
    mapped(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "trainer.micro_tokens",
        only_if(lambda s: s.is_on(f"{ACTOR}.use_dynamic_bsz"), "use_dynamic_bsz is off"),
    ),
    mapped(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "trainer.micro_tokens",
        only_if(lambda s: not s.is_on(f"{ACTOR}.use_dynamic_bsz"), "use_dynamic_bsz is on", _rows_to_tokens),
        why="rows × (max_prompt_length + max_response_length)",
    ),
    no_effect(f"{ACTOR}.use_dynamic_bsz", PACKED),
    no_effect(f"{ACTOR}.ppo_micro_batch_size", PACKED),
    *(
        rule
        for part in (ACTOR, f"{ACTOR}.fsdp_config", f"{ACTOR}.megatron", f"{ACTOR}.veomni")
        for rule in (
            refused(f"{part}.router_replay.*", _ROUTES, unless=("disabled", "null", False, "false")),
            refused(f"{part}.qat.enable", "models are not quantized", unless=(False, "false")),
            no_effect(f"{part}.qat.*", "read with qat.enable alone"),
        )
    ),
    *(refused(f"{_MEGATRON}.moe_{name}_loss_coeff", EXPERTS, unless=(0, "0.0")) for name in ("aux", "z")),
    no_effect(f"{ACTOR}.fsdp_config.*", SHARDED),
    no_effect(f"{ACTOR}.megatron.*", SHARDED),
    no_effect(f"{ACTOR}.strategy", SHARDED),
    no_effect(f"{ACTOR}.veomni.*", SHARDED),
    no_effect(f"{ACTOR}.model_engine", SHARDED),
    no_effect(f"{ACTOR}.torchtitan.*", SHARDED),
    no_effect(f"{ACTOR}.engine.*", SHARDED),
    no_effect(f"{ACTOR}.pad_to_length", PACKED),
    no_effect("model_engine", SHARDED),
    no_effect(f"{ACTOR}.ulysses_sequence_parallel_size", SHARDED),
    no_effect(f"{ACTOR}.use_torch_compile", KERNELS),
    no_effect(f"{ACTOR}.entropy_from_logits_with_chunking", KERNELS),
    no_effect(f"{ACTOR}.entropy_checkpointing", KERNELS),
    no_effect(f"{ACTOR}.checkpoint.*", "a checkpoint has model, optimizer and queue"),
    no_effect(f"{ACTOR}.profiler.*", _PROFILED),
    no_effect(f"{ACTOR}.shuffle", "minibatches are drawn by seed"),
    no_effect(f"{ACTOR}.data_loader_seed", "minibatches are drawn by seed"),
    no_effect(f"{ACTOR}.rollout_n", "rollout.n says it"),
    no_effect(f"{ACTOR}.tau_*", "read by other losses"),
    no_effect(f"{ACTOR}.calculate_*", "figures of every step are written"),
    no_effect(f"{ACTOR}.use_prefix_grouper", KERNELS),
    no_effect(f"{ACTOR}.use_fused_kernels", KERNELS),
    no_effect(f"{ACTOR}.entropy_from_logits_chunk_size", KERNELS),
    no_effect(f"{ACTOR}.use_remove_padding", PACKED),
    refused(f"{ACTOR}.loss_scale_factor", "seq-mean-token-sum-norm divides by sampling.tokens_max here"),
    refused(f"{ACTOR}.freeze_vision_tower", IMAGES, unless=(False, "false")),
    # ------------------------------------------------------------ the model
    kept(f"{MODEL}.path", "model.path", default="~/models/deepseek-llm-7b-chat"),
    kept(f"{MODEL}.tokenizer_path", "model.tokenizer"),
    kept(f"{MODEL}.trust_remote_code", "model.trust_remote_code"),
    kept(f"{MODEL}.enable_gradient_checkpointing", "trainer.gradient_checkpointing", default=True),
    kept(f"{MODEL}.lora_rank", "trainer.lora_rank"),
    mapped(
        f"{MODEL}.lora_alpha",
        "trainer.lora_alpha",
        only_if(lambda s: s.whole(f"{MODEL}.lora_rank") > 0, "lora_rank is 0"),
    ),
    mapped(
        f"{MODEL}.target_modules",
        "trainer.lora_targets",
        only_if(lambda s: s.whole(f"{MODEL}.lora_rank") > 0, "lora_rank is 0", _targets),
    ),
    kept(f"{MODEL}.lora.rank", "trainer.lora_rank"),
    kept(f"{MODEL}.lora.alpha", "trainer.lora_alpha"),
    refused(f"{MODEL}.lora.*", "adapters of Megatron's own kind"),
    kept(f"{MODEL}.lora_adapter_path", "trainer.lora_adapter"),
    refused(f"{MODEL}.exclude_modules", "layers with adapters are named (trainer.lora_targets), none is excluded"),
    refused(f"{MODEL}.custom_chat_template", "put the template in a file, and set model.chat_template"),
    refused(f"{MODEL}.override_config", "a model is as its config.json says", unless=({},)),
    refused(f"{MODEL}.override_config.*", "a model is as its config.json says"),
    refused(f"{MODEL}.hf_config_path", "a model is as its config.json says"),
    refused(f"{MODEL}.mtp.enable", "layers of several tokens are not trained", unless=(False, "false")),
    no_effect(f"{MODEL}.mtp.*", "read with mtp.enable alone"),
    no_effect(f"{MODEL}.tiled_mlp.*", KERNELS),
    refused(f"{MODEL}.external_lib", "no module is imported beside the model's own"),
    no_effect(f"{MODEL}.use_remove_padding", PACKED),
    no_effect(f"{MODEL}.enable_activation_offload", SHARDED),
    no_effect(f"{MODEL}.use_fused_kernels", KERNELS),
    no_effect(f"{MODEL}.fused_kernel_options.*", KERNELS),
    no_effect(f"{MODEL}.use_liger", KERNELS),
    no_effect(f"{MODEL}.use_shm", "where weights are read from"),
    no_effect("actor_rollout_ref.hybrid_engine", "see pacing.mode"),
    no_effect("actor_rollout_ref.nccl_timeout", "see trainer.patience_s"),
    # ------------------------------------------------------------ generation
    mapped(f"{ROLLOUT}.name", "engine.0.kind", _engine_kind),
    no_effect(f"{ROLLOUT}.mode", "engines take requests as they come"),
    kept(f"{ROLLOUT}.n", "sampling.group_size", default=1),
    kept(f"{ROLLOUT}.temperature", "sampling.temperature", default=1.0),
    refused(f"{ROLLOUT}.top_p", DRAWN_WHOLE, unless=(1, "1", "1.0")),
    refused(f"{ROLLOUT}.top_k", DRAWN_WHOLE, unless=(-1, "-1", 0)),
    refused(f"{ROLLOUT}.ignore_eos", "a response ends with the model's end token", unless=(False, "false")),
    layout(f"{ROLLOUT}.tensor_model_parallel_size", default=2),
    mapped(f"{ROLLOUT}.gpu_memory_utilization", f"{_ENGINE}gpu_memory_utilization", lambda v, s: number(v)),
    mapped(f"{ROLLOUT}.enforce_eager", f"{_ENGINE}enforce_eager", lambda v, s: v),
    mapped(f"{ROLLOUT}.enable_chunked_prefill", f"{_ENGINE}enable_chunked_prefill", lambda v, s: v),
    mapped(f"{ROLLOUT}.max_num_batched_tokens", f"{_ENGINE}max_num_batched_tokens", lambda v, s: whole(v)),
    mapped(f"{ROLLOUT}.max_model_len", f"{_ENGINE}max_model_len", lambda v, s: whole(v)),
    kept(f"{ROLLOUT}.max_num_seqs", "engine.0.slots"),
    mapped(f"{ROLLOUT}.val_kwargs.temperature", "evaluation.temperature", lambda v, s: number(v)),
    kept(f"{ROLLOUT}.val_kwargs.n", "evaluation.samples"),
    no_effect(f"{ROLLOUT}.val_kwargs.do_sample", "evaluation.temperature says it"),
    refused(f"{ROLLOUT}.val_kwargs.top_p", "evaluation draws from the whole distribution", unless=(1, "1", "1.0")),
    refused(f"{ROLLOUT}.val_kwargs.top_k", "evaluation draws from the whole distribution", unless=(-1, "-1", 0)),
    no_effect(f"{ROLLOUT}.calculate_log_probs", "engines always give log-probs"),
    no_effect(f"{ROLLOUT}.prompt_length", "data.max_prompt_length says it"),
    no_effect(f"{ROLLOUT}.response_length", "data.max_response_length says it"),
    no_effect(f"{ROLLOUT}.free_cache_engine", "see pacing.mode"),
    no_effect(f"{ROLLOUT}.load_format", "weights come by the queue's channel"),
    no_effect(f"{ROLLOUT}.layered_summon", "weights come by the queue's channel"),
    no_effect(f"{ROLLOUT}.checkpoint_engine.*", "weights come by the queue's channel"),
    no_effect(f"{ROLLOUT}.log_prob_micro_batch_size", PACKED),
    no_effect(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", PACKED),
    no_effect(f"{ROLLOUT}.log_prob_use_dynamic_bsz", PACKED),
    no_effect(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", PACKED),
    no_effect(f"{ROLLOUT}.multi_stage_wake_up", "see pacing.mode"),
    no_effect(f"{ROLLOUT}.trace.*", LOGS),
    no_effect(f"{ROLLOUT}.prometheus.*", LOGS),
    no_effect(f"{ROLLOUT}.moe_load_balance_metrics_interval", LOGS),
    no_effect(f"{ROLLOUT}.profiler.*", _PROFILED),
    layout(f"{ROLLOUT}.nnodes"),
    layout(f"{ROLLOUT}.n_gpus_per_node"),
    no_effect(f"{ROLLOUT}.seed", "engines draw by seed"),
    refused(f"{ROLLOUT}.full_determinism", "see reproducible = true", unless=(False, "false")),
    refused(f"{ROLLOUT}.do_sample", "responses are drawn; see evaluation.temperature", unless=(True, "true")),
    refused(
        f"{ROLLOUT}.logprobs_mode",
        "log-probs are of the distribution that tokens are drawn from",
        unless=("processed_logprobs",),
    ),
    refused(f"{ROLLOUT}.pipeline_model_parallel_size", "see engine.tensor_parallel", unless=(1, "1")),
    no_effect(f"{ROLLOUT}.disaggregation.*", "how verl lays out its engines; see engine.count"),
    no_effect(f"{ROLLOUT}.cudagraph_capture_sizes", KERNELS),
    no_effect(f"{ROLLOUT}.scheduling_policy", "the order of requests within an engine"),
    no_effect(f"{ROLLOUT}.router_config_path", "of verl's router"),
    no_effect(f"{ROLLOUT}.skip_tokenizer_init", "engines take tokens"),
    no_effect(f"{ROLLOUT}.agent.num_workers", "see engine.count"),
    refused(f"{ROLLOUT}.agent.*", "an agent loop of verl's: write it as an environment (`[[environment]]`)"),
    refused(
        f"{ROLLOUT}.multi_turn.enable", "episodes are environments here (`[[environment]]`)", unless=(False, "false")
    ),
    refused(f"{ROLLOUT}.multi_turn.*", "episodes are environments here (`[[environment]]`)"),
    kept(f"{ROLLOUT}.engine_kwargs.vllm.*", "engine.0.options.*"),
    refused(f"{ROLLOUT}.engine_kwargs.*", "an argument of the engine by its own name: put it into engine.0.options"),
    refused(f"{ROLLOUT}.over_sample_rate", "see pacing.over_sample", unless=(0, "0")),
    kept(f"{ROLLOUT}.enable_prefix_caching", f"{_ENGINE}enable_prefix_caching"),
    mapped(f"{ROLLOUT}.dtype", "model.dtype", one_of(DTYPES)),
    refused(f"{ROLLOUT}.quantization", "models are not quantized", unless=("null",)),
    refused(f"{ROLLOUT}.quantization_config_file", "models are not quantized", unless=("null",)),
    refused(f"{ROLLOUT}.qat", "models are not quantized", unless=("null",)),
    refused(f"{ROLLOUT}.mtp", "layers of several tokens are not trained", unless=("null",)),
    refused(f"{ROLLOUT}.enable_rollout_routing_replay", _ROUTES, unless=(False, "false")),
    no_effect(f"{ROLLOUT}.disable_log_stats", LOGS),
    no_effect(f"{ROLLOUT}.data_parallel_size", "see engine.count"),
    no_effect(f"{ROLLOUT}.moe_tensor_parallel_size", "how experts are spread over an engine's devices"),
    refused(
        f"{ROLLOUT}.expert_parallel_size", "put it into engine.0.options by the engine's own name", unless=(1, "1")
    ),
    # ------------------------------------------------------------ the reference
    mapped(
        f"{REF}.log_prob_max_token_len_per_gpu",
        "reference.tokens",
        only_if(lambda s: _kl_in_loss(s) or _kl_in_reward(s), "there is no reference"),
    ),
    mapped(
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        "reference.tokens",
        only_if(lambda s: _kl_in_loss(s) or _kl_in_reward(s), "there is no reference", _rows_to_tokens),
        why="rows × (max_prompt_length + max_response_length)",
    ),
    no_effect(f"{REF}.*", SHARDED),
    # ------------------------------------------------------------ data
    mapped(
        "data.train_files", "data.path", _files("data.path", "data.sources"), default="~/data/rlhf/gsm8k/train.parquet"
    ),
    mapped("data.val_files", "evaluation.path", _files("evaluation.path", "evaluation.sets")),
    kept("data.prompt_key", "data.prompt", default="prompt"),
    kept("data.max_prompt_length", "data.prompt_tokens_max", default=512),
    kept("data.max_response_length", "sampling.tokens_max", default=512),
    kept("data.train_batch_size", "trainer.prompts_per_step", default=1024),
    kept("data.shuffle", "data.shuffle", default=True),
    kept("data.seed", "seed"),
    mapped(
        "data.filter_overlong_prompts",
        "data.overlong",
        lambda v, s: "drop" if str(v).lower() == "true" else "refuse",
        default=False,
    ),
    refused("data.truncation", "a prompt that is too long is dropped or refused, not cut", unless=("error",)),
    mapped("data.apply_chat_template_kwargs", "model.template_args", lambda v, s: v),
    no_effect("data.apply_chat_template_kwargs.*", "set model.template_args"),
    no_effect("data.trust_remote_code", "model.trust_remote_code says it"),
    no_effect("data.val_batch_size", "evaluation takes rows as engines are free"),
    no_effect("data.return_raw_chat", "rewards get prompts as the data has them"),
    no_effect("data.dataloader_num_workers", "prompts are read by one process, ahead"),
    no_effect("data.filter_overlong_prompts_workers", "prompts are read by one process, ahead"),
    no_effect("data.reward_fn_key", "rewards get every column"),
    no_effect("data.gen_batch_size", "the queue keeps engines supplied"),
    refused("data.image_key", IMAGES),
    refused("data.video_key", IMAGES),
    refused("data.custom_cls.*", "a class that makes prompts: write its rows to a file, and set data.path"),
    refused(
        "data.sampler.*", "a class that draws prompts: a function chooses them by their pass rates, see data.sampler"
    ),
    refused("data.train_max_samples", "set data.path to a file of these rows", unless=(-1, "-1")),
    mapped(
        "data.val_max_samples", "evaluation.rows", only_if(lambda s: s.whole("data.val_max_samples") > 0, "all of them")
    ),
    refused("data.*", "verl reads it; there is nothing like it here"),
    # ------------------------------------------------------------ rewards
    *(mapped(f"{at}custom_reward_function.path", "reward.0.function", _function) for at in _SCORES),
    *(no_effect(f"{at}custom_reward_function.name", "adopted_rewards.py names it") for at in _SCORES),
    *(
        mapped(path, "reward.0.model", only_if(_is_on(f"{table}.enable"), "enable is off"))
        for table, path in _MODELS.items()
    ),
    *(no_effect(f"{table}.enable", "reward.model says it") for table in _MODELS),
    *(kept(f"{buffer}.len", "algorithm.overlong_buffer") for buffer in _BUFFERS),
    *(kept(f"{buffer}.penalty_factor", "algorithm.overlong_penalty") for buffer in _BUFFERS),
    *(no_effect(f"{buffer}.*", "a length of 0 turns it off") for buffer in _BUFFERS),
    no_effect("reward_model.reward_kwargs.max_resp_len", "sampling.tokens_max says it"),
    no_effect("reward.reward_kwargs.max_resp_len", "sampling.tokens_max says it"),
    refused("reward_model.reward_manager", _MANAGER, unless=("naive", "dapo")),
    refused("reward.reward_manager.name", _MANAGER, unless=("naive", "dapo")),
    refused("reward_model.sandbox_fusion.*", "a reward that calls a sandbox: name your function in reward.function"),
    refused("reward.sandbox_fusion.*", "a reward that calls a sandbox: name your function in reward.function"),
    no_effect("reward_model.*", "how verl runs its reward model"),
    no_effect("reward.reward_model.*", "how verl runs its reward model"),
    no_effect("reward.num_workers", "see reward.processes"),
    refused("reward.*", "verl reads it; there is nothing like it here"),
    # ------------------------------------------------------------ the critic
    mapped("critic.model.path", "critic.path", only_if(_critic, "gae alone has a critic")),
    mapped("critic.optim.lr", "critic.lr", only_if(_critic, "gae alone has a critic"), default=1e-5),
    mapped("critic.cliprange_value", "algorithm.value_clip", only_if(_critic, "gae alone has a critic"), default=0.5),
    mapped("critic.ppo_max_token_len_per_gpu", "critic.tokens", only_if(_critic, "gae alone has a critic")),
    *(
        mapped(f"critic.{name}", "trainer, algorithm", _as_actor(f"{ACTOR}.{name}", default))
        for name, default in _OF_CRITIC.items()
    ),
    mapped("critic.model.lora_rank", "trainer.lora_rank", _as_actor(f"{MODEL}.lora_rank", 0)),
    no_effect("critic.*", "everything else of the critic's training is as in trainer"),
    # ------------------------------------------------------------ the run
    mapped("trainer.total_epochs", "data.epochs", _epochs, default=30),
    kept("trainer.total_training_steps", "steps"),
    mapped("trainer.save_freq", "checkpoint.every", interval, default=-1),
    mapped("trainer.test_freq", "evaluation.every", interval, default=-1),
    no_effect("trainer.val_before_train", "an evaluation before the run is always made"),
    kept("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    no_effect("trainer.max_critic_ckpt_to_keep", "a checkpoint has both"),
    mapped("trainer.logger", "log.to", loggers),
    mapped("trainer.experiment_name", "name", lambda v, s: str(v).replace("/", "-")),
    no_effect("trainer.project_name", LOGS),
    no_effect("trainer.default_local_dir", LOGS),
    no_effect("trainer.log_val_generations", "see `transferqueue samples RUN`"),
    no_effect("trainer.rollout_data_dir", "see `transferqueue samples RUN`"),
    no_effect("trainer.validation_data_dir", "see `transferqueue samples RUN`"),
    layout("trainer.n_gpus_per_node", default=8),
    layout("trainer.nnodes", default=1),
    layout("rollout.n_gpus_per_node"),
    layout("rollout.nnodes"),
    refused("trainer.critic_warmup", "policy and critic train together from the first step", unless=(0, "0")),
    no_effect("trainer.resume_mode", RESUMES),
    no_effect("trainer.resume_from_path", RESUMES),
    no_effect("trainer.balance_batch", PACKED),
    no_effect("trainer.device", "devices are found"),
    no_effect("trainer.use_legacy_worker_impl", "of verl's workers"),
    mapped(
        "trainer.use_v1", "pacing.mode", lambda v, s: OurValues({}, "read with trainer.v1.trainer_mode"), default=True
    ),
    mapped("trainer.v1.trainer_mode", "pacing.mode", _mode, default="sync"),
    mapped(
        "trainer.v1.sampler.max_off_policy_threshold",
        "pacing.max_staleness",
        only_if(_ahead, "trainer_mode is sync", _behind),
        default=8,
        why="max_off_policy_threshold - 1: verl counts the step itself",
    ),
    mapped(f"{_V1}.colocate_async.num_warmup_batches", "pacing.depth", _batches_ahead("colocate_async"), default=1),
    mapped(f"{_V1}.separate_async.num_warmup_batches", "pacing.depth", _batches_ahead("separate_async"), default=1),
    mapped(
        "trainer.v1.sampler.max_off_policy_strategy",
        "pacing.on_stale",
        only_if(_ahead, "trainer_mode is sync", _on_stale),
        default="drop",
    ),
    no_effect("trainer.v1.sampler.sync_refill_failed_groups", "groups that failed are generated again"),
    refused("trainer.v1.sampler.custom_sampler.*", "a class that chooses rows: tasks choose theirs by a selector"),
    refused("trainer.v1.sampler.sampler_kwargs", "arguments of a sampler of your own", unless=({},)),
    no_effect("trainer.v1.separate_async.parameter_sync_step", "algorithm.minibatches says it"),
    no_effect("trainer.v1.separate_async.hybrid_rollout.*", "devices are not lent; see elastic and `docs elastic`"),
    no_effect("trainer.v1.*", "of verl's own trainer; see pacing.depth"),
    refused("trainer.val_only", "a job trains; see evaluation", unless=(False, "false")),
    no_effect("trainer.default_hdfs_dir", LOGS),
    refused("trainer.checkpoint_callback_class", "a class of yours is not called at a checkpoint"),
    no_effect("trainer.del_local_ckpt_after_load", "see checkpoint.keep"),
    no_effect("trainer.esi_redundant_time", "see checkpoint.every"),
    no_effect("trainer.ray_wait_register_center_timeout", "see trainer.patience_s"),
    refused("distillation.enabled", 'see algorithm.kind = "distill"', unless=(False, "false")),
    no_effect("distillation.*", "read with distillation.enabled alone"),
    *(refused(f"skip.{name}.enable", "every row is generated", unless=(False, "false")) for name in _SKIPS),
    no_effect("skip.*", "read with enable alone"),
    refused("sandbox_fusion.*", "a reward that calls a sandbox: name your function in reward.function"),
    no_effect("transfer_queue.*", OWN_QUEUE),
    no_effect("ray_kwargs.*", "see on and ray.options"),
    no_effect("ray_init.*", "see on and ray.options"),
    no_effect("global_profiler.*", _PROFILED),
    no_effect("hydra.*", "of Hydra"),
    no_effect("*._target_", "the class that verl makes of the table"),
)

VERL: Final = Stack(
    name="verl",
    rules=_RULES,
    always={
        "algorithm.old": ("trainer", "verl's ratio is to log-probs that its trainer computes before the step"),
    },
    entries=("verl.trainer.main_ppo", "main_ppo", "main_dapo", "main_ppo_split"),
    marks=("actor_rollout_ref",),
    overrides=True,
    gpus=_gpus,
    bases=("ppo_trainer", "ppo_megatron_trainer", "transfer_queue_ppo_trainer"),
    rewards=_rewards,
    version="0.8 to main of August 2026",
    extra="drop-in",
    on_queue=(
        "in the environment of verl (0.9 or later) and of its workers; then there",
        "transferqueue drop-in on",
        "and the same command as before: verl's V1 trainer imports transfer_queue, which is now this queue",
        "transferqueue docs drop-in says what ran; examples/stacks/verl.patch gives verl a setting instead",
    ),
)
"""verl's table."""
