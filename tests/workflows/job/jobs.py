"""Job files of each kind, as texts, for tests that need a job and no model."""

from copy import deepcopy

from transferqueue.workflows.job.settings.changes import apply
from transferqueue.workflows.job.settings.read import job_from_values

GRPO = {
    "model": {"path": "models/tiny"},
    "data": {"path": "data/sums.jsonl", "prompt_tokens_max": 32},
    "engine": [{"kind": "transformers"}],
    "reward": [{"function": "my_rewards:exact"}],
    "sampling": {"group_size": 2, "tokens_max": 16},
    "trainer": {"prompts_per_step": 4},
    "algorithm": {"kind": "grpo"},
    "steps": 3,
}
CRITIC = {"critic": {"path": "models/reward"}}
TEACHER = {"teacher": {"path": "models/large"}}
ALONE = {"sampling": {"group_size": 1, "tokens_max": 16}}
KINDS = {
    "grpo": GRPO,
    "grpo-trainer-old": GRPO
    | {"algorithm": {"kind": "grpo", "old": "trainer", "tis_max": 2.0, "minibatches": 2, "kl": 0.1}},
    "dr_grpo": GRPO | {"algorithm": {"kind": "dr_grpo"}},
    "rloo": GRPO | {"algorithm": {"kind": "rloo", "kl": 0.05, "kl_in": "reward"}},
    "reinforce_pp": GRPO | ALONE | {"algorithm": {"kind": "reinforce_pp"}},
    "dapo": GRPO | {"algorithm": {"kind": "dapo", "mask_truncated": True}},
    "gspo": GRPO | {"algorithm": {"kind": "gspo"}},
    "ppo": GRPO | ALONE | CRITIC | {"algorithm": {"kind": "ppo", "kl": 0.05, "kl_in": "reward", "kl_estimator": "k1"}},
    "distill": {name: value for name, value in (GRPO | ALONE | TEACHER).items() if name != "reward"}
    | {"algorithm": {"kind": "distill", "top_k": 4}},
    "sft": {name: value for name, value in GRPO.items() if name not in ("reward", "engine")}
    | {"algorithm": {"kind": "sft"}, "data": {"path": "x", "response": "answer", "prompt_tokens_max": 32}},
    "play": GRPO | {"reward": [], "environment": [{"factory": "my_envs:make"}]},
    "partial": GRPO | {"sampling": {"group_size": 2, "tokens_max": 16, "budget": 4}},
}
"""Plain values of a small job of each kind."""


def job(kind="grpo", *changes):
    """The resolved job of a kind, with changes such as ``trainer.lr=1e-3``."""
    values = deepcopy(KINDS[kind])
    for change in changes:
        apply(values, change)
    return job_from_values(values)
