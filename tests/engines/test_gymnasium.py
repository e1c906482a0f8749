"""A real environment of Gymnasium, played by a real model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engines.tiny import model

gymnasium = pytest.importorskip("gymnasium", reason="make test-engines installs it")

import transferqueue as tq
from transferqueue.adapters.engines.transformers import TransformersGenerator
from transferqueue.adapters.protocols import Sampling
from transferqueue.adapters.stages.environments import Episodes
from transferqueue.workflows.flow.loop.runner import run_stage
from transferqueue.workflows.flow.stage import Stage

ROWS = 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the stack under test
def test_frozen_lake() -> None:
    stage = Episodes(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=False),
        TransformersGenerator(model(0), version=2),
        Sampling(tokens_max=1),
        encode=lambda observation, turn: [5 + int(observation)],
        decode=lambda ids: int(ids[0]) % 4,
        turns_max=20,
        seed="seed",
    )
    task = tq.Task("play", needs=tuple(stage.needs), gives=tuple(stage.gives))
    with tq.connect() as queue:
        table = queue.create_table("episodes", tasks=[task], retention=tq.Manual())
        table.put(seed=np.arange(ROWS))
        table.seal()
        run_stage(table, Stage(task=task, rows=ROWS, stall_s=60, failures_max=1), stage, emit=print)
        rows = table.read()
        assert table.audit().rows_done == ROWS
        assert set(rows.policy_version.tolist()) == {2}
        turns = rows["turns"].list()
        for ids, drawn, reward, n in zip(
            rows["input_ids"], rows["loss_mask"], rows["rewards"].list(), turns, strict=True
        ):
            assert drawn.tolist() == [False, True] * n
            assert reward == lake(ids[1::2] % 4)


def lake(actions: Any) -> float:
    """What the same actions are worth, played again."""
    environment = gymnasium.make("FrozenLake-v1", is_slippery=False)
    environment.reset(seed=0)
    rewards = [float(environment.step(int(action))[1]) for action in actions]
    environment.close()
    return sum(rewards)
