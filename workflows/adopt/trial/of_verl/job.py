"""The job of a trial of verl: what can be tried, and its settings on a CPU.

Two questions, two answers. The same job runs on the queue that verl has and on this one: `check` refuses what cannot.
The native job trains the same rows: `unmapped` says why it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transferqueue.workflows.adopt.mapping import Settings
from transferqueue.workflows.adopt.stacks.verl import ACTOR, MODEL, REF, ROLLOUT

PACKAGE: Final = "verl"
PATH: Final = f"{MODEL}.path"
PLUGIN: Final = f"{__package__}.cpu_platform"

ENVIRONMENT: Final[Mapping[str, str]] = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine that is registered for it has no CUDA in it
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # each of a dozen processes imports torch and transformers
    "RAY_prestart_worker_first_driver": "0",  # Ray would start an idle process for each of its CPUs
}
"""The environment of verl's driver on a CPU; Ray's processes inherit it. ``VERL_USE_EXTERNAL_MODULES`` names a module
besides: `PLUGIN`, or one that imports it."""


_NOTHING_WRITTEN: Final[Mapping[str, Any]] = {
    "trainer.logger": ["console"],
    "trainer.project_name": "trial",
    "trainer.experiment_name": "trial",
    "trainer.rollout_data_dir": None,
    "trainer.validation_data_dir": None,
    "ray_kwargs.timeline_json_file": None,
    "global_profiler.steps": None,
    f"{ROLLOUT}.trace.backend": None,
    **{f"skip.{kind}.enable": False for kind in ("rollout", "rollout_tq", "async_rollout")},
}
"""Settings of a trial, whose steps are no part of the user's run."""


def on_cpu(workers: int) -> dict[str, Any]:
    """Return verl's settings for `workers` training processes on a CPU, in float32, each with a rollout server."""
    settings: dict[str, Any] = {
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": workers,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "ray_kwargs.ray_init.address": "local",
        "ray_kwargs.ray_init.num_gpus": workers,
        "ray_kwargs.ray_init.num_cpus": 16,
        "ray_kwargs.ray_init.include_dashboard": False,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        f"{ROLLOUT}.name": "transformers",
        f"{ROLLOUT}.full_determinism": True,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.free_cache_engine": False,
        f"{MODEL}.use_remove_padding": False,
        f"{MODEL}.enable_gradient_checkpointing": False,
        f"{MODEL}.override_config.attn_implementation": "sdpa",
        f"{ACTOR}.strategy": "fsdp2",
    }
    for engine in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"):
        settings |= {f"{engine}.use_torch_compile": False, f"{engine}.mixed_precision.param_dtype": "fp32"}
    return settings


def trial_settings(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the settings of verl's side: those of the job, above them those of a CPU with one process of each kind,
    and of a run that writes nothing beyond `folder`."""
    seed = settings["data.seed"]
    return {
        **settings.given,
        **on_cpu(1),
        **_NOTHING_WRITTEN,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "data.seed": 1 if seed is None else seed,  # both runs are to draw the same prompts
        f"{ROLLOUT}.agent.num_workers": 1,
        f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    }


def check(settings: Settings) -> dict[str, str]:
    """Return why verl cannot draw the same rows twice on a CPU: each reason by the setting that would do."""
    mode, strategy = str(settings["trainer.v1.trainer_mode"]), str(settings[f"{ACTOR}.strategy"] or "fsdp")
    prompts = settings.whole("data.train_batch_size")
    needed = {
        "trainer.use_v1=True": (not settings.is_on("trainer.use_v1"), "the trainer before V1 has no transfer_queue"),
        "trainer.v1.trainer_mode=sync": (mode != "sync", f"which rows a step of {mode} trains depends on time"),
        f"{ACTOR}.strategy=fsdp2": (not strategy.startswith("fsdp"), f"{strategy} does not run on a CPU"),
        f"{ACTOR}.ppo_mini_batch_size={prompts}": (
            settings.whole(f"{ACTOR}.ppo_mini_batch_size") != prompts,
            "verl deals the rows of a step to several updates by an order that differs from run to run",
        ),
        f"{MODEL}.lora_rank=0": (
            settings.whole(f"{MODEL}.lora_rank") > 0,
            "adapters begin with random numbers of each side's own",
        ),
        f"{ROLLOUT}.top_k=-1": (settings.whole(f"{ROLLOUT}.top_k") > 0, "the engine on a CPU has no top_k"),
        f"{ROLLOUT}.multi_turn.enable=False": (
            settings.is_on(f"{ROLLOUT}.multi_turn.enable"),
            "an episode calls tools of its own",
        ),
        "reward.reward_model.enable=False": (
            settings.is_on("reward.reward_model.enable"),
            "a reward model needs vLLM or SGLang with a GPU",
        ),
        "algorithm.adv_estimator=grpo": (
            settings["algorithm.adv_estimator"] == "gae",
            "verl's critic has not been run on a CPU",
        ),
    }
    return {setting: why for setting, (is_needed, why) in needed.items() if is_needed}


def unmapped(settings: Settings) -> str:
    """Return why the native job cannot train verl's rows; "" if it can."""
    estimator = settings["algorithm.adv_estimator"]
    if estimator not in ("grpo", "rloo"):
        return f"{estimator} gives each token an advantage, and a trial compares one for each response"
    if settings.whole(f"{ACTOR}.ppo_epochs") > 1:
        return f"several updates of a step have not been compared; give {ACTOR}.ppo_epochs=1"
    if settings.is_on("algorithm.use_kl_in_reward"):
        return "a KL in the reward reads the log-probs of the engine, which recorded rows do not have"
    if settings.is_on("algorithm.filter_groups.enable"):
        return "groups with equal rewards are replaced by ones that the other side does not draw"
    return ""


def compared(settings: Settings) -> frozenset[str]:
    """Return the figures that verl and the native job define alike, for this job."""
    by_token = settings[f"{ACTOR}.loss_agg_mode"] == "token-mean"
    same = by_token and settings.is_on(f"{ACTOR}.use_kl_loss")
    return frozenset({"reward", "loss", "gradient_norm", "lr", *(("kl",) if same else ())})
