"""Rollout processes take new weights one after another."""

from __future__ import annotations

import pytest

import transferqueue as tq

pytest.importorskip("torch")

from transferqueue.workflows.grpo.learning.settings import LearningSettings
from transferqueue.workflows.grpo.stages.model_stages import Policy


def test_who_is_not_let_goes_on_with_the_weights_it_has() -> None:
    with tq.connect() as queue, tq.connect(queue.address) as other:
        policy = Policy(LearningSettings(), queue.weights("policy"))
        queue.weights("policy").publish(0, policy.model.state_dict())
        with other.weights("policy").turn():
            assert not policy.refresh_in_turn(0.0)
            assert policy.version == -1
            with pytest.raises(tq.DeadlineExceeded, match="update at once"):
                policy.refresh_in_turn(0.01)
        assert policy.refresh_in_turn(0.0)
        assert policy.version == 0
        assert not policy.refresh_in_turn(0.0)  # nothing newer
