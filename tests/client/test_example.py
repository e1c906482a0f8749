# fmt: off
"""The example of the design, as it stands there; only the tensors are filled in."""

from __future__ import annotations

import pytest
import torch

import transferqueue as tq


@pytest.mark.slow
def test_the_example_of_the_design() -> None:
    prompts = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)] * 32, layout=torch.jagged)
    responses = torch.nested.nested_tensor([torch.arange(7), torch.arange(2)] * 32, layout=torch.jagged)
    g = torch.arange(8).repeat_interleave(8)
    scores = torch.rand(64)

    def step(response_ids: torch.Tensor, rewards: torch.Tensor) -> float:
        assert response_ids.is_nested
        assert rewards.shape == (64,)
        return float(response_ids.values().float().mean() * rewards.sum())

    with tq.connect() as queue:                       # embedded server in this process; others join queue.address
        rollouts = queue.create_table(
            "rollouts",
            tasks=[tq.Task("reward", needs=["response_ids"]),
                   tq.Task("train", needs=["response_ids", "rewards"], groups=tq.Complete())],
            limits=tq.Limits(rows=4096, bytes="8GiB"),
            pacing=tq.Pacing("train", batch_rows=512, depth=1, max_staleness=1),
        )
        rows = rollouts.put(prompt_ids=prompts, response_ids=responses, group_id=g, group_size=8, policy_version=7)
        rollouts.update(rows, rewards=scores)                                # late columns
        with rollouts.lease("train", rows=64, timeout_s=30) as batch:        # clean exit acks, an exception releases
            loss = step(batch["response_ids"].nested(), batch["rewards"].torch())
        rollouts.seal()                                                      # consumers drain, then EndOfTable

        assert loss > 0
        with rollouts.lease("reward", rows=64) as batch:
            assert len(batch) == 64
        with pytest.raises(tq.EndOfTable):
            rollouts.lease("reward", rows=1, timeout_s=5)
        assert rollouts.audit().rows_done == 64
