"""What each kind of algorithm implies, against the table of the papers."""

import pytest

from transferqueue.workflows.job.settings.defaults import KINDS, advantage_columns, columns_of, filled, tasks_of
from transferqueue.workflows.job.settings.job import AlgorithmSettings


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_open(kind):
    settings = filled(AlgorithmSettings(kind=kind))
    assert settings.std
    assert settings.ratio
    assert settings.aggregate
    assert 0 < settings.clip_low <= settings.clip_high
    assert settings.whiten is not None
    assert settings.filter_equal is not None
    assert filled(settings) == settings


def test_what_is_set_stays():
    given = AlgorithmSettings(
        kind="dapo",
        std="population",
        aggregate="rows",
        ratio="sequence",
        clip_low=0.1,
        clip_high=0.3,
        whiten=True,
        filter_equal=False,
    )
    assert filled(given) == given


def test_only_some_kinds_clip_wider_above():
    assert filled(AlgorithmSettings(kind="dapo")).clip_high == 0.28
    assert filled(AlgorithmSettings(kind="ppo", clip_low=0.1)).clip_high == 0.1
    gspo = filled(AlgorithmSettings(kind="gspo"))
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)


def test_tasks_and_columns_follow_the_algorithm():
    ppo = AlgorithmSettings(kind="ppo", kl=0.05, kl_in="reward", old="trainer", minibatches=4)
    assert tasks_of(ppo) == (
        "rollout",
        "reward",
        "reference",
        "proximal",
        "value",
        "advantage",
        "train",
        "train_critic",
    )
    assert columns_of(ppo)["advantage"] == ("rewards", "response_ids", "prox_logprobs", "ref_logprobs", "values")
    assert columns_of(ppo)["train_critic"] == ("prompt_ids", "response_ids", "values", "returns")
    assert advantage_columns(ppo) == ("token_advantages", "returns")

    distill = AlgorithmSettings(kind="distill")
    assert tasks_of(distill) == ("rollout", "teacher", "train")
    assert "teacher_logprobs" in columns_of(distill)["train"]

    assert columns_of(AlgorithmSettings(kind="sft")) == {"train": ("prompt_ids", "response_ids")}
    kl = AlgorithmSettings(kind="grpo", kl=0.01, mask_truncated=True)
    assert columns_of(kl)["train"][-2:] == ("advantages", "finish_reason")
    assert "ref_logprobs" in columns_of(kl)["train"]
    assert "ref_logprobs" not in columns_of(kl)["advantage"]
